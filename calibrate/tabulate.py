"""From a residual surface to a table that predictions can use: small, and monotone with the law.

The surface is evaluated on a tensor grid, finer along axes where it changes fast. Then the factor
is moved, as little as possible, to where law · factor rises with every size: the law's own slope
bounds how fast the factor may fall, inside the box and, held at its edge, far beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np

from passtime.calibrate.residual import Surface
from passtime.profiles.document import REGIME_AXES, Axis, AxisName, Range, Regime, Residual
from passtime.profiles.law import ARRAYS, Law
from passtime.profiles.predict import PassColumns
from passtime.sched.timing import FloatArray

_NODES = {2: 2500, 3: 4000, 4: 8000}  # of a table with so many axes
_FINEST, _COARSEST = 1.0 / 8.0, 2.0  # octaves between neighbouring nodes
_LARGEST_LOG = 2.5
_PROJECTIONS, _SETTLED = 30, 3e-4
_SLOPE_MARGIN = 0.9
_LATTICE = 1e5  # steps of ln(factor) in the document
_BEYOND = 16.0  # times the edge of the box up to which predictions must rise
_CROWD = 4.0  # times the mean length that the longest decode may have


def tabulate(surface: Surface, regime: Regime, box: Mapping[AxisName, Range], law: Law) -> Residual:
    """The residual of one regime on a grid over its box, monotone together with ``law``."""
    names = REGIME_AXES[regime]
    nodes = _nodes([box[name] for name in names], [surface.length(name) for name in names])
    shape = tuple(len(axis) for axis in nodes)
    lines: dict[AxisName, Sequence[float]] = dict(zip(names, nodes, strict=True))
    if regime == "mixed":
        lines["prompts"] = [surface.mixed_prompts()]
    mean, spread = surface.on_grid(lines)
    slack = [_slack(law, regime, nodes, axis) for axis in range(len(nodes))]
    factor = monotone(
        np.clip(mean, -_LARGEST_LOG, _LARGEST_LOG).reshape(shape),
        spread.reshape(shape) ** -2,
        slack,
    )
    return Residual(
        axes=tuple(
            Axis(name=name, nodes=tuple(axis)) for name, axis in zip(names, nodes, strict=True)
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
    lines = lines + allowed
    edge = np.zeros((len(lines), 1))
    mass = np.concatenate([edge, np.cumsum(heavy, axis=1)], axis=1)
    moment = np.concatenate([edge, np.cumsum(heavy * lines, axis=1)], axis=1)
    span = mass[:, None, 1:] - mass[:, :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (moment[:, None, 1:] - moment[:, :-1, None]) / span
    valid = np.triu(np.ones((count, count), dtype=bool))
    means = np.where(valid, means, np.inf)
    least = np.minimum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    fitted = np.where(valid, least, -np.inf).max(axis=1) - allowed
    shape = np.moveaxis(values, axis, -1).shape
    return np.moveaxis(fitted.reshape(shape), -1, axis)


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


def _grid_passes(
    regime: Regime, nodes: Sequence[Sequence[float]], *, crowd: float = 1.0
) -> PassColumns:
    """One pass per node, of equal prompts and decodes; ``crowd`` lengthens the longest decode."""
    grids = [grid.ravel() for grid in np.meshgrid(*nodes, indexing="ij")]
    zero = np.zeros(len(grids[0]))
    sizes = dict(zip(REGIME_AXES[regime], grids, strict=True))
    new, context = sizes.get("new_tokens", zero), sizes.get("prompt_context", zero)
    prompts = sizes.get("prompts", np.minimum(new, 1.0))
    decodes, mean = sizes.get("decodes", zero), sizes.get("decode_context", zero)
    each = new / np.maximum(prompts, 1.0)
    prefix = np.maximum(0.0, context - (each + 1.0) / 2.0) * prompts
    return PassColumns(prompts, new, prefix, new * context, decodes, decodes * mean, mean * crowd)


def _slack(law: Law, regime: Regime, nodes: Sequence[Sequence[float]], axis: int) -> FloatArray:
    """How far ln(factor) may fall from node to node along ``axis``, given the law's own rise."""
    shape = tuple(len(line) for line in nodes)
    if shape[axis] == 1:
        return np.zeros((*shape[:axis], 0, *shape[axis + 1 :]))
    wider = [line if a == axis else _with_beyond(line) for a, line in enumerate(nodes)]
    slope = _relative_slope(law, regime, wider, axis, 1.0)
    if regime == "mixed":
        slope = np.minimum(slope, _relative_slope(law, regime, wider, axis, _CROWD))
    slope = slope.reshape([len(line) for line in wider])
    for other in range(len(shape)):
        if other != axis:
            slope = _smallest_neighbour(slope, other)
    lines = np.moveaxis(slope, axis, 0)
    smallest = np.moveaxis(np.minimum(lines[1:], lines[:-1]), 0, axis)
    width = np.diff(np.array(nodes[axis])).reshape(
        [-1 if a == axis else 1 for a in range(len(shape))]
    )
    share = _SLOPE_MARGIN * (1.0 - law.tile_share if law.tile else 1.0)
    slack: FloatArray = np.log1p(share * width * np.maximum(smallest, 0.0))
    return slack


def _with_beyond(line: Sequence[float]) -> list[float]:
    """The nodes between the smallest size there is and one far beyond the box."""
    return [1.0, *line, _BEYOND * line[-1]]


def _relative_slope(
    law: Law, regime: Regime, nodes: Sequence[Sequence[float]], axis: int, crowd: float
) -> FloatArray:
    """∂law/∂size over law at every node, per token or request of ``axis``."""
    step, smooth = 1e-4, copy(law)
    smooth.tile = None
    times = []
    for factor in (1.0 - step, 1.0, 1.0 + step):
        moved = [
            [at * factor for at in line] if a == axis else line for a, line in enumerate(nodes)
        ]
        times.append(_regime_times(smooth, regime, _grid_passes(regime, moved, crowd=crowd)))
    sizes = np.meshgrid(*nodes, indexing="ij")[axis].ravel()
    slope: FloatArray = (times[2] - times[0]) / (2.0 * step * sizes * times[1])
    return slope


def _regime_times(law: Law, regime: Regime, passes: PassColumns) -> FloatArray:
    if regime == "prefill":
        return law.prefill_ms(*passes[:4], ARRAYS)
    if regime == "decode":
        return law.decode_ms(passes[4], passes[5], ARRAYS)
    return law.mixed_ms(*passes, ARRAYS)


def _smallest_neighbour(values: FloatArray, axis: int) -> FloatArray:
    """Along ``axis``, every inner entry's minimum with its two neighbours."""
    lines = np.moveaxis(values, axis, 0)
    smallest = np.minimum(np.minimum(lines[:-2], lines[2:]), lines[1:-1])
    return np.moveaxis(smallest, 0, axis)
