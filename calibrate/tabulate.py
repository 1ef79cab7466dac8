"""From a residual surface to a table that predictions can use: small, and monotone with the law.

The table's axes are sums over a pass: whatever joins a pass or grows in it raises sums and nothing
else (of attention alone means, see ``TABLE_AXES``). The surface is evaluated on a tensor grid of
them, finer along axes where it changes fast, and held where a mean length leaves the box. Then the
factor is moved, as little as possible, to fall by no more than the slack within which law · factor
rises along every axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from passtime.calibrate.isotonic import monotone, rounded
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
from passtime.sched.timing import FloatArray

_NODES = {2: 2500, 3: 8000, 4: 10_000}  # of a table with so many axes
_FINEST, _COARSEST = 1.0 / 8.0, 2.0  # octaves between neighbouring nodes
_LARGEST_LOG = 2.5
_DOUBT = 1.0  # a node outside the box yields to those inside: power of its distance
_LATTICE = 1e5  # steps of ln(factor) in the document

Box: TypeAlias = Mapping[Regime, Mapping[AxisName, Range]]  # what was measured, by regime
Lines: TypeAlias = Mapping[TableAxis, Sequence[float]]  # nodes by axis

PARTS: dict[TableAxis, tuple[AxisName, ...]] = {  # of the box: a total is a count times a mean
    "prefill_requests": ("prompts",),
    "prefill_new_tokens": ("new_tokens",),
    "prefill_pairs": ("new_tokens", "prompt_context"),
    "prompt_context": ("prompt_context",),
    "decode_requests": ("decodes",),
    "decode_kv_tokens": ("decodes", "decode_context"),
    "decode_context": ("decode_context",),
}
TOTALS: dict[TableAxis, tuple[TableAxis, TableAxis]] = {  # of a mean: the count, the total
    "prompt_context": ("prefill_new_tokens", "prefill_pairs"),
    "decode_context": ("decode_requests", "decode_kv_tokens"),
}
_PROMPTS = ("prompts", "new_tokens", "prompt_context")


def grid_lines(surface: Surface, regime: Regime, box: Box, timed_part: TimedPart) -> Lines:
    """The nodes along each axis of a regime's table, over its box."""
    names, edges = TABLE_AXES[timed_part][regime], box[regime]
    nodes = _nodes(
        [_range(edges, name) for name in names], [_length(surface, name, names) for name in names]
    )
    return dict(zip(names, nodes, strict=True))


def tabulate(
    surface: Surface, lines: Lines, box: Mapping[AxisName, Range], slack: Sequence[FloatArray]
) -> Residual:
    """The residual of one regime on the grid of ``lines``; ``box`` is the regime's.

    Along axis i, ln(factor) falls by at most ``slack[i]`` from node to node.
    """
    shape = tuple(len(line) for line in lines.values())
    mean, spread, beyond = _on_grid(surface, lines, box)
    factor = monotone(
        np.clip(mean, -_LARGEST_LOG, _LARGEST_LOG).reshape(shape),
        (spread * np.minimum(beyond, 10.0) ** _DOUBT).reshape(shape) ** -2,
        slack,
    )
    steps = rounded(factor, slack, lattice=_LATTICE)
    return Residual(
        axes=tuple(Axis(name=name, nodes=tuple(line)) for name, line in lines.items()),
        log_factor=tuple((steps / _LATTICE).ravel().tolist()),
        log_spread=tuple(round(value, 4) for value in surface.uncertainty(spread).tolist()),
    )


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


def _range(box: Mapping[AxisName, Range], name: TableAxis) -> Range:
    """From the smallest to the largest sum in a box."""
    parts = [box[axis] for axis in PARTS[name]]
    return Range(
        low=math.prod(part.low for part in parts), high=math.prod(part.high for part in parts)
    )


def _length(surface: Surface, name: TableAxis, names: Sequence[TableAxis]) -> float:
    """Over how many octaves of an axis the surface changes: a count moves the mean of its total."""
    count, *mean = PARTS[name]
    if mean:
        return surface.length(mean[0])
    means = [PARTS[other][1] for other in names if PARTS[other][0] == count and other != name]
    return 1.0 / sum(1.0 / surface.length(axis) for axis in (count, *means))


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
        sums = sums_at_nodes(
            {name: line for name, line in lines.items() if PARTS[name][0] in _PROMPTS}
        )
        new, pairs = sums["prefill_new_tokens"], sums["prefill_pairs"]
        count = sums.get("prefill_requests", np.full(len(new), surface.mixed_prompts()))
        context = _held(pairs / new, box["prompt_context"])
        prompts = {"prompts": count, "new_tokens": new, "prompt_context": context}
        beyond = np.maximum(context * new / pairs, pairs / (context * new))
    if "decode_requests" in lines:
        sums = sums_at_nodes(
            {name: line for name, line in lines.items() if PARTS[name][0] not in _PROMPTS}
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


def sums_at_nodes(lines: Lines) -> dict[TableAxis, FloatArray]:
    """The sums at every node of a grid, flat in C order: a mean axis becomes its total."""
    sizes = dict(zip(lines, mesh(*lines.values()), strict=True))
    for mean, (count, total) in TOTALS.items():
        if mean in sizes:
            sizes[total] = sizes[count] * sizes.pop(mean)
    return sizes


def mesh(*lines: Sequence[float]) -> list[FloatArray]:
    """The coordinates of every node of a grid, one flat array in C order per line."""
    return [grid.ravel() for grid in np.meshgrid(*lines, indexing="ij")]
