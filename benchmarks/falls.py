"""How often a prediction falls although a pass only grew: random passes, and steps that add work.

Sizes go from the smallest there are to four times the measured box. A step adds a request, or
tokens to one; a fall is a time lower than before by more than rounding. Prefixes end at the
longest context of the box, four times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from passtime.profiles.predict import HELD, PassColumns, Predictor
from passtime.sched.timing import FloatArray

ROUNDING = 1e-12

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of a sweep."""

    prompts: float
    new_tokens: float
    context: float
    decodes: float
    decode_context: float

    @classmethod
    def of(cls, predictor: Predictor, times: float = HELD) -> Limits:
        """``times`` the largest of every axis in any regime's box."""
        edges = {"prompts": 1.0}
        for axes in predictor.box.values():
            for name, edge in axes.items():
                edges[name] = max(edges.get(name, 1.0), edge.high)
        return cls(
            *(
                times * edges.get(name, 64.0)
                for name in ("prompts", "new_tokens", "prompt_context", "decodes", "decode_context")
            )
        )


@dataclass(frozen=True, slots=True)
class Passes:
    """Random passes: two groups of equal prompts, and decodes, of which one may be longest."""

    counts: FloatArray  # prompts in each group, shape (2, passes)
    new: FloatArray  # of each prompt
    prefix: FloatArray
    decodes: FloatArray
    kv_tokens: FloatArray
    kv_max: FloatArray

    @classmethod
    def drawn(cls, rng: Rng, count: int, limits: Limits) -> Passes:
        """A third each without prompts, without decodes, and with both."""
        kind = rng.integers(0, 3, count)
        first = _sizes(rng, count, limits.prompts) * (kind != 0)
        second = np.floor(rng.random(count) * (limits.prompts - first + 1)) * (
            rng.random(count) < 0.7
        )
        counts = np.stack([first, second * (kind != 0)])
        room = limits.new_tokens / np.maximum(counts.sum(axis=0), 1.0)
        new = np.stack([_sizes(rng, count, np.maximum(room, 1.0)) for _ in range(2)])
        prefix = np.stack(
            [
                np.floor(_sizes(rng, count, limits.context) * (rng.random(count) < 0.6))
                for _ in range(2)
            ]
        )
        decodes = _sizes(rng, count, limits.decodes) * (kind != 1)
        mean = _sizes(rng, count, limits.decode_context)
        longest = np.where(rng.random(count) < 0.5, mean, _sizes(rng, count, limits.decode_context))
        kv_max = np.clip(longest, mean, decodes * mean - (decodes - 1.0))
        return cls(counts, new, prefix, decodes, decodes * mean, np.where(decodes > 0, kv_max, 0.0))

    def columns(self) -> PassColumns:
        """What predictions are asked with."""
        n, new, prefix = self.counts, self.new, self.prefix
        pairs = (n * (new * prefix + new * (new + 1.0) / 2.0)).sum(axis=0)
        return PassColumns(
            n.sum(axis=0),
            (n * new).sum(axis=0),
            (n * prefix).sum(axis=0),
            pairs,
            self.decodes,
            self.kv_tokens,
            self.kv_max,
        )


def _sizes(rng: Rng, count: int, highest: float | FloatArray) -> FloatArray:
    """Whole sizes from 1, even in logarithm."""
    sizes: FloatArray = np.floor(np.exp(rng.random(count) * np.log(highest)))
    return sizes


Step = Callable[[Passes, Rng, Limits], tuple[PassColumns, PassColumns]]


