"""The report against outcomes made by hand: definitions, percentiles, goodput, records."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from passtime.errors import InputError
from passtime.sched.replay.metrics import Distribution, Slo
from passtime.sched.replay.outcome import (
    AdmissionRecord,
    Outcome,
    PoolTimes,
    Status,
    compress_gaps,
)
from passtime.sched.replay.records import request_lines, request_records
from passtime.sched.replay.report import Report, counts, report, summary
from passtime.sched.workload.rows import Workload

SUMMARY_HEAD = [
    "kv_eviction_policy",
    "committed_prefill_tokens",
    "num_requests",
    "completed_requests",
    "total_input_tokens",
    "total_output_tokens",
    "duration_ms",
    "request_throughput_rps",
    "input_throughput_tok_s",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "prefill_worker_seconds",
    "decode_worker_seconds",
    "prefill_gpus_per_worker",
    "decode_gpus_per_worker",
    "gpu_hours",
    "power_w",
    "power_coverage",
    "processed_tokens",
    "prefix_cache_reused_ratio",
    "first_admission_prefix_cache_reused_ratio",
    "num_ttft_samples",
    "num_tpot_samples",
    "num_e2e_latency_samples",
]
STATISTICS = ["mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std"]
METRICS = [
    "ttft_ms",
    "ttst_ms",
    "tpot_ms",
    "itl_ms",
    "e2e_latency_ms",
    "output_token_throughput_per_user",
]


def request(
    arrival: float = 0.0,
    tokens: tuple[float, ...] = (),
    *,
    status: Status = Status.COMPLETED,
    end: float | None = None,
    reused: tuple[int, ...] = (0,),
) -> dict[str, Any]:
    """One request: when it came, when its tokens came, how it ended; one reuse per admission."""
    return {
        "arrival": arrival,
        "tokens": tokens,
        "status": status,
        "end": end if end is not None else tokens[-1] if tokens else math.nan,
        "reused": reused,
    }


def outcome_of(*requests: dict[str, Any], **totals: Any) -> Outcome:
    def column(values: Any) -> np.ndarray[Any, Any]:
        return np.array(list(values), dtype=float)

    def at(index: int) -> np.ndarray[Any, Any]:
        return column(
            r["tokens"][index] if len(r["tokens"]) > index else math.nan for r in requests
        )

    def whole(values: Any) -> np.ndarray[Any, Any]:
        return np.array(list(values), dtype=np.int64)

    gaps = [
        later - sooner
        for r in requests
        if r["status"] is Status.COMPLETED
        for sooner, later in zip(r["tokens"], r["tokens"][1:], strict=False)
    ]
    gap_ms, gap_count = compress_gaps(column(gaps), np.ones(len(gaps), dtype=np.int64))
    return Outcome(
        arrival_ms=column(r["arrival"] for r in requests),
        first_admit_ms=column(r["arrival"] for r in requests),
        first_token_ms=at(0),
        second_token_ms=at(1),
        last_token_ms=column(r["tokens"][-1] if r["tokens"] else math.nan for r in requests),
        terminal_ms=column(r["end"] for r in requests),
        output_tokens=whole(len(r["tokens"]) for r in requests),
        status=whole(r["status"] for r in requests),
        reused_tokens=whole(max(r["reused"], default=0) for r in requests),
        first_reused_tokens=whole(next(iter(r["reused"]), 0) for r in requests),
        admission_count=whole(len(r["reused"]) for r in requests),
        scheduler=whole(0 for _ in requests),
        gap_ms=gap_ms,
        gap_count=gap_count,
        clock_ms=totals.pop("clock_ms", 1000.0),
        **totals,
    )


def workload_of(count: int, *, output: int = 100, **columns: Any) -> Workload:
    return Workload(
        source="by hand",
        timestamp_ms=[0.0] * count,
        input_tokens=[10] * count,
        output_tokens=[output] * count,
        **columns,
    )


def summarise(*requests: dict[str, Any], **options: Any) -> dict[str, Any]:
    return summary(outcome_of(*requests), workload_of(len(requests)), **options)


# --- Definitions --------------------------------------------------------------------------------


def test_keys_and_their_order_are_the_references() -> None:
    keys = list(summarise(request(tokens=(5.0, 7.0))))
    assert keys == SUMMARY_HEAD + [f"{stat}_{metric}" for metric in METRICS for stat in STATISTICS]


def test_latencies_are_named_for_what_they_measure() -> None:
    """M04: prefill 100 ms, decode 1 ms, arrival at 50 ms."""
    found = summarise(request(50.0, (150.0, 151.0, 152.0, 153.0)))
    assert found["mean_ttft_ms"] == 100.0
    assert found["mean_ttst_ms"] == 1.0
    assert found["mean_tpot_ms"] == 1.0
    assert found["mean_itl_ms"] == 1.0
    assert found["mean_e2e_latency_ms"] == 103.0
    assert found["mean_output_token_throughput_per_user"] == 1000.0


def test_tpot_divides_by_the_tokens_that_came() -> None:
    """M02: cut short after 5 of 100 tokens."""
    found = summarise(request(0.0, (10.0, 20.0, 30.0, 40.0, 50.0)))
    assert found["mean_tpot_ms"] == 10.0
    assert found["total_output_tokens"] == 5


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    found = summarise(request(0.0, (10.0,)))
    assert (found["num_ttft_samples"], found["num_tpot_samples"]) == (1, 0)
    assert found["mean_ttft_ms"] == 10.0
    for metric in ("ttst_ms", "tpot_ms", "itl_ms", "output_token_throughput_per_user"):
        assert {found[f"{stat}_{metric}"] for stat in STATISTICS} == {None}


def test_a_completion_without_tokens_counts_but_has_no_latency() -> None:
    found = summarise(request(0.0, (), end=7.0))
    assert found["completed_requests"] == 1
    assert found["duration_ms"] == 7.0
    assert found["num_e2e_latency_samples"] == 0
    assert found["mean_e2e_latency_ms"] is None


def test_rejected_and_incomplete_requests_leave_the_latencies_alone() -> None:
    """M06: half the trace rejected, one more still running when the clock stopped."""
    good = request(0.0, (10.0, 12.0))
    rejected = request(0.0, (), status=Status.REJECTED, end=900.0, reused=())
    running = request(1.0, (500.0, 900.0), status=Status.INCOMPLETE, end=math.nan)
    never = request(math.nan, (), status=Status.INCOMPLETE, end=math.nan, reused=())
    outcome = outcome_of(good, rejected, running, never)
    found = summary(outcome, workload_of(4))
    assert found["max_ttft_ms"] == 10.0
    assert found["max_itl_ms"] == 2.0
    assert found["duration_ms"] == 12.0
    assert found["num_requests"] == 3
    assert found["completed_requests"] == 1
    assert found["total_input_tokens"] == 10
    assert counts(outcome) == {
        "arrived_requests": 3,
        "incomplete_requests": 1,
        "completed_requests": 1,
        "rejected_requests": 1,
        "canceled_requests": 0,
        "failed_requests": 0,
        "passes": 0,
        "preemptions": 0,
    }


def test_completed_without_admission_is_not_counted() -> None:
    found = summarise(request(0.0, (), end=7.0, reused=()))
    assert found["completed_requests"] == 0
    assert found["duration_ms"] == 0.0


def test_nothing_completed_gives_zero_throughput_and_no_latency() -> None:
    found = summarise(request(0.0, (), status=Status.REJECTED, end=3.0, reused=()))
    assert found["request_throughput_rps"] == 0.0
    assert found["prefix_cache_reused_ratio"] == 0.0
    assert found["mean_ttft_ms"] is None


def test_throughput_is_over_the_simulated_duration() -> None:
    found = summarise(request(0.0, (100.0, 200.0)), request(0.0, (300.0, 500.0)))
    assert found["request_throughput_rps"] == 4.0
    assert found["input_throughput_tok_s"] == 40.0
    assert found["output_throughput_tok_s"] == 8.0
    assert found["total_throughput_tok_s"] == 48.0
    assert found["processed_tokens"] == 24


def test_reuse_is_the_largest_of_all_admissions_or_that_of_the_first() -> None:
    found = summarise(request(0.0, (1.0,), reused=(2, 8, 4)), request(0.0, (1.0,)))
    assert found["prefix_cache_reused_ratio"] == 0.4
    assert found["first_admission_prefix_cache_reused_ratio"] == 0.1


def test_workers_cost_gpu_time_to_the_last_timestamp() -> None:
    outcome = outcome_of(
        request(0.0, (1.0,)),
        clock_ms=36_000.0,
        workers={"prefill": 1, "decode": 3},
        gpus_per_worker={"prefill": 8, "decode": 4},
    )
    found = summary(outcome, workload_of(1))
    assert found["prefill_worker_seconds"] == 36.0
    assert found["decode_worker_seconds"] == 108.0
    assert found["gpu_hours"] == pytest.approx((36 * 8 + 108 * 4) / 3600, rel=1e-12)


def test_several_tokens_of_one_pass_give_gaps_of_zero_and_no_infinite_speed() -> None:
    found = summarise(request(0.0, (10.0, 10.0, 30.0)))
    assert found["min_itl_ms"] == 0.0
    assert found["mean_itl_ms"] == 10.0
    assert found["max_output_token_throughput_per_user"] == 50.0


# --- Percentiles --------------------------------------------------------------------------------


def nearest_rank(samples: list[float], percent: float) -> float:
    """R-52, the slow way."""
    return sorted(samples)[math.floor((len(samples) - 1) * percent / 100 + 0.5)]


def test_percentiles_take_the_nearest_rank_and_halves_up() -> None:
    distribution = Distribution(np.arange(11, dtype=np.float64))
    assert distribution.percentile(50) == 5.0
    assert distribution.percentile(95) == 10.0  # rank 9.5
    assert distribution.percentile(94.9) == 9.0
    assert (distribution.percentile(0), distribution.percentile(100)) == (0.0, 10.0)


@given(
    samples=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=40),
    percent=st.floats(0, 100),
)
@settings(deadline=None, max_examples=100)
def test_weighted_samples_are_the_samples_spelled_out(samples: list[float], percent: float) -> None:
    values, weights = compress_gaps(np.array(samples), np.ones(len(samples), dtype=np.int64))
    weighted, plain = Distribution(values, weights), Distribution(np.sort(samples))
    assert weighted.size == plain.size == len(samples)
    assert weighted.percentile(percent) == plain.percentile(percent)
    assert weighted.percentile(percent) == nearest_rank(samples, percent)
    assert weighted.mean() == pytest.approx(np.mean(samples))
    assert weighted.std() == pytest.approx(np.std(samples), abs=1e-12)


def test_percentiles_that_are_asked_for_have_keys_of_their_own() -> None:
    """M12: unsorted, twice the same, standard ones and both ends."""
    requests = [request(0.0, (float(n),)) for n in range(1, 1002)]
    found = summarise(*requests, percentiles=[99.9, 50, 0, 99, 100, 99.9])
    extra = [key for key in found if key.endswith("_ttft_ms")][len(STATISTICS) :]
    assert extra == ["p0_ttft_ms", "p50_ttft_ms", "p99.9_ttft_ms", "p100_ttft_ms"]
    assert [found[key] for key in extra] == [1.0, 501.0, 1000.0, 1001.0]


@pytest.mark.parametrize("percent", [-1.0, 100.1, math.nan])
def test_percentiles_outside_0_to_100_are_refused(percent: float) -> None:
    with pytest.raises(InputError, match="percentile must be in 0 … 100"):
        summarise(request(0.0, (1.0,)), percentiles=[percent])


# --- Goodput (R-56) -----------------------------------------------------------------------------


def good_requests(slo: Slo, *requests: dict[str, Any]) -> Any:
    return summarise(*requests, slo=slo)["goodput_completed_requests"]


def test_goodput_counts_requests_within_every_bound() -> None:
    quick, slow = request(0.0, (10.0, 20.0)), request(0.0, (10.0, 90.0))
    late = request(0.0, (50.0, 60.0))
    assert good_requests(Slo(ttft_ms=10.0), quick, slow, late) == 2
    assert good_requests(Slo(tpot_ms=10.0), quick, slow, late) == 2
    assert good_requests(Slo(ttft_ms=10.0, tpot_ms=10.0), quick, slow, late) == 1
    assert good_requests(Slo(e2e_ms=60.0), quick, slow, late) == 2


def test_tpot_does_not_bind_a_single_token() -> None:
    assert good_requests(Slo(tpot_ms=1.0), request(0.0, (500.0,))) == 1


def test_without_a_token_only_e2e_can_be_kept() -> None:
    tokenless = request(5.0, (), end=12.0)
    assert good_requests(Slo(e2e_ms=7.0), tokenless) == 1
    assert good_requests(Slo(e2e_ms=6.9), tokenless) == 0
    assert good_requests(Slo(ttft_ms=1e9), tokenless) == 0
    assert good_requests(Slo(tpot_ms=1e9), tokenless) == 0


def test_rejected_requests_are_never_good() -> None:
    rejected = request(0.0, (), status=Status.REJECTED, end=0.0, reused=())
    assert good_requests(Slo(e2e_ms=1e9), rejected) == 0


def test_goodput_is_a_rate_over_the_whole_duration() -> None:
    found = summarise(
        request(0.0, (10.0, 20.0)), request(0.0, (10.0, 500.0)), slo=Slo(tpot_ms=10.0)
    )
    assert found["goodput_request_throughput_rps"] == 2.0
    assert found["goodput_output_throughput_tok_s"] == 4.0
    keys = list(found)
    at = keys.index("goodput_completed_requests")
    assert keys[at + 3] == "processed_tokens"


@pytest.mark.parametrize("bounds", [{}, {"ttft_ms": 0.0}, {"e2e_ms": math.inf}])
def test_bounds_that_bind_nothing_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(InputError, match="goodput"):
        Slo(**bounds)


# --- Records (R-61) -----------------------------------------------------------------------------


def test_records_are_sorted_by_arrival_and_leave_out_who_never_ended() -> None:
    outcome = outcome_of(
        request(5.0, (9.0, 11.0)),
        request(1.0, (3.0,)),
        request(1.0, (4.0,)),
        request(0.0, (2.0,), status=Status.INCOMPLETE, end=math.nan),
    )
    rows = request_records(outcome, workload_of(4))
    assert [row.session_id for row in rows] == ["request_2", "request_3", "request_1"]
    assert [row.uuid for row in rows] == [
        "00000000-0000-0000-0000-000000000002",
        "00000000-0000-0000-0000-000000000003",
        "00000000-0000-0000-0000-000000000001",
    ]
    assert rows[2].itl_ms == 2.0
    assert rows[0].itl_ms is None
    assert rows[0].prefill_worker_idx is None
    assert rows[0].decode_worker_idx == 0
    assert {row.turn_index for row in rows} == {None}


def test_two_equal_requests_have_equal_records() -> None:
    """M10."""
    twin = request(0.0, (10.0, 15.0, 20.0))
    first, second = request_records(outcome_of(twin, twin), workload_of(2))
    assert replace(first, session_id="", uuid="") == replace(second, session_id="", uuid="")


def test_turns_are_numbered_where_a_session_has_several() -> None:
    workload = workload_of(3, session_ids=["a", "b", "a"], delay_ms=[0.0, 0.0, 5.0])
    twins = [request(float(n), (n + 1.0,)) for n in range(3)]
    rows = request_records(outcome_of(*twins), workload)
    assert [row.turn_index for row in rows] == [0, 0, 1]


def test_a_rejected_request_was_never_admitted() -> None:
    outcome = outcome_of(request(3.0, (), status=Status.REJECTED, end=3.0, reused=()))
    (row,) = request_records(outcome, workload_of(1))
    assert row.first_admit_ms is None
    assert row.terminal_status == "rejected"
    assert row.readmission_count == 0


def test_pools_have_their_times_and_the_prefill_reuse() -> None:
    outcome = outcome_of(request(0.0, (9.0,), reused=(8, 3)))
    times = dict.fromkeys(
        (
            "prefill_admit_ms",
            "source_held_ms",
            "destination_reserved_ms",
            "destination_activated_ms",
            "decode_admit_ms",
        ),
        np.array([1.5]),
    )
    outcome.pools = PoolTimes(
        prefill_scheduler=np.array([4]),
        source_released_ms=np.array([math.nan]),
        prefill_reused_tokens=np.array([3]),
        decode_reused_tokens=np.array([8]),
        **times,
    )
    outcome.admissions = [[AdmissionRecord(0.0, 3, "prefill"), AdmissionRecord(1.5, 8, "decode")]]
    (row,) = request_records(outcome, workload_of(1))
    assert row.prefill_worker_idx == 4
    assert row.source_held_ms == 1.5
    assert row.source_released_ms is None
    assert (row.reused_input_tokens, row.decode_reused_input_tokens) == (3, 8)
    outcome.pools.decode_admit_ms = np.array([math.nan])
    (never_there,) = request_records(outcome, workload_of(1))
    assert never_there.decode_reused_input_tokens is None
    assert to_builtins(row)["admission_history"] == [
        {"at_ms": 0.0, "reused_input_tokens": 3, "pool": "prefill"},
        {"at_ms": 1.5, "reused_input_tokens": 8, "pool": "decode"},
    ]


def test_records_are_json_lines() -> None:
    outcome = outcome_of(request(0.0, (1.0,)), request(0.0, (2.0,)))
    lines = request_lines(outcome, workload_of(2)).splitlines()
    assert [json.loads(line)["last_token_ms"] for line in lines] == [1.0, 2.0]


# --- The document -------------------------------------------------------------------------------


def document() -> Report:
    outcome = outcome_of(request(0.0, (10.0, 12.5, 16.0)), request(2.0, (30.0,)))
    return report(outcome, workload_of(2), inputs={"timing": "by hand"}, slo=Slo(ttft_ms=20.0))


def test_equal_inputs_give_equal_bytes() -> None:
    assert document().to_json() == document().to_json()


def test_the_document_says_its_schema_and_undefined_is_null() -> None:
    read = json.loads(document().to_json())
    assert list(read) == ["schema", "inputs", "summary", "counts", "coverage", "intervals"]
    assert read["schema"] == 1
    assert read["inputs"] == {"timing": "by hand"}
    assert read["summary"]["power_w"] is None
    assert b"NaN" not in document().to_json()


def test_every_time_and_rate_has_its_unit_in_its_key() -> None:
    """M08; the one exception is the reference's own key."""
    units = ("_ms", "_rps", "_tok_s", "_seconds", "_hours", "_tokens", "_requests", "_samples")
    others = ("_ratio", "_per_worker", "_policy", "power_w", "power_coverage")
    for key in summarise(request(0.0, (1.0, 2.0))):
        assert key.endswith((*units, *others, "throughput_per_user")) or key == "num_requests"
