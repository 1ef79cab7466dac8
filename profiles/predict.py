"""Predictions of one profile: the law times the residual, with intervals and coverage.

    pure pass   = law · factor, the factor held at the edge of the measured box
    mixed pass  = max(law · factor, its prompts alone, its decodes alone)

The factor's axes are sums over the pass. A prediction of whole passes never falls when a request
joins, however short, when one grows, or when the longest decode does; nor when the same KV tokens
are split among more decodes. That holds up to four times the measured box, for fitted profiles.
A profile of attention alone keeps to less: it rises with a count at kept mean lengths and with
lengths at a kept count. Predictions are finite everywhere, and 0 for an empty pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from passtime.profiles.document import (
    REGIME_AXES,
    TABLE_AXES,
    AxisName,
    Coefficients,
    EngineFacts,
    Intervals,
    Profile,
    Range,
    Regime,
    Residual,
    TableAxis,
)
from passtime.profiles.law import ARRAYS, FLOATS, Law, Work
from passtime.profiles.shapes import ModelShape
from passtime.profiles.table import Table
from passtime.sched.timing import FloatArray, PassShape

Coverage: TypeAlias = Literal["inside", "held", "extrapolated"]
StrArray: TypeAlias = npt.NDArray[np.str_]

HELD = 4.0  # up to this factor beyond the box a query is "held", further out "extrapolated"

_TAGS: tuple[Coverage, ...] = ("inside", "held", "extrapolated")


class Interval(NamedTuple):
    """A prediction in ms between its bounds."""

    low_ms: float
    predicted_ms: float
    high_ms: float


class PassColumns(NamedTuple):
    """Many passes at once: the fields of PassShape that times depend on, one entry per pass."""

    prefill_requests: FloatArray
    prefill_new_tokens: FloatArray
    prefill_prefix_tokens: FloatArray
    prefill_pairs: FloatArray
    decode_requests: FloatArray
    decode_kv_tokens: FloatArray
    decode_kv_max: FloatArray

    def take(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> PassColumns:
        """The chosen passes."""
        return PassColumns(*(column[chosen] for column in self))


def prefill_shape(batch_size: int, mean_isl: int, mean_prefix: int) -> PassShape:
    """The pass of ``batch_size`` equal prompts that a prefill call stands for."""
    new = max(0, mean_isl - mean_prefix)
    pairs = new * mean_prefix + new * (new + 1) // 2
    count = batch_size if new else 0
    return PassShape(count, count * new, count * mean_prefix, count * pairs, 0, 0, 0, 0)


def decode_shape(batch_size: int, active_kv_tokens: int) -> PassShape:
    """The pass that a decode call stands for: equal lengths."""
    longest = -(-active_kv_tokens // batch_size) if batch_size else 0
    return PassShape(0, 0, 0, 0, batch_size, active_kv_tokens, longest, 0)


class Predictor:
    """The parts of a profile made ready to answer: ms per unit, tables as flat lists."""

    def __init__(
        self,
        *,
        model: ModelShape,
        engine: EngineFacts,
        coefficients: Coefficients,
        box: Mapping[Regime, Mapping[AxisName, Range]],
        residual: Mapping[Regime, Residual],
        intervals: Intervals | None = None,
    ) -> None:
        """Build the tables; a few milliseconds."""
        self.law = Law(Work.of(model, timed_part=engine.timed_part), coefficients, engine)
        self.box, self._intervals = box, intervals
        self._by_means = engine.timed_part == "attention"
        self._graphs = [float(size) for size in sorted(engine.graph_sizes)]
        factors = {regime: Table.of_factors(table) for regime, table in residual.items()}
        self._spreads = {regime: Table.of_spreads(table) for regime, table in residual.items()}
        self._prefill = factors.get("prefill")
        self._decode = factors.get("decode")
        self._mixed = factors.get("mixed")

    @classmethod
    def of(cls, profile: Profile) -> Predictor:
        """The predictor of a document."""
        return cls(
            model=profile.model,
            engine=profile.engine,
            coefficients=profile.coefficients,
            box=profile.box,
            residual=profile.residual,
            intervals=profile.intervals,
        )

    def prefill_ms(self, requests: float, new: float, prefix: float, pairs: float) -> float:
        """Time of prompts alone; all arguments floats, sums over the requests."""
        if requests <= 0.0 or new <= 0.0:
            return 0.0
        time = self.law.prefill_ms(requests, new, prefix, pairs, FLOATS)
        if self._prefill is None:
            return time
        return time * self._prefill.at3(requests, new, pairs / new if self._by_means else pairs)

    def decode_ms(self, requests: float, kv_tokens: float, kv_max: float | None = None) -> float:
        """Time of decodes alone; requests are padded up to the next graph size.

        ``kv_max`` is the longest decode, None if all are equal.
        """
        if requests <= 0.0:
            return 0.0
        padded, law = self._padded(requests), self.law
        effective = kv_tokens
        if kv_max is not None:
            effective = law.effective_kv(requests, kv_tokens, kv_max)
        time = law.decode_ms(padded, effective, FLOATS)
        if self._decode is None:
            return time
        return time * self._decode.at2(padded, effective / padded if self._by_means else effective)

    def decode_many_ms(self, requests: float, kv_tokens: FloatArray) -> FloatArray:
        """:meth:`decode_ms` for many KV totals of one batch, bit for bit."""
        if requests <= 0.0:
            return np.zeros(len(kv_tokens))
        batch = np.full(len(kv_tokens), self._padded(requests))
        time = self.law.decode_ms(batch, kv_tokens, ARRAYS)
        if self._decode is None:
            return time
        return time * self._decode.at_many(batch, self._along(batch, kv_tokens))

    def pass_ms(self, shape: PassShape) -> float:
        """Time of a whole pass."""
        requests, new = float(shape.prefill_requests), float(shape.prefill_new_tokens)
        prefix, pairs = float(shape.prefill_prefix_tokens), float(shape.prefill_pairs)
        decodes, kv_tokens = float(shape.decode_requests), float(shape.decode_kv_tokens)
        kv_max = float(shape.decode_kv_max)
        prompts_alone = self.prefill_ms(requests, new, prefix, pairs)
        decodes_alone = self.decode_ms(decodes, kv_tokens, kv_max)
        if prompts_alone == 0.0 or decodes_alone == 0.0:
            return prompts_alone + decodes_alone
        effective = self.law.effective_kv(decodes, kv_tokens, kv_max)
        time = self.law.mixed_ms(requests, new, prefix, pairs, decodes, effective, kv_max, FLOATS)
        if self._mixed is not None:
            if self._by_means:
                pairs, effective = pairs / new, effective / decodes
            time *= self._mixed.at4(new, pairs, decodes, effective)
        return max(time, prompts_alone, decodes_alone)

    def pass_many_ms(self, passes: PassColumns) -> FloatArray:
        """:meth:`pass_ms` for many passes, bit for bit."""
        has_prompts = (passes.prefill_requests > 0) & (passes.prefill_new_tokens > 0)
        has_decodes = passes.decode_requests > 0
        times = np.zeros(len(has_prompts))
        if has_prompts.any():
            n, new, prefix, pairs, *_ = passes.take(has_prompts)
            alone = self.law.prefill_ms(n, new, prefix, pairs, ARRAYS)
            if self._prefill is not None:
                alone = alone * self._prefill.at_many(n, new, self._along(new, pairs))
            times[has_prompts] = alone
        if has_decodes.any():
            *_, decodes, kv_tokens, longest = passes.take(has_decodes)
            effective = self.law.effective_kv(decodes, kv_tokens, longest)
            padded = np.array([self._padded(batch) for batch in decodes.tolist()])
            alone = self.law.decode_ms(padded, effective, ARRAYS)
            if self._decode is not None:
                alone = alone * self._decode.at_many(padded, self._along(padded, effective))
            times[has_decodes] = np.maximum(times[has_decodes], alone)
        both = has_prompts & has_decodes
        if both.any():
            n, new, prefix, pairs, decodes, kv_tokens, longest = passes.take(both)
            effective = self.law.effective_kv(decodes, kv_tokens, longest)
            mixed = self.law.mixed_ms(n, new, prefix, pairs, decodes, effective, longest, ARRAYS)
            if self._mixed is not None:
                mixed = mixed * self._mixed.at_many(
                    new, self._along(new, pairs), decodes, self._along(decodes, effective)
                )
            times[both] = np.maximum(times[both], mixed)
        return times

    def interval(self, shape: PassShape) -> Interval | None:
        """The prediction with its bounds; None if the profile carries no intervals."""
        intervals = self._intervals
        if intervals is None:
            return None
        time, regime = self.pass_ms(shape), regime_of(shape)
        table = self._spreads.get(regime)
        spread = intervals.floor
        if table is not None:
            spread = max(spread, float(table.at_many(*self._place(regime, shape))[0]))
        half = spread * intervals.width.get(regime, max(intervals.width.values(), default=1.0))
        if self.coverage(shape) != "inside":
            half *= intervals.beyond
        factor = float(np.exp(half))
        return Interval(time / factor, time, time * factor)

    def coverage(self, shape: PassShape) -> Coverage:
        """Whether the pass lies in the measured box of its regime, near it, or far out."""
        regime = regime_of(shape)
        columns = _columns(regime, shape)
        return _TAGS[int(self._excess(regime, columns)[0])]

    def coverage_decode_many(self, requests: int, kv_tokens: FloatArray) -> StrArray:
        """:meth:`coverage` of many decode passes of one batch."""
        batch = np.full(len(kv_tokens), float(requests))
        tags: StrArray = np.array(_TAGS)[
            self._excess("decode", (batch, kv_tokens / max(requests, 1)))
        ]
        return tags

    def _excess(self, regime: Regime, columns: tuple[FloatArray, ...]) -> npt.NDArray[np.int64]:
        box = self.box.get(regime)
        if box is None:
            return np.full(len(columns[0]), 2)
        beyond = np.ones(len(columns[0]))
        for name, values in zip(REGIME_AXES[regime], columns, strict=True):
            beyond = np.maximum(beyond, _times_beyond(box[name], values))
        outside: npt.NDArray[np.int64] = (beyond > 1.0).astype(np.int64) + (beyond > HELD)
        return outside

    def _along(self, count: FloatArray, total: FloatArray) -> FloatArray:
        """Where a total lies on its axis of a table."""
        return total / count if self._by_means else total

    def _place(self, regime: Regime, shape: PassShape) -> list[FloatArray]:
        """Where a pass lies in a table."""
        sizes: dict[TableAxis, float] = {
            "prefill_requests": shape.prefill_requests,
            "prefill_new_tokens": shape.prefill_new_tokens,
            "prefill_pairs": shape.prefill_pairs,
            "prompt_context": shape.prefill_pairs / max(shape.prefill_new_tokens, 1),
            "decode_requests": shape.decode_requests,
            "decode_kv_tokens": shape.decode_kv_tokens,
            "decode_context": shape.decode_kv_tokens / max(shape.decode_requests, 1),
        }
        names = TABLE_AXES["attention" if self._by_means else "pass"][regime]
        return [np.array([float(sizes[name])]) for name in names]

    def _padded(self, requests: float) -> float:
        graphs = self._graphs
        if not graphs or requests > graphs[-1]:
            return requests
        return graphs[bisect_left(graphs, requests)]


def regime_of(shape: PassShape) -> Regime:
    """Prompts, decodes, or both."""
    if not shape.decode_requests:
        return "prefill"
    return "mixed" if shape.prefill_new_tokens else "decode"


def _columns(regime: Regime, shape: PassShape) -> tuple[FloatArray, ...]:
    sizes: dict[AxisName, float] = {
        "prompts": shape.prefill_requests,
        "new_tokens": shape.prefill_new_tokens,
        "prompt_context": shape.prefill_pairs / max(shape.prefill_new_tokens, 1),
        "decodes": shape.decode_requests,
        "decode_context": shape.decode_kv_tokens / max(shape.decode_requests, 1),
    }
    return tuple(np.array([float(sizes[name])]) for name in REGIME_AXES[regime])


def _times_beyond(edge: Range, values: FloatArray) -> FloatArray:
    """1 inside the range, else by which factor the value lies beyond it."""
    above = values / max(edge.high, 1.0)
    below = max(edge.low, 1.0) / np.maximum(values, 1.0)
    beyond: FloatArray = np.maximum(above, below)
    return beyond
