"""The report of a replay: one flat summary (R-53 … R-60) and one record per request (R-61)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from passtime.errors import InputError
from passtime.sched.replay.metrics import METRICS, Latencies, Slo, distributions
from passtime.sched.replay.outcome import Outcome, PoolTimes, Status
from passtime.sched.timing import FloatArray
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


# --- One record per request (R-61) --------------------------------------------------------------


def request_rows(outcome: Outcome, workload: Workload) -> Iterator[dict[str, Any]]:
    """A record of every request that ended, by arrival time; times in ms, None = did not happen.

    The uuid is the number of the request in the workload, from 1.
    """
    columns = _columns(outcome, workload)
    names = tuple(columns)
    records = list(zip(*columns.values(), strict=True))
    ended = (outcome.status != Status.INCOMPLETE) & ~np.isnan(outcome.arrival_ms)
    order = np.argsort(outcome.arrival_ms, kind="stable")  # ties by uuid: by row number
    for index in order[ended[order]].tolist():
        yield dict(zip(names, records[index], strict=True))


def request_lines(outcome: Outcome, workload: Workload) -> bytes:
    """The records as JSON lines."""
    encode = msgspec.json.Encoder().encode
    return b"".join(encode(row) + b"\n" for row in request_rows(outcome, workload))


def _columns(outcome: Outcome, workload: Workload) -> dict[str, Sequence[Any]]:
    count = len(workload)
    latencies = Latencies.of(outcome)
    sessions = workload.session_ids or [f"request_{index}" for index in range(1, count + 1)]
    nothing: list[None] = [None] * count
    pools = outcome.pools
    reused = outcome.reused_tokens if pools is None else pools.prefill_reused_tokens
    admissions = outcome.admission_count
    columns: dict[str, Sequence[Any]] = {
        "session_id": sessions,
        "turn_index": _turns(workload) or nothing,
        "uuid": [f"00000000-0000-0000-0000-{index:012x}" for index in range(1, count + 1)],
        "arrival_time_ms": _times(outcome.arrival_ms),
        "first_admit_ms": _times(
            np.where(outcome.status == Status.REJECTED, np.nan, outcome.first_admit_ms)
        ),
        "terminal_time_ms": _times(outcome.terminal_ms),
        "first_token_ms": _times(outcome.first_token_ms),
        "last_token_ms": _times(outcome.last_token_ms),
        "ttft_ms": _times(latencies.ttft_ms),
        "ttst_ms": _times(latencies.ttst_ms),
        "e2e_latency_ms": _times(latencies.e2e_ms),
        "itl_ms": _times(latencies.tpot_ms),
        "input_length": workload.input_tokens,
        "requested_output_length": workload.output_tokens,
        "output_length": outcome.output_tokens.tolist(),
        "reused_input_tokens": reused.tolist(),
        "prefill_worker_idx": _indices(pools.prefill_scheduler) if pools else nothing,
        "decode_worker_idx": _indices(outcome.scheduler),
        "prefill_admit_ms": _times(pools.prefill_admit_ms) if pools else nothing,
        "source_held_ms": _times(pools.source_held_ms) if pools else nothing,
        "destination_reserved_ms": _times(pools.destination_reserved_ms) if pools else nothing,
        "destination_activated_ms": _times(pools.destination_activated_ms) if pools else nothing,
        "decode_admit_ms": _times(pools.decode_admit_ms) if pools else nothing,
        "source_released_ms": _times(pools.source_released_ms) if pools else nothing,
        "decode_reused_input_tokens": _decode_reuse(pools) if pools else nothing,
    }
    if outcome.admissions is not None:
        columns["admission_history"] = [
            [
                {"at_ms": at_ms, "reused_input_tokens": reused, "pool": pool[0] if pool else None}
                for at_ms, reused, *pool in history
            ]
            for history in outcome.admissions
        ]
    columns["admission_count"] = admissions.tolist()
    columns["readmission_count"] = np.maximum(admissions - 1, 0).tolist()
    names = {int(status): status.name.lower() for status in Status}
    columns["terminal_status"] = [names[status] for status in outcome.status.tolist()]
    return columns


def _decode_reuse(pools: PoolTimes) -> list[int | None]:
    """Reuse on the decode rank; None for a request that was never admitted there."""
    happened = ~np.isnan(pools.decode_admit_ms)
    reused = pools.decode_reused_tokens.tolist()
    return [
        value if there else None for value, there in zip(reused, happened.tolist(), strict=True)
    ]


def _turns(workload: Workload) -> list[int] | None:
    """Turn number per request; None if every session has one turn (R-61)."""
    if workload.session_ids is None or len(set(workload.session_ids)) == len(workload):
        return None
    seen: dict[str, int] = {}
    turns = []
    for session in workload.session_ids:
        turns.append(seen.get(session, 0))
        seen[session] = turns[-1] + 1
    return turns


def _times(times_ms: FloatArray) -> list[float | None]:
    if not np.isnan(times_ms).any():
        return list(times_ms.tolist())
    return [None if math.isnan(time) else time for time in times_ms.tolist()]


def _indices(values: Any) -> list[int | None]:
    return [None if value < 0 else value for value in values.tolist()]
