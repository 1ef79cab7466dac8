"""From a measurement log to a profile: reduce the samples, fit the law, count the errors."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import numpy as np

from passtime import __version__
from passtime.calibrate.log import Batch, Log, Point, log_hash, read_log
from passtime.errors import DocumentError
from passtime.profiles.document import (
    SCHEMA,
    Accuracy,
    Box,
    Coefficients,
    EngineFacts,
    Errors,
    MeasuredPoint,
    ModelClass,
    Parallelism,
    Profile,
    Provenance,
    Regime,
)
from passtime.sched.timing import FloatArray


def fit_log(path: str | Path, *, model_class: ModelClass = "step", force: bool = False) -> Profile:
    """Fit a profile to the measurement log at ``path``. DocumentError if it cannot be used."""
    log = read_log(Path(path))
    header = log.header
    points = measured_points(log)
    if not points:
        raise DocumentError(f"{path}: no point has samples: nothing to fit")
    fitted = [point for point in points if not point.held_out]
    coefficients = _fit(fitted)
    return Profile(
        schema=SCHEMA,
        name=f"{header.device.name} {header.model.name}",
        device_kind=header.device.kind,
        device=header.device,
        model=header.model,
        parallelism=Parallelism(tensor_parallel=header.model.tensor_parallel, pipeline_parallel=1),
        provenance=Provenance(
            made_by=f"passtime {__version__}",
            timed=str(header.policy.get("runner", header.device.kind)),
            measured_at=header.started_at,
            log_sha256=log_hash(Path(path)).removeprefix("sha256:"),
            kernel_hash=header.kernel_hash,
            software=header.software,
            policy=header.policy,
        ),
        engine=EngineFacts(attention=header.policy.get("attention", "causal")),
        model_class=model_class,
        coefficients=coefficients,
        box=_box(fitted),
        errors=Errors(in_sample=_accuracy(_predict(coefficients, fitted), fitted)),
        points=tuple(points),
    )


def measured_points(log: Log) -> list[MeasuredPoint]:
    """One point per plan entry with samples: the median over all its visits."""
    samples = log.samples_ms()
    return [_measured(point, samples[point.id]) for point in log.header.plan if point.id in samples]


def _measured(point: Point, samples: list[float]) -> MeasuredPoint:
    batch: Batch = point.batch
    regime: Regime = (
        "mixed" if batch.prefill and batch.decode else ("prefill" if batch.prefill else "decode")
    )
    median = statistics.median(samples)
    spread = statistics.median(abs(value - median) for value in samples) * 1.4826
    return MeasuredPoint(
        regime=regime,
        prefill_requests=len(batch.prefill),
        prefill_new_tokens=sum(new for new, _ in batch.prefill),
        prefill_prefix_tokens=sum(prefix for _, prefix in batch.prefill),
        prefill_pairs=sum(new * prefix + new * (new + 1) // 2 for new, prefix in batch.prefill),
        decode_requests=len(batch.decode),
        decode_kv_tokens=sum(batch.decode),
        decode_kv_max=max(batch.decode, default=0),
        latency_ms=median,
        spread_percent=100 * spread / median,
        held_out=point.held_out,
    )


def _features(points: list[MeasuredPoint]) -> FloatArray:
    rows = [
        [
            1.0,
            p.prefill_new_tokens + p.decode_requests,
            p.prefill_pairs,
            p.prefill_requests,
            p.decode_requests,
            p.decode_kv_tokens,
            float(p.regime == "mixed"),
        ]
        for p in points
    ]
    return np.array(rows, dtype=float)


def _fit(points: list[MeasuredPoint]) -> Coefficients:
    from scipy.optimize import nnls

    features = _features(points)
    weight = 1 / np.array([point.latency_ms for point in points])
    scale = np.maximum(features.max(axis=0), 1e-12)
    values, _ = nnls(features / scale * weight[:, None], np.ones(len(points)))
    names = (
        "launch_ms",
        "token_ms",
        "pair_ms",
        "prefill_request_ms",
        "decode_request_ms",
        "decode_kv_ms",
        "mixed_ms",
    )
    return Coefficients(**dict(zip(names, (values / scale).tolist(), strict=True)))


def _predict(c: Coefficients, points: list[MeasuredPoint]) -> FloatArray:
    result: FloatArray = _features(points) @ np.array(msgspec.structs.astuple(c))
    return result


def _accuracy(predicted: FloatArray, points: list[MeasuredPoint]) -> Accuracy:
    error = 100 * (predicted / np.array([point.latency_ms for point in points]) - 1)
    size = np.abs(error)
    return Accuracy(
        points=len(points),
        mape_percent=float(size.mean()),
        p90_percent=float(np.percentile(size, 90)),
        max_percent=float(size.max()),
        bias_percent=float(error.mean()),
    )


def _box(points: list[MeasuredPoint]) -> dict[Regime, dict[str, Box]]:
    box: dict[Regime, dict[str, Box]] = {}
    for regime in sorted({point.regime for point in points}):
        rows = [point for point in points if point.regime == regime]
        box[regime] = {
            axis: Box(
                low=min(getattr(row, axis) for row in rows),
                high=max(getattr(row, axis) for row in rows),
            )
            for axis in (
                "prefill_new_tokens",
                "prefill_pairs",
                "decode_requests",
                "decode_kv_tokens",
            )
        }
    return box
