"""From a residual surface to a table that predictions can use: small, and monotone with the law.

The table's axes are sums over a pass: whatever joins a pass or grows in it raises sums and nothing
else (of attention alone means, see ``TABLE_AXES``). The surface is evaluated on a tensor grid of
them, finer along axes where it changes fast, and held where a mean length leaves the box. Then the
factor is moved, as little as possible, to where law · factor rises along every axis: the law's own
slope bounds how fast the factor may fall, inside the box and, held at its edge, to four times its
sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from passtime.calibrate.residual import Surface
from passtime.profiles.document import (
    TABLE_AXES,
    Axis,
    AxisName,
    Range,
    Regime,
    Residual,
    TableAxis,
    TimedPart,
)
from passtime.profiles.law import ARRAYS, Law
from passtime.profiles.predict import HELD, PassColumns
from passtime.sched.timing import FloatArray

_NODES = {2: 2500, 3: 8000, 4: 10_000}  # of a table with so many axes
_FINEST, _COARSEST = 1.0 / 8.0, 2.0  # octaves between neighbouring nodes
_LARGEST_LOG = 2.5
_PROJECTIONS, _SETTLED = 15, 1e-3
_SLOPE_MARGIN = 0.9
_DOUBT = 1.0  # a node outside the box yields to those inside: power of its distance
_LATTICE = 1e5  # steps of ln(factor) in the document

Box = Mapping[Regime, Mapping[AxisName, Range]]


def tabulate(
    surface: Surface, regime: Regime, box: Box, law: Law, timed_part: TimedPart
) -> Residual:
    """The residual of one regime on a grid over its box, monotone together with ``law``."""
    names, edges = TABLE_AXES[timed_part][regime], box[regime]
    nodes = _nodes(
        [_range(edges, name) for name in names], [_length(surface, name, names) for name in names]
    )
    lines = dict(zip(names, nodes, strict=True))
    shape = tuple(len(line) for line in nodes)
    mean, spread, beyond = _on_grid(surface, lines, edges)
    slack = _slack(law, regime, lines, _Reach.of(box))
    factor = monotone(
        np.clip(mean, -_LARGEST_LOG, _LARGEST_LOG).reshape(shape),
        (spread * np.minimum(beyond, 10.0) ** _DOUBT).reshape(shape) ** -2,
        slack,
    )
    return Residual(
        axes=tuple(
            Axis(name=name, nodes=tuple(line)) for name, line in zip(names, nodes, strict=True)
        ),
        log_factor=tuple((_rounded(factor, slack) / _LATTICE).ravel().tolist()),
        log_spread=tuple(round(value, 4) for value in surface.uncertainty(spread).tolist()),
    )


def monotone(values: FloatArray, weight: FloatArray, slack: Sequence[FloatArray]) -> FloatArray:
    """The values nearest to ``values`` that fall by at most ``slack[i]`` per step along axis i.

    Nearest in squares weighted by ``weight`` (Dykstra's alternating projections, each axis an
    isotonic regression); the last bit of feasibility comes from the mean of the tightest majorant
    and minorant, which both keep the bounds.
    """
    current, kept = values, [np.zeros_like(values) for _ in slack]
    for _ in range(_PROJECTIONS):
        before = current
        for axis, bound in enumerate(slack):
            asked = current + kept[axis]
            current = _isotonic(asked, weight, bound, axis)
            kept[axis] = asked - current
        if np.abs(current - before).max() < _SETTLED:
            break
    upper = _majorant(current, slack, step=1)
    lower = -_majorant(-current, slack, step=-1)
    return 0.5 * (upper + lower)


def _isotonic(values: FloatArray, weight: FloatArray, slack: FloatArray, axis: int) -> FloatArray:
    """Weighted isotonic regression, up to ``slack``, of every line along ``axis`` at once.

    By the max-min formula: the value at j is max over i <= j of min over k >= j of the mean i … k.
    """
    count = values.shape[axis]
    if count == 1:
        return values
    lines = np.moveaxis(values, axis, -1).reshape(-1, count)
    heavy = np.moveaxis(weight, axis, -1).reshape(-1, count)
    falls = np.moveaxis(slack, axis, -1).reshape(-1, count - 1)
    allowed = np.concatenate([np.zeros((len(lines), 1)), np.cumsum(falls, axis=1)], axis=1)
    shape = np.moveaxis(values, axis, -1).shape
    lines = lines + allowed
    result = lines.copy()
    falling = (np.diff(lines, axis=1) < 0.0).any(axis=1)  # the others stay as they are
    lines, heavy = lines[falling], heavy[falling]
    edge = np.zeros((len(lines), 1))
    mass = np.concatenate([edge, np.cumsum(heavy, axis=1)], axis=1)
    moment = np.concatenate([edge, np.cumsum(heavy * lines, axis=1)], axis=1)
    span = mass[:, None, 1:] - mass[:, :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (moment[:, None, 1:] - moment[:, :-1, None]) / span
    valid = np.triu(np.ones((count, count), dtype=bool))
    means = np.where(valid, means, np.inf)
    least = np.minimum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    result[falling] = np.where(valid, least, -np.inf).max(axis=1)
    return np.moveaxis((result - allowed).reshape(shape), -1, axis)


def _rounded(values: FloatArray, slack: Sequence[FloatArray]) -> FloatArray:
    """``values`` in whole steps of 1 / _LATTICE, which still keep the bounds."""
    return _majorant(
        np.round(values * _LATTICE), [np.floor(bound * _LATTICE) for bound in slack], step=1
    )


def _majorant(values: FloatArray, slack: Sequence[FloatArray], *, step: int) -> FloatArray:
    """The smallest majorant that keeps the bounds, walking up (``step`` 1) or down (-1)."""
    current = values.copy()
    for _ in range(64):
        before = current.copy()
        for axis, bound in enumerate(slack):
            lines = np.moveaxis(current, axis, 0)[::step]
            for index, fall in enumerate(np.moveaxis(bound, axis, 0)[::step]):
                lines[index + 1] = np.maximum(lines[index + 1], lines[index] - fall)
        if np.array_equal(before, current):
            break
    return current


def _nodes(edges: Sequence[Range], lengths: Sequence[float]) -> list[list[float]]:
    """Nodes in geometric steps from edge to edge, as fine as the budget allows.

    An axis along which the surface changes fast (a short length, in octaves) gets finer steps.
    """
    scale = _FINEST / max(lengths)
    while True:
        nodes = [
            _line(edge, min(max(scale * length, _FINEST), _COARSEST))
            for edge, length in zip(edges, lengths, strict=True)
        ]
        count = math.prod(len(line) for line in nodes)
        if count <= _NODES[len(edges)] or scale > 1e6:
            return nodes
        scale *= 1.05


def _line(edge: Range, octaves: float) -> list[float]:
    low, high = max(edge.low, 1.0), max(edge.high, 1.0)
    if high <= low:
        return [low]
    steps = max(1, math.ceil(math.log2(high / low) / octaves))
    inner = {float(round(low * (high / low) ** (step / steps))) for step in range(1, steps)}
    return sorted({low, high} | {node for node in inner if low < node < high})


Lines: TypeAlias = Mapping[TableAxis, Sequence[float]]  # nodes by axis

_PARTS: dict[TableAxis, tuple[AxisName, ...]] = {  # of the box: a total is a count times a mean
    "prefill_requests": ("prompts",),
    "prefill_new_tokens": ("new_tokens",),
    "prefill_pairs": ("new_tokens", "prompt_context"),
    "prompt_context": ("prompt_context",),
    "decode_requests": ("decodes",),
    "decode_kv_tokens": ("decodes", "decode_context"),
    "decode_context": ("decode_context",),
}
_TOTALS: dict[TableAxis, tuple[TableAxis, TableAxis]] = {  # of a mean: the count, the total
    "prompt_context": ("prefill_new_tokens", "prefill_pairs"),
    "decode_context": ("decode_requests", "decode_kv_tokens"),
}
_PROMPTS = ("prompts", "new_tokens", "prompt_context")


def _range(box: Mapping[AxisName, Range], name: TableAxis) -> Range:
    """From the smallest to the largest sum in a box."""
    parts = [box[axis] for axis in _PARTS[name]]
    return Range(
        low=math.prod(part.low for part in parts), high=math.prod(part.high for part in parts)
    )


def _length(surface: Surface, name: TableAxis, names: Sequence[TableAxis]) -> float:
    """Over how many octaves of an axis the surface changes: a count moves the mean of its total."""
    count, *mean = _PARTS[name]
    if mean:
        return surface.length(mean[0])
    means = [_PARTS[other][1] for other in names if _PARTS[other][0] == count and other != name]
    return 1.0 / sum(1.0 / surface.length(axis) for axis in (count, *means))


def _sums(lines: Lines) -> dict[TableAxis, FloatArray]:
    """The sums at every node of a grid."""
    sizes = dict(zip(lines, _mesh(*lines.values()), strict=True))
    for mean, (count, total) in _TOTALS.items():
        if mean in sizes:
            sizes[total] = sizes[count] * sizes.pop(mean)
    return sizes


def _on_grid(
    surface: Surface, lines: Lines, box: Mapping[AxisName, Range]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean and spread at every node, a mean context beyond the box held at its edge.

    And by which factor mean contexts lie beyond the box.
    """
    prompts: dict[AxisName, FloatArray] = {}
    decodes: dict[AxisName, FloatArray] = {}
    beyond: FloatArray = np.ones(1)
    if "prefill_new_tokens" in lines:
        sums = _sums({name: line for name, line in lines.items() if _PARTS[name][0] in _PROMPTS})
        new, pairs = sums["prefill_new_tokens"], sums["prefill_pairs"]
        count = sums.get("prefill_requests", np.full(len(new), surface.mixed_prompts()))
        context = _held(pairs / new, box["prompt_context"])
        prompts = {"prompts": count, "new_tokens": new, "prompt_context": context}
        beyond = np.maximum(context * new / pairs, pairs / (context * new))
    if "decode_requests" in lines:
        sums = _sums(
            {name: line for name, line in lines.items() if _PARTS[name][0] not in _PROMPTS}
        )
        count, kv_tokens = sums["decode_requests"], sums["decode_kv_tokens"]
        context = _held(kv_tokens / count, box["decode_context"])
        decodes = {"decodes": count, "decode_context": context}
        off = np.maximum(context * count / kv_tokens, kv_tokens / (context * count))
        beyond = np.multiply.outer(beyond, off).ravel()
    return *surface.on_product(prompts, decodes), beyond


