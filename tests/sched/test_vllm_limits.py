"""Where a run could loop, starve or end in nonsense, and does not (V-64 … V-69, R-14, R-15)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import PREFILL_MS, Recorder, admissions, prompt, run

from passtime.errors import DeadEndError, LiveLockError
from passtime.sched.replay.outcome import Status

Core = Literal["literal", "auto"]
both_cores = pytest.mark.parametrize("core", ["literal", "auto"])


class RefusesNothing(Recorder):
    """A model that has no answer for no tokens, as a table has none."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        if batch_size * (mean_isl - mean_prefix) <= 0:
            raise ValueError("no prefill of 0 tokens")
        return super().predict_prefill_ms(batch_size, mean_isl, mean_prefix)

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        if batch_size * active_kv_tokens <= 0:
            raise ValueError("no decode of 0 tokens")
        return super().predict_decode_ms(
            batch_size, active_kv_tokens, mean_context_length, total_kv_tokens
        )


@both_cores
@pytest.mark.parametrize("output", [0, 1, 3])
def test_the_same_prompt_twice_never_asks_about_0_tokens(core: Core, output: int) -> None:  # S05
    model = RefusesNothing()
    outcome = run(
        (0, prompt(64, head=16), output),
        (200, prompt(64, head=16), output),
        core=core,
        timing=model,
    )
    assert outcome.status.tolist() == [Status.COMPLETED] * 2
    assert outcome.reused_tokens.tolist() == [0, 64 if output == 0 else 60]
    prefills = [asked for asked in model.asked if asked[0] == "prefill"]
    assert prefills == [("prefill", 1, 64, 0)] + [("prefill", 1, 64, 60)] * (output > 0)


@both_cores
@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_a_request_that_wants_nothing_ends_with_its_prompt(core: Core, backend: str) -> None:
    rows = [(at, prompt(8, head=2), 0) for at in (0.0, 100.0)]  # V-65
    outcome = run(*rows, core=core, backend=backend)
    assert outcome.terminal_ms.tolist() == [PREFILL_MS, 100.0]
    assert outcome.output_tokens.tolist() == [0, 0]
    assert outcome.reused_tokens.tolist() == [0, 8]


@both_cores
@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
@pytest.mark.parametrize(
    ("tokens", "produced", "status"),
    [(10, 2, "COMPLETED"), (11, 1, "COMPLETED"), (12, 0, "REJECTED"), (13, 0, "REJECTED")],
)
def test_prompts_around_max_model_len(
    core: Core, backend: str, tokens: int, produced: int, status: str
) -> None:  # V-31, V-67, S17
    outcome = run((0, prompt(tokens), 99), core=core, backend=backend, max_model_len=12)
    assert outcome.output_tokens.tolist() == [produced]
    assert outcome.status.tolist() == [Status[status]]


@both_cores
def test_a_request_that_outgrows_the_pool_is_told_as_a_dead_end(core: Core) -> None:  # V-69
    with pytest.raises(DeadEndError, match="1 in-flight requests remaining at 60"):
        run((0, prompt(6), 99), core=core, num_gpu_blocks=4)


@both_cores
@pytest.mark.parametrize(
    ("backend", "output", "statuses"),
    [
        ("vllm", 5, ["COMPLETED", "COMPLETED"]),  # 16 computed tokens: just the pool
        ("vllm", 6, None),
        ("trtllm", 99, ["COMPLETED", "COMPLETED"]),  # cut to what the pool holds
    ],
)
def test_two_prompts_that_cannot_both_stay_take_turns_or_are_told(
    core: Core, backend: str, output: int, statuses: list[str] | None
) -> None:  # S15
    rows = [(0, prompt(12), output), (0, prompt(12), output)]
    if statuses is None:
        with pytest.raises((DeadEndError, LiveLockError)):
            run(*rows, core=core, backend=backend, num_gpu_blocks=4)
        return
    outcome = run(*rows, core=core, backend=backend, num_gpu_blocks=4)
    assert outcome.status.tolist() == [Status[status] for status in statuses]


