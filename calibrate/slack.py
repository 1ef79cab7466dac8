"""How far a law lets the factor on it fall: the slack within which law · factor still rises.

The law's own relative slope along an axis, less a margin, is what ln(factor) may lose per unit of
size: inside the box and, held at its edge, to four times its sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from passtime.calibrate.tabulate import PARTS, TOTALS, Box, Lines, mesh, sums_at_nodes
from passtime.profiles.document import AxisName, Regime, TableAxis
from passtime.profiles.law import ARRAYS, Law
from passtime.profiles.predict import HELD, PassColumns
from passtime.sched.timing import FloatArray

_SLOPE_MARGIN = 0.9


def slack(law: Law, regime: Regime, lines: Lines, box: Box) -> list[FloatArray]:
    """How far ln(factor) may fall from node to node along each axis, given the law's own rise."""
    reach = _Reach.of(box)
    share = _SLOPE_MARGIN * (1.0 - law.tile_share if law.tile else 1.0)
    wider = {name: reach.line(name, line) for name, line in lines.items()}
    shape = [len(line) for line in wider.values()]
    found = []
    slopes = _relative_slopes(law, regime, wider, reach)
    for axis, (line, slope) in enumerate(zip(lines.values(), slopes, strict=True)):
        slope = slope.reshape(shape)
        for other in range(len(shape)):
            if other != axis:
                slope = _between(slope, other)
        along = np.moveaxis(slope, axis, 0)[1:-1]
        smallest = np.minimum(along[1:], along[:-1])
        width = np.diff(np.array(line)).reshape(-1, *[1] * (len(shape) - 1))
        allowed = np.log1p(share * width * np.maximum(smallest, 0.0))
        found.append(np.moveaxis(allowed, 0, axis))
    return found


@dataclass(frozen=True, slots=True)
class _Reach:
    """The largest sizes at which predictions must rise: four times the largest of any regime.

    For the new tokens of a pass, four times as many prompts and each four times as long.
    """

    sizes: Mapping[AxisName, float]

    @classmethod
    def of(cls, box: Box) -> _Reach:
        sizes: dict[AxisName, float] = {}
        for axes in box.values():
            for axis, edge in axes.items():
                far = HELD**2 if axis == "new_tokens" else HELD
                sizes[axis] = max(sizes.get(axis, far), far * edge.high)
        return cls(sizes)

    def line(self, name: TableAxis, nodes: Sequence[float]) -> list[float]:
        """The nodes of a sum between the smallest there is and the largest."""
        largest = math.prod(self.sizes[axis] for axis in PARTS[name])
        return [min(1.0, nodes[0] / 2.0), *nodes, largest]

    def passes(self, regime: Regime, lines: Lines) -> Iterator[PassColumns]:
        """One pass per node: what its sums leave open as small, and as large, as it may be."""
        sums = sums_at_nodes(lines)
        zero = np.zeros(len(next(iter(sums.values()))))
        new, pairs = sums.get("prefill_new_tokens", zero), sums.get("prefill_pairs", zero)
        decodes, kv_tokens = sums.get("decode_requests", zero), sums.get("decode_kv_tokens", zero)
        few = many = sums.get("prefill_requests", zero)
        longest = [zero]
        if regime == "mixed":
            few, many = zero + 1.0, zero + self.sizes.get("prompts", HELD)
            longest = [zero, zero + self.sizes["decode_context"]]
        least = np.maximum(0.0, pairs / np.maximum(new, 1.0) - 0.5 * (new + 1.0))
        most = np.minimum(pairs, many * self.sizes.get("prompt_context", 0.0))
        equal = np.minimum(most, np.maximum(0.0, few * least + 0.5 * new * (few - 1.0)))
        beside = [(few, least), (many, most)] if "prefill_pairs" in lines else [(few, equal)]
        for (count, prefix), kv_max in itertools.product(beside, longest):
            yield PassColumns(count, new, prefix, pairs, decodes, kv_tokens, kv_max)


def _relative_slopes(law: Law, regime: Regime, lines: Lines, reach: _Reach) -> list[FloatArray]:
    """∂law/∂size over law at every node along each axis, the smallest there may be."""
    step, smallest = 1e-4, list[FloatArray]()
    sizes = dict(zip(lines, mesh(*lines.values()), strict=True))
    for passes in reach.passes(regime, lines):
        smooth = _without_kinks(law, passes)
        time = _regime_times(smooth, regime, passes)
        slopes: list[FloatArray] = []
        for name in lines:
            grown = {one: getattr(passes, one) * (1.0 + step) for one in _moved(name, lines)}
            more = _regime_times(smooth, regime, passes._replace(**grown))
            slopes.append((more - time) / (step * sizes[name] * time))
        smallest = [np.minimum(*pair) for pair in zip(smallest or slopes, slopes, strict=True)]
    return smallest


def _moved(name: TableAxis, lines: Lines) -> list[TableAxis]:
    """The sums that move along an axis: a mean moves its total, a count the total of its mean."""
    totals = [
        total for mean, (count, total) in TOTALS.items() if mean in lines and name in (mean, count)
    ]
    return totals if name in TOTALS else [name, *totals]


def _without_kinks(law: Law, passes: PassColumns) -> Law:
    """The law without tiles, and with experts that rise from ``passes`` as in the octave above."""
    smooth, experts = copy(law), law.experts
    smooth.tile = None
    if experts is not None:
        at = passes.prefill_new_tokens + passes.decode_requests
        smooth.experts = lambda tokens: (
            experts(at) + 0.5 * (experts(2.0 * tokens) - experts(2.0 * at))
        )
    return smooth


def _regime_times(law: Law, regime: Regime, passes: PassColumns) -> FloatArray:
    if regime == "prefill":
        return law.prefill_ms(*passes[:4], ARRAYS)
    if regime == "decode":
        return law.decode_ms(passes[4], passes[5], ARRAYS)
    return law.mixed_ms(*passes, ARRAYS)


def _between(slope: FloatArray, axis: int) -> FloatArray:
    """Slopes of every inner line along another axis, small enough to hold between lines, too.

    Half way from a line to the next the mean of two factors meets the mean of two laws: slopes
    r : 1 hold there if both keep to the share 4 / (2 + r + 1/r). Beyond the ends the factor is
    that of the end.
    """
    lines = np.maximum(np.moveaxis(slope, axis, 0), 1e-300)
    ratio = lines[2:-1] / lines[1:-2]
    share = np.ones_like(lines)
    kept = 4.0 / (2.0 + ratio + 1.0 / ratio)
    share[2:-1] = np.minimum(share[2:-1], kept)
    share[1:-2] = np.minimum(share[1:-2], kept)
    held = lines * share
    held[1] = np.minimum(held[1], lines[0])
    held[-2] = np.minimum(held[-2], lines[-1])
    return np.moveaxis(held[1:-1], 0, axis)