def _one_more_prompt(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before = passes.columns()
    count = len(passes.decodes)
    new = np.where(rng.random(count) < 0.4, 1.0, _sizes(rng, count, limits.new_tokens / 4.0))
    prefix = np.where(rng.random(count) < 0.5, 0.0, _sizes(rng, count, limits.context))
    return before, before._replace(
        prefill_requests=before.prefill_requests + 1.0,
        prefill_new_tokens=before.prefill_new_tokens + new,
        prefill_prefix_tokens=before.prefill_prefix_tokens + prefix,
        prefill_pairs=before.prefill_pairs + new * prefix + new * (new + 1.0) / 2.0,
    )


def _more_new_tokens(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before, some = passes.columns(), passes.counts[0] > 0
    new, prefix = passes.new[0], passes.prefix[0]
    more = _sizes(rng, len(some), new + 1.0) * some
    return before, before._replace(
        prefill_new_tokens=before.prefill_new_tokens + more,
        prefill_pairs=before.prefill_pairs + more * (prefix + new) + more * (more + 1.0) / 2.0,
    )


def _more_prefix(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before, some = passes.columns(), passes.counts[0] > 0
    more = _sizes(rng, len(some), np.maximum(passes.prefix[0], 16.0)) * some
    return before, before._replace(
        prefill_prefix_tokens=before.prefill_prefix_tokens + more,
        prefill_pairs=before.prefill_pairs + more * passes.new[0],
    )


def _one_more_decode(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before = passes.columns()
    length = _sizes(rng, len(passes.decodes), limits.decode_context)
    return before, before._replace(
        decode_requests=before.decode_requests + 1.0,
        decode_kv_tokens=before.decode_kv_tokens + length,
        decode_kv_max=np.maximum(before.decode_kv_max, length),
    )


def _split_decodes(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    """One more decode at the same KV total and maximum."""
    before = passes.columns()
    some = (passes.decodes > 0) & (passes.kv_tokens > passes.decodes)
    return before, before._replace(decode_requests=before.decode_requests + some)


def _longer_kv(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before = passes.columns()
    room = np.maximum(passes.decodes * passes.kv_max - passes.kv_tokens, 0.0)
    return before, before._replace(
        decode_kv_tokens=before.decode_kv_tokens + np.floor(room * rng.random(len(room)))
    )


def _longer_maximum(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
    before, some = passes.columns(), passes.decodes > 1
    more = _sizes(rng, len(some), np.maximum(passes.kv_max, 2.0)) * some
    return before, before._replace(decode_kv_max=before.decode_kv_max + more)


def _equal_prompts(count: FloatArray, new: FloatArray, prefix: FloatArray) -> PassColumns:
    none = np.zeros(len(count))
    return PassColumns(
        count,
        count * new,
        count * prefix,
        count * (new * prefix + new * (new + 1.0) / 2.0),
        none,
        none,
        none,
    )


def _prefill_door(more_count: bool, more_new: bool, more_prefix: bool) -> Step:
    def step(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
        count, new, prefix = np.maximum(passes.counts[0], 1.0), passes.new[0], passes.prefix[0]
        before = _equal_prompts(count, new, prefix)
        grown = _equal_prompts(
            count + more_count,
            new + more_new * _sizes(rng, len(new), new + 1.0),
            prefix + more_prefix * _sizes(rng, len(new), prefix + 16.0),
        )
        return before, grown

    return step


def _decode_door(more_count: bool, more_kv: bool) -> Step:
    def step(passes: Passes, rng: Rng, limits: Limits) -> tuple[PassColumns, PassColumns]:
        batch = np.maximum(passes.decodes, 1.0)
        kv_tokens = np.maximum(passes.kv_tokens, batch + 1.0)
        grown_batch = batch + more_count
        grown_kv = kv_tokens + more_kv * _sizes(rng, len(batch), kv_tokens)
        none = np.zeros(len(batch))
        return (
            PassColumns(none, none, none, none, batch, kv_tokens, kv_tokens / batch),
            PassColumns(none, none, none, none, grown_batch, grown_kv, grown_kv / grown_batch),
        )

    return step


STEPS: Mapping[str, Step] = {
    "prefill door: one more prompt": _prefill_door(True, False, False),
    "prefill door: longer prompts": _prefill_door(False, True, False),
    "prefill door: longer prefixes": _prefill_door(False, False, True),
    "decode door: one more decode, same KV total": _decode_door(True, False),
    "decode door: more KV": _decode_door(False, True),
    "pass door: one more prompt": _one_more_prompt,
    "pass door: new tokens": _more_new_tokens,
    "pass door: prefix": _more_prefix,
    "pass door: one more decode": _one_more_decode,
    "pass door: one more decode, same KV total": _split_decodes,
    "pass door: more KV": _longer_kv,
    "pass door: longer longest decode": _longer_maximum,
}


@dataclass(frozen=True, slots=True)
class Falls:
    """What one kind of step did."""

    steps: int
    falls: int
    worst_percent: float
    unusable: int  # times that are not finite or not > 0


def falls(predictor: Predictor, *, steps: int, seed: int) -> dict[str, Falls]:
    """Every kind of step, tried ``steps`` times."""
    limits, found = Limits.of(predictor), {}
    for number, (name, step) in enumerate(STEPS.items()):
        rng = np.random.default_rng([seed, number])
        before, after = step(Passes.drawn(rng, steps, limits), rng, limits)
        low, high = predictor.pass_many_ms(before), predictor.pass_many_ms(after)
        fall = np.where(high < low * (1.0 - ROUNDING), 1.0 - high / low, 0.0)
        times = np.concatenate([low, high])
        found[name] = Falls(
            steps=steps,
            falls=int((fall > 0.0).sum()),
            worst_percent=float(100.0 * fall.max(initial=0.0)),
            unusable=int((~(np.isfinite(times) & (times > 0.0))).sum()),
        )
    return found
