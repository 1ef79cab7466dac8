"""What the lock-step replay takes on, and what it says when a run cannot finish."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest

from passtime.errors import DeadEndError, PasstimeError, ProviderError
from passtime.sched.config import EngineConfig, FixedConfig, LaunchConfig, builtin_timing
from passtime.sched.lockstep.replay import replay_lockstep, supports
from passtime.sched.replay.outcome import Outcome, Status
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.timing import FloatArray, IntArray, TimingModel
from passtime.sched.workload.rows import Workload

FIXED = FixedConfig(prefill_ms=10.0, decode_ms=1.0)


def launch(**engine: Any) -> LaunchConfig:
    settings: dict[str, Any] = {"block_size": 4, "timing_model": FIXED, **engine}
    return LaunchConfig(engine=EngineConfig(**settings))


def workload(*rows: tuple[float, int, int], **columns: Any) -> Workload:
    """Rows of (timestamp, prompt, output), their prompts all different."""
    stamps, inputs, outputs = zip(*rows, strict=True)
    return Workload(
        source="test", timestamp_ms=stamps, input_tokens=inputs, output_tokens=outputs, **columns
    )


ONE = workload((0.0, 8, 4))
TURNS = workload((0.0, 8, 4), (0.0, 8, 4), session_ids=["a", "a"], delay_ms=[0.0, 1.0])


@pytest.mark.parametrize(
    ("config", "requests", "options"),
    [
        (launch(aic_nextn=2), ONE, {}),
        (launch(prefill_schedule_interval=2), ONE, {}),
        (launch(emit_kv_events=True), ONE, {}),
        (launch(backend="trtllm"), ONE, {}),
        (launch(worker_type="prefill"), ONE, {}),
        (LaunchConfig(engine=EngineConfig(), dp_size=2), ONE, {}),
        (launch(), ONE, {"num_workers": 2, "concurrency": 4}),
        (launch(), TURNS, {"num_workers": 2}),
    ],
)
def test_what_is_per_request_by_nature_is_left_to_the_literal_core(
    config: LaunchConfig, requests: Workload, options: dict[str, Any]
) -> None:
    assert not supports(config, requests, ReplayOptions(**options))


@pytest.mark.parametrize(
    ("requests", "options"),
    [(ONE, {}), (ONE, {"concurrency": 4}), (ONE, {"num_workers": 3}), (TURNS, {})],
)
def test_one_rank_and_independent_ranks_are_taken(
    requests: Workload, options: dict[str, Any]
) -> None:
    assert supports(launch(), requests, ReplayOptions(**options))


def run(requests: Workload, config: LaunchConfig, **options: Any) -> Outcome:
    timing = builtin_timing(config.engine.timing_model)
    return replay_lockstep(requests, config, timing, **options)


def test_a_request_alone_gets_its_tokens_one_pass_after_the_other() -> None:
    outcome = run(workload((5.0, 40, 3)), launch(block_size=16))  # C-65
    assert outcome.first_token_ms.tolist() == [10.0]
    assert outcome.second_token_ms.tolist() == [11.0]
    assert outcome.last_token_ms.tolist() == outcome.terminal_ms.tolist() == [12.0]
    assert dict(zip(outcome.gap_ms, outcome.gap_count, strict=True)) == {1.0: 2}


def test_a_long_stretch_is_cut_by_an_arrival() -> None:
    outcome = run(workload((0.0, 8, 1000), (500.25, 8, 2)), launch())
    assert outcome.first_admit_ms.tolist() == [0.0, 501.0]
    assert outcome.first_token_ms.tolist() == [10.0, 512.0]


def test_a_stretch_stops_where_time_is_up() -> None:
    outcome = run(workload((0.0, 8, 1000), (500.0, 8, 2)), launch(), max_sim_time_ms=99.5)
    assert outcome.status.tolist() == [Status.INCOMPLETE] * 2
    assert outcome.output_tokens.tolist() == [90, 0]
    assert outcome.last_token_ms[0] == outcome.clock_ms == 99.0
    assert np.isnan(outcome.arrival_ms[1])
    assert outcome.passes == 90


def test_workers_share_the_requests_in_order_of_arrival() -> None:
    rows = [(float(9 - row), 8 + row, 3) for row in range(10)]
    outcome = run(workload(*rows), launch(), num_workers=3)
    assert outcome.scheduler.tolist() == [row % 3 for row in range(10)][::-1]
    assert outcome.workers == {"decode": 3}
    assert (outcome.status == Status.COMPLETED).all()


def test_more_workers_than_requests_leave_some_idle() -> None:
    outcome = run(ONE, launch(), num_workers=5)
    assert outcome.scheduler.tolist() == [0]
    assert outcome.workers == {"decode": 5}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_dead_end_counts_everybody_who_waits(num_workers: int) -> None:
    outgrows = [(0.0, 16, 60)] * 2
    with pytest.raises(DeadEndError, match="with 2 in-flight requests remaining"):
        run(workload(*outgrows), launch(num_gpu_blocks=8), num_workers=num_workers)


class FailsLate:
    """A millisecond a step, until a step has too many tokens."""

    def __init__(self, answer: float | Exception) -> None:
        self.answer = answer

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return 5.0

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        if active_kv_tokens < 100:
            return 1.0
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class FailsLateInMany(FailsLate):
    """The same, asked about many steps at once."""

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        assert not isinstance(self.answer, Exception)
        return np.where(active_kv_tokens < 100, 1.0, self.answer)


@pytest.mark.parametrize(
    "model",
    [
        FailsLate(math.inf),
        FailsLate(-1.0),
        FailsLate(ZeroDivisionError("no such batch")),
        FailsLateInMany(math.nan),
        FailsLateInMany(-1.0),
    ],
)
def test_a_failing_model_is_reported_with_the_pass_that_asked(model: TimingModel) -> None:
    requests = workload((0.0, 10, 200))
    said = []
    cores: tuple[Literal["literal"], Literal["lockstep"]] = ("literal", "lockstep")
    for core in cores:
        with pytest.raises(ProviderError) as raised:
            replay(requests, launch(), model, ReplayOptions(core=core))
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "pass 90 at 94.0 ms" in said[1]


def test_every_error_of_a_run_is_one_of_ours() -> None:
    with pytest.raises(PasstimeError, match="arrival_speedup_ratio"):
        run(ONE, launch(), arrival_speedup_ratio=0.0)
