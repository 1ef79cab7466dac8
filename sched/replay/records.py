"""One record per request that ended (R-61)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from passtime.sched.replay.metrics import Latencies
from passtime.sched.replay.outcome import AdmissionRecord, BoolArray, Outcome, PoolTimes, Status
from passtime.sched.timing import FloatArray, IntArray
from passtime.sched.workload.rows import Workload


class RequestRecord(Struct, frozen=True, gc=False):
    """What happened to a request: times in ms and counts of tokens, None = did not happen.

    The keys and their order are the reference's. ``uuid`` is the number of the request in the
    workload, from 1; ``turn_index`` is None where every session has one turn; what belongs to
    pools is None without them; ``admission_history`` is there only if it was captured.
    """

    session_id: str
    turn_index: int | None
    uuid: str
    arrival_time_ms: float | None
    first_admit_ms: float | None
    terminal_time_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None
    ttft_ms: float | None
    ttst_ms: float | None
    e2e_latency_ms: float | None
    itl_ms: float | None
    input_length: int
    requested_output_length: int
    output_length: int
    reused_input_tokens: int
    prefill_worker_idx: int | None
    decode_worker_idx: int | None
    prefill_admit_ms: float | None
    source_held_ms: float | None
    destination_reserved_ms: float | None
    destination_activated_ms: float | None
    decode_admit_ms: float | None
    source_released_ms: float | None
    decode_reused_input_tokens: int | None
    admission_history: list[AdmissionRecord] | UnsetType
    admission_count: int
    readmission_count: int
    terminal_status: str


_OF_POOLS = (
    "prefill_worker_idx",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
)


def request_records(outcome: Outcome, workload: Workload) -> list[RequestRecord]:
    """A record of every request that ended, by arrival time."""
    columns = _columns(outcome, workload) | _pool_columns(outcome.pools)
    fields = RequestRecord.__struct_fields__
    records = list(map(RequestRecord, *(columns[field] for field in fields)))
    ended = (outcome.status != Status.INCOMPLETE) & ~np.isnan(outcome.arrival_ms)
    order = np.argsort(outcome.arrival_ms, kind="stable")  # ties by uuid: by row number
    return [records[row] for row in order[ended[order]].tolist()]


def request_lines(outcome: Outcome, workload: Workload) -> bytes:
    """The records as JSON lines."""
    return msgspec.json.Encoder().encode_lines(request_records(outcome, workload))


def _columns(outcome: Outcome, workload: Workload) -> dict[str, Iterable[Any]]:
    """Everything but the pools' times, by field."""
    numbers = range(1, len(workload) + 1)
    latencies, pools = Latencies.of(outcome), outcome.pools
    admit_ms = np.where(outcome.status == Status.REJECTED, np.nan, outcome.first_admit_ms)
    reused = outcome.reused_tokens if pools is None else pools.prefill_reused_tokens
    admissions = outcome.admission_count
    names = {int(status): status.name.lower() for status in Status}
    return {
        "session_id": workload.session_ids or [f"request_{number}" for number in numbers],
        "turn_index": _turns(workload) or repeat(None),
        "uuid": [f"00000000-0000-0000-0000-{number:012x}" for number in numbers],
        "arrival_time_ms": _times(outcome.arrival_ms),
        "first_admit_ms": _times(admit_ms),
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
        "decode_worker_idx": _workers(outcome.scheduler),
        "admission_history": repeat(UNSET) if outcome.admissions is None else outcome.admissions,
        "admission_count": admissions.tolist(),
        "readmission_count": np.maximum(admissions - 1, 0).tolist(),
        "terminal_status": [names[status] for status in outcome.status.tolist()],
    }


def _pool_columns(pools: PoolTimes | None) -> dict[str, Iterable[Any]]:
    """What only prefill/decode pools have, by field."""
    if pools is None:
        return dict.fromkeys(_OF_POOLS, repeat(None))
    columns: dict[str, Iterable[Any]] = {
        field: _times(getattr(pools, field)) for field in _OF_POOLS if field.endswith("_ms")
    }
    # reuse on the decode rank: None for a request that was never admitted there
    decode_reuse = pools.decode_reused_tokens.tolist()
    return columns | {
        "prefill_worker_idx": _workers(pools.prefill_scheduler),
        "decode_reused_input_tokens": _with_none(decode_reuse, np.isnan(pools.decode_admit_ms)),
    }


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
    return _with_none(times_ms.tolist(), np.isnan(times_ms))


def _workers(numbers: IntArray) -> list[int | None]:
    return _with_none(numbers.tolist(), numbers < 0)


def _with_none(values: list[Any], absent: BoolArray) -> list[Any]:
    """``values``, None where they are ``absent``."""
    for row in np.flatnonzero(absent).tolist():
        values[row] = None
    return values