def _held(values: FloatArray, edge: Range) -> FloatArray:
    held: FloatArray = np.clip(values, edge.low, edge.high)
    return held


def _mesh(*lines: Sequence[float]) -> list[FloatArray]:
    return [grid.ravel() for grid in np.meshgrid(*lines, indexing="ij")]


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
        largest = math.prod(self.sizes[axis] for axis in _PARTS[name])
        return [min(1.0, nodes[0] / 2.0), *nodes, largest]

    def passes(self, regime: Regime, lines: Lines) -> Iterator[PassColumns]:
        """One pass per node: what its sums leave open as small, and as large, as it may be."""
        sums = _sums(lines)
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


def _slack(law: Law, regime: Regime, lines: Lines, reach: _Reach) -> list[FloatArray]:
    """How far ln(factor) may fall from node to node along each axis, given the law's own rise."""
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


def _relative_slopes(law: Law, regime: Regime, lines: Lines, reach: _Reach) -> list[FloatArray]:
    """∂law/∂size over law at every node along each axis, the smallest there may be."""
    step, smallest = 1e-4, list[FloatArray]()
    sizes = dict(zip(lines, _mesh(*lines.values()), strict=True))
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
        total for mean, (count, total) in _TOTALS.items() if mean in lines and name in (mean, count)
    ]
    return totals if name in _TOTALS else [name, *totals]


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
