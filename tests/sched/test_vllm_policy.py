"""TensorRT-LLM where it differs from vLLM: the worked examples of its rules (T-§5) and kin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import Recorder, admissions, prompt, rank_of, request, run, words

from passtime.errors import CommandError
from passtime.sched.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    ReserveDestination,
)
from passtime.sched.replay.outcome import Outcome, Status

Core = Literal["literal", "auto"]
both_cores = pytest.mark.parametrize("core", ["literal", "auto"])


def trt(*rows: tuple[float, tuple[int, list[int]], int], core: Core, **settings: Any) -> Outcome:
    return run(*rows, core=core, backend="trtllm", **settings)


# --- Worked examples ----------------------------------------------------------------------------


@both_cores
def test_mixed_pass(core: Core) -> None:  # example 1
    outcome = trt((0, prompt(8), 6), (12, prompt(8), 2), core=core)
    assert outcome.first_token_ms.tolist() == [10.0, 30.0]
    assert outcome.second_token_ms.tolist() == [15.0, 35.0]
    assert outcome.last_token_ms.tolist() == [45.0, 35.0]


@both_cores
def test_waiting_for_completion_space(core: Core) -> None:  # example 2
    outcome = trt(
        (0, prompt(8), 12), (0, prompt(9), 12), (0, prompt(4), 4), core=core, num_gpu_blocks=10
    )
    assert outcome.first_admit_ms.tolist() == [0.0, 65.0, 65.0]
    assert outcome.last_token_ms[0] == 65.0


@both_cores
@pytest.mark.parametrize(("head", "admitted_ms", "reused"), [(2, 15.0, 8), (0, 65.0, 0)])
def test_credit_for_referenced_blocks(
    core: Core, head: int, admitted_ms: float, reused: int
) -> None:  # example 3
    outcome = trt(
        (0, prompt(8, head=2), 12), (12, prompt(9, head=head), 7), core=core, num_gpu_blocks=8
    )
    assert admissions(outcome, 1) == [(admitted_ms, reused)]


@both_cores
def test_no_credit_for_idle_blocks(core: Core) -> None:  # example 4
    outcome = trt(
        (0, prompt(8, head=2), 1),
        (12, prompt(9), 18),
        (13, prompt(9, head=2), 3),
        core=core,
        num_gpu_blocks=8,
    )
    assert outcome.last_token_ms[1] == 107.0
    assert admissions(outcome, 2) == [(107.0, 4)]


@both_cores
def test_full_hit(core: Core) -> None:  # example 5
    repeated = (100.0, prompt(8, head=2), 3)
    outcome = trt((0, prompt(8, head=2), 2), repeated, core=core)
    assert outcome.reused_tokens.tolist() == [0, 8]
    assert (outcome.first_token_ms[1], outcome.last_token_ms[1]) == (105.0, 115.0)
    outcome = trt((0, prompt(8, head=2), 2), repeated, (100.0, prompt(12), 3), core=core)
    assert outcome.first_token_ms.tolist()[1:] == [115.0, 115.0]


@both_cores
def test_chunks(core: Core) -> None:  # example 6
    outcome = trt((0, prompt(8), 8), (12, prompt(20), 3), core=core, max_num_batched_tokens=8)
    assert (outcome.first_token_ms[1], outcome.last_token_ms[1]) == (60.0, 70.0)
    assert outcome.last_token_ms[0] == 75.0


@both_cores
def test_clamp(core: Core) -> None:  # example 7
    outcome = trt((0, prompt(8), 400), core=core)
    assert (outcome.output_tokens.tolist(), outcome.last_token_ms.tolist()) == ([248], [1245.0])


@both_cores
def test_rejection(core: Core) -> None:  # example 8
    outcome = trt((0, prompt(256), 5), (5, prompt(300), 5), (5, prompt(8), 3), core=core)
    assert outcome.terminal_ms.tolist() == [0.0, 15.0, 25.0]
    assert outcome.status.tolist() == [Status.REJECTED, Status.REJECTED, Status.COMPLETED]
    assert outcome.admission_count.tolist() == [0, 0, 1]


# --- T-2 … T-7 ----------------------------------------------------------------------------------


@both_cores
@pytest.mark.parametrize(
    ("tokens", "output", "produced", "status"),
    [
        (31, 99, 1, "COMPLETED"),  # the pool holds one token more
        (32, 99, 0, "REJECTED"),
        (32, 0, 0, "COMPLETED"),  # it wants none
        (33, 0, 0, "REJECTED"),
    ],
)
def test_requests_around_the_size_of_the_pool(
    core: Core, tokens: int, output: int, produced: int, status: str
) -> None:
    outcome = trt((0, prompt(tokens), output), core=core, num_gpu_blocks=8)
    assert outcome.output_tokens.tolist() == [produced]
    assert outcome.status.tolist() == [Status[status]]


def test_a_full_hit_needs_no_budget_and_decodes_at_once() -> None:  # T-7, T-9
    model = Recorder()
    r = rank_of(backend="trtllm", timing=model, max_num_batched_tokens=8)
    r.submit(1, words(9, 8), 1)
    r.step()
    model.asked.clear()
    r.submit(2, 8, 1)
    r.submit(3, words(9, 8), 2)
    r.submit(4, words(9, 8), 2)
    seen = r.step()
    assert seen.admitted == [(2, 0), (3, 8)]  # one, and then the budget is looked at
    assert seen.who == [2, 3]
    assert model.asked == [("prefill", 1, 8, 0), ("decode", 1, 8, 8)]


@pytest.mark.parametrize("nextn", [None, 2])
def test_speculation_costs_no_block_of_a_hit(nextn: int | None) -> None:  # T-7
    r = rank_of(backend="trtllm", aic_nextn=nextn)
    for number in (1, 2):
        r.submit(number, words(9, 12), 1)
        seen = r.step()
    assert seen.admitted == [(2, 12)]


def test_a_full_hit_on_a_prefill_rank_takes_no_time() -> None:  # T-14
    r = rank_of(backend="trtllm", worker_type="prefill")
    r.submit(1, words(9, 8), 1)
    r.step()
    r.submit(2, words(9, 8), 1)
    seen = r.step()
    assert (seen.duration_ms, seen.who) == (0.0, [2])


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
def test_nobody_is_ever_preempted(mode: str) -> None:  # T-1, T-6
    r = rank_of(backend="trtllm", preemption_mode=mode, num_gpu_blocks=9)
    for number in range(1, 6):
        r.submit(number, 5 + number, 12)
    while not r.rank.is_drained():
        assert not r.step().pressure


# --- T-12: destinations -------------------------------------------------------------------------


def reserve(number: int, tokens: int | list[int], output: int) -> ReserveDestination:
    return ReserveDestination(UUID(int=500 + number), request(number, tokens, output))


def test_a_destination_must_fit_to_completion() -> None:
    r = rank_of(backend="trtllm", num_gpu_blocks=4)
    assert r.send(reserve(1, 8, 99)).lifecycle_events  # cut to the pool: four blocks in all
    with pytest.raises(CommandError, match="needs 5 blocks of 4"):
        r.send(reserve(2, 16, 1))


def test_a_destination_takes_no_cached_prefix() -> None:
    r = rank_of(backend="trtllm")
    r.submit(1, words(9, 8), 1)
    r.step()
    (event,) = r.send(reserve(2, [*words(9, 8), 1], 2)).lifecycle_events
    assert getattr(event, "transferable_prompt_tokens", None) == 12
    assert r.core.pool.unreferenced == 2


def test_a_destination_waits_for_what_others_will_still_take() -> None:
    r = rank_of(backend="trtllm", num_gpu_blocks=8)
    r.submit(1, 4, 9)  # four blocks to completion
    r.step()
    assert r.send(reserve(2, 4, 5)).lifecycle_events  # three: promised for all their length
    assert not r.send(reserve(3, 4, 4)).lifecycle_events  # two: one is left
    r.send(ActivateDestination(UUID(int=502)))
    assert r.core.destinations.pending  # it still grows to three
    ended = r.send(CancelRequest(UUID(int=1)))
    assert [event.request_id.int for event in ended.lifecycle_events] == [3]


def test_a_destination_is_queued_at_its_arrival_place() -> None:  # T-13
    r = rank_of(backend="trtllm", max_num_seqs=1)
    r.submit(1, 4, 3)
    r.send(reserve(2, 4, 2))
    r.submit(3, 4, 1)
    r.step()
    r.send(ActivateDestination(UUID(int=502)))
    assert r.waiting == [2, 3]
    r.steps(2)
    seen = r.step()
    assert (seen.admitted, seen.duration_ms, seen.who) == ([(2, 0)], 5.0, [2])
    assert r.send(CancelDestination(UUID(int=502))).result == Applied()
    assert r.running == []
