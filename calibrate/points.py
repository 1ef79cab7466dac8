"""Measured points: from a log's samples to sums over a pass, and on to columns for the fit."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import get_args

import numpy as np

from passtime.calibrate.log import Batch, Log
from passtime.profiles.document import REGIME_AXES, AxisName, MeasuredPoint, Range, Regime
from passtime.profiles.predict import PassColumns
from passtime.sched.timing import FloatArray

AXES: tuple[AxisName, ...] = get_args(AxisName)

_GAUSSIAN_MAD = 1.4826
_MEDIAN_EFFICIENCY = 1.2533  # a median's standard error over a mean's


def measured_points(log: Log) -> list[MeasuredPoint]:
    """One point per planned or added one with samples, in their order: the median of its visits."""
    medians: dict[int, list[float]] = {}
    for visit in log.accepted():
        if visit.samples_ms:
            medians.setdefault(visit.point, []).append(statistics.median(visit.samples_ms))
    latency, samples = log.point_ms(), log.samples_ms()
    points = []
    for point in log.points:
        if point.id in latency:
            visits = medians[point.id]
            repeats = visits if len(visits) > 1 else samples[point.id]
            points.append(
                measured_point(point.batch, latency[point.id], repeats, held_out=point.held_out)
            )
    return points


def measured_point(
    batch: Batch, latency_ms: float, repeats_ms: Sequence[float], *, held_out: bool = False
) -> MeasuredPoint:
    """The point of one batch; ``repeats_ms`` are the values that ``latency_ms`` is a median of."""
    deviation = statistics.median(abs(value - latency_ms) for value in repeats_ms)
    spread = 100.0 * _GAUSSIAN_MAD * deviation / latency_ms
    return MeasuredPoint(
        regime=regime_of_batch(batch),
        prefill_requests=len(batch.prefill),
        prefill_new_tokens=sum(new for new, _ in batch.prefill),
        prefill_prefix_tokens=sum(prefix for _, prefix in batch.prefill),
        prefill_pairs=sum(new * prefix + new * (new + 1) // 2 for new, prefix in batch.prefill),
        decode_requests=len(batch.decode),
        decode_kv_tokens=sum(batch.decode),
        decode_kv_max=max(batch.decode, default=0),
        latency_ms=latency_ms,
        spread_percent=spread if len(repeats_ms) > 1 else None,
        samples=len(repeats_ms),
        held_out=held_out,
    )


def regime_of_batch(batch: Batch) -> Regime:
    """Prompts, decodes, or both."""
    if batch.prefill and batch.decode:
        return "mixed"
    return "prefill" if batch.prefill else "decode"


def columns(points: Sequence[MeasuredPoint], graph_sizes: Sequence[int] = ()) -> PassColumns:
    """The points as columns; batches of pure decodes are padded as the engine pads them."""
    graphs = sorted(graph_sizes)
    rows = [
        (
            point.prefill_requests,
            point.prefill_new_tokens,
            point.prefill_prefix_tokens,
            point.prefill_pairs,
            _padded(point, graphs),
            point.decode_kv_tokens,
            point.decode_kv_max,
        )
        for point in points
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 7)
    return PassColumns(*(np.ascontiguousarray(column) for column in table.T))


def batch_columns(batches: Sequence[Batch], graph_sizes: Sequence[int] = ()) -> PassColumns:
    """Batches that nobody has measured, as columns."""
    timeless = 1.0  # columns hold sizes only
    return columns([measured_point(batch, timeless, [timeless]) for batch in batches], graph_sizes)


def latencies(points: Sequence[MeasuredPoint]) -> FloatArray:
    """Measured times in ms."""
    return np.array([point.latency_ms for point in points])


def sigmas(points: Sequence[MeasuredPoint]) -> FloatArray:
    """Relative standard error of each point's median; 0 where one sample was all there is."""
    return np.array(
        [
            _MEDIAN_EFFICIENCY * (point.spread_percent or 0.0) / 100.0 / point.samples**0.5
            for point in points
        ]
    )


def noise_floor_percent(points: Sequence[MeasuredPoint]) -> float | None:
    """Median relative deviation of repeats; None if nothing was repeated."""
    spreads = [point.spread_percent for point in points if point.spread_percent is not None]
    return statistics.median(spreads) if spreads else None


def measured_box(
    points: Sequence[MeasuredPoint], graph_sizes: Sequence[int] = ()
) -> dict[Regime, dict[AxisName, Range]]:
    """The measured range of every axis, per regime that has points."""
    box: dict[Regime, dict[AxisName, Range]] = {}
    for regime, axes in REGIME_AXES.items():
        passes = columns([point for point in points if point.regime == regime], graph_sizes)
        if len(passes.prefill_pairs):
            box[regime] = {
                axis: Range(low=float(values.min()), high=float(values.max()))
                for axis, values in axis_columns(passes).items()
                if axis in axes
            }
    return box


def axis_columns(passes: PassColumns) -> dict[AxisName, FloatArray]:
    """The five axes of a profile's box."""
    return {
        "prompts": passes.prefill_requests,
        "new_tokens": passes.prefill_new_tokens,
        "prompt_context": passes.prefill_pairs / np.maximum(passes.prefill_new_tokens, 1.0),
        "decodes": passes.decode_requests,
        "decode_context": passes.decode_kv_tokens / np.maximum(passes.decode_requests, 1.0),
    }


def _padded(point: MeasuredPoint, graphs: Sequence[int]) -> int:
    batch = point.decode_requests
    if point.regime != "decode" or not graphs or batch > graphs[-1]:
        return batch
    return graphs[bisect_left(graphs, batch)]
