"""The report of a replay: one flat summary (R-53 … R-60)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from passtime.errors import InputError
from passtime.sched.replay.metrics import METRICS, Slo, distributions
from passtime.sched.replay.outcome import Outcome, Status
from passtime.sched.workload.rows import Workload

SCHEMA = 1

Value: TypeAlias = float | int | str | None

# Keys that every report has; a percentile that is asked for has a key of its own, p50 too.
STANDARD_PERCENTILES = {"median": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}

# What people are shown who ask for none.
DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


class FigureRange(Struct, frozen=True, kw_only=True):
    """Where a figure of the summary lies."""

    low: float
    high: float


class FigureIntervals(Struct, frozen=True, kw_only=True):
    """Central ranges of the summary's figures over replays under ``draws`` of the timing model.

    They hold the error of the calibration, not the chance in the workload.
    """

    level_percent: float
    draws: int
    seed: int
    figures: dict[str, FigureRange]


class Report(Struct, frozen=True, kw_only=True):
    """The document that a simulation leaves. Equal inputs and seed give equal bytes.

    ``inputs``   everything that was asked for, defaults included.
    ``summary``  the reference's keys in its order (R-60) without the three of the wall clock;
                 null where a value is not defined.
    ``counts``   requests by how they ended, passes and preemptions.
    ``coverage`` queries to the timing model inside, held at the edge of and beyond the range it
                 was measured in; null where the model cannot tell.
    ``intervals`` how sure the summary is, as far as the timing model goes; null if not asked for.
    """

    schema: int = SCHEMA
    inputs: dict[str, Any]
    summary: dict[str, Value]
    counts: dict[str, int]
    coverage: dict[str, int] | None = None
    intervals: FigureIntervals | None = None

    def to_json(self) -> bytes:
        """The document as indented JSON, ending in a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def report(
    outcome: Outcome,
    workload: Workload,
    *,
    inputs: dict[str, Any],
    percentiles: Sequence[float] = (),
    slo: Slo | None = None,
    coverage: dict[str, int] | None = None,
) -> Report:
    """The document of one replay; ``inputs`` and ``coverage`` are kept as they are."""
    return Report(
        inputs=inputs,
        summary=summary(outcome, workload, percentiles=percentiles, slo=slo),
        counts=counts(outcome),
        coverage=coverage,
    )


def counts(outcome: Outcome) -> dict[str, int]:
    """Arrived requests by how they ended, and what the ranks did."""
    arrived = ~np.isnan(outcome.arrival_ms)
    ended = {
        f"{status.name.lower()}_requests": int((outcome.status[arrived] == status).sum())
        for status in Status
    }
    return {
        "arrived_requests": int(arrived.sum()),
        **ended,
        "passes": outcome.passes,
        "preemptions": outcome.preemptions,
    }


def summary(
    outcome: Outcome,
    workload: Workload,
    *,
    percentiles: Sequence[float] = (),
    slo: Slo | None = None,
) -> dict[str, Value]:
    """The summary keys of R-60; ``percentiles`` (0 … 100) adds ``p<percent>_<metric>`` keys.

    Latencies and throughput are of counted requests alone: admitted and completed (R-51).
    """
    counted = outcome.counted()
    input_tokens = int(np.asarray(workload.input_tokens)[counted].sum())
    output_tokens = int(outcome.output_tokens[counted].sum())
    duration_ms = float(outcome.terminal_ms[counted].max()) if counted.any() else 0.0
    seconds = max(duration_ms / 1000.0, 1e-9)
    completed = int(counted.sum())
    keys: dict[str, Value] = {
        "kv_eviction_policy": "lru",
        "committed_prefill_tokens": outcome.committed_prefill_tokens,
        "num_requests": int((~np.isnan(outcome.arrival_ms)).sum()),
        "completed_requests": completed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "duration_ms": duration_ms,
        "request_throughput_rps": completed / seconds,
        "input_throughput_tok_s": input_tokens / seconds,
        "output_throughput_tok_s": output_tokens / seconds,
        "total_throughput_tok_s": (input_tokens + output_tokens) / seconds,
    }
    keys |= _provisioned(outcome)
    if slo is not None:
        good = slo.good(outcome)
        keys["goodput_completed_requests"] = int(good.sum())
        keys["goodput_request_throughput_rps"] = int(good.sum()) / seconds
        keys["goodput_output_throughput_tok_s"] = int(outcome.output_tokens[good].sum()) / seconds
    keys["processed_tokens"] = input_tokens + output_tokens
    for name, reused in (
        ("prefix_cache_reused_ratio", outcome.reused_tokens),
        ("first_admission_prefix_cache_reused_ratio", outcome.first_reused_tokens),
    ):
        keys[name] = int(reused[counted].sum()) / input_tokens if input_tokens else 0.0
    return keys | _statistics(outcome, percentiles)


def _provisioned(outcome: Outcome) -> dict[str, Value]:
    """Worker seconds and GPU hours (R-55); aggregated workers stand under ``decode``."""
    seconds, gpus = {}, {}
    for role in ("prefill", "decode"):
        seconds[role] = outcome.workers.get(role, 0) * outcome.clock_ms / 1000.0
        gpus[role] = outcome.gpus_per_worker.get(role, 0)
    return {
        "prefill_worker_seconds": seconds["prefill"],
        "decode_worker_seconds": seconds["decode"],
        "prefill_gpus_per_worker": gpus["prefill"],
        "decode_gpus_per_worker": gpus["decode"],
        "gpu_hours": sum(seconds[role] * gpus[role] for role in seconds) / 3600.0,
        "power_w": None,
        "power_coverage": None,
    }


def _statistics(outcome: Outcome, percentiles: Sequence[float]) -> dict[str, Value]:
    """Sample numbers, then every statistic of every metric."""
    found = distributions(outcome)
    extra = extra_percentiles(percentiles)
    keys: dict[str, Value] = {
        "num_ttft_samples": found["ttft_ms"].size,
        "num_tpot_samples": found["tpot_ms"].size,
        "num_e2e_latency_samples": found["e2e_latency_ms"].size,
    }
    for metric in METRICS:
        distribution = found[metric]
        keys[f"mean_{metric}"] = distribution.mean()
        keys[f"min_{metric}"] = distribution.percentile(0)
        keys[f"max_{metric}"] = distribution.percentile(100)
        for name, percent in STANDARD_PERCENTILES.items():
            keys[f"{name}_{metric}"] = distribution.percentile(percent)
        keys[f"std_{metric}"] = distribution.std()
        for name, percent in extra.items():
            keys[f"{name}_{metric}"] = distribution.percentile(percent)
    return keys


def percentile_key(percent: float) -> str:
    """The key prefix under which a summary has this percentile."""
    return "median" if percent == 50.0 else f"p{percent:.12g}"


def extra_percentiles(percentiles: Sequence[float]) -> dict[str, float]:
    """Names of the percentiles asked for that are not standard, ascending, each once.

    Raises InputError for one outside 0 … 100.
    """
    for percent in percentiles:
        if not 0.0 <= percent <= 100.0:
            raise InputError(f"percentile must be in 0 … 100, found {percent:g}")
    named = {f"p{percent:.12g}": float(percent) for percent in sorted(set(percentiles))}
    return {name: p for name, p in named.items() if name not in STANDARD_PERCENTILES}