@pytest.mark.parametrize("latency_ms", [0.0, 5.0])
def test_a_live_lock_of_bursts_is_detected(latency_ms: float) -> None:  # V-86
    timing = {"type": "fixed", "prefill_ms": latency_ms, "decode_ms": latency_ms}
    with pytest.raises(LiveLockError, match="10000 passes without output or progress"):
        run(
            (0, prompt(3), 40),
            (0, prompt(4), 40),
            num_gpu_blocks=3,
            aic_nextn=2,
            aic_nextn_accept_rates="1,1",
            enable_prefix_caching=False,
            timing_model=timing,
        )


@both_cores
@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_a_prompt_larger_than_every_budget_is_told_as_a_dead_end(
    core: Core, backend: str
) -> None:  # V-69, S19
    settings: dict[str, Any] = {"max_num_batched_tokens": 4, "backend": backend}
    with pytest.raises(DeadEndError, match="in-flight requests remaining"):
        run((0, prompt(5), 1), core=core, enable_chunked_prefill=False, **settings)
    assert run((0, prompt(4), 1), core=core, enable_chunked_prefill=False, **settings).passes == 1


@both_cores
def test_a_budget_of_one_token_still_gets_there(core: Core) -> None:  # S19
    outcome = run((0, prompt(5), 3), (0, prompt(3), 2), core=core, max_num_batched_tokens=1)
    assert outcome.status.tolist() == [Status.COMPLETED] * 2
    assert outcome.first_token_ms.tolist()[0] == 5 * PREFILL_MS
    assert outcome.committed_prefill_tokens == 8


@both_cores
@pytest.mark.parametrize(
    ("backend", "mode"), [("vllm", "lifo"), ("vllm", "fifo"), ("trtllm", "lifo")]
)
def test_nobody_freezes_when_the_pool_is_small(core: Core, backend: str, mode: str) -> None:
    rows = [  # S23: 200 requests, 1024 tokens of KV, 5 places
        (7.0 * n, prompt(20 + (37 * n) % 400, head=n % 5, of=n % 7), 1 + (53 * n) % 150)
        for n in range(198)
    ]
    rows += [(500.0, prompt(1025), 3), (600.0, prompt(1500), 0)]
    outcome = run(
        *rows,
        core=core,
        backend=backend,
        preemption_mode=mode,
        num_gpu_blocks=256,
        max_num_seqs=5,
        max_num_batched_tokens=128,
    )
    assert outcome.status.tolist() == [Status.COMPLETED] * 198 + [Status.REJECTED] * 2
    assert outcome.output_tokens.tolist()[:198] == [output for _, _, output in rows[:198]]
    if backend == "vllm":
        assert outcome.preemptions > 0


@both_cores
def test_passes_of_no_time_that_do_something_go_on(core: Core) -> None:  # V-64, R-14
    outcome = run(
        (0, prompt(8), 3),
        (4, prompt(6), 2),
        core=core,
        timing_model={"type": "fixed", "prefill_ms": 0, "decode_ms": 0},
    )
    assert outcome.terminal_ms.tolist() == [0.0, 4.0]
    assert outcome.output_tokens.tolist() == [3, 2]


@both_cores
def test_a_full_hit_admitted_at_budget_0_is_not_admitted_twice(core: Core) -> None:
    outcome = run(
        (0, prompt(8, head=2), 1),
        (50, prompt(8), 1),
        (50, prompt(8, head=2), 0),
        (50, prompt(8, head=2), 0),
        core=core,
        max_num_batched_tokens=8,
    )
    assert [admissions(outcome, row) for row in (2, 3)] == [[(50.0, 8)], [(60.0, 8)]]
    assert outcome.terminal_ms.tolist() == [10.0, 60.0, 60.0, 60.0]
