"""Speculative decoding on a vLLM rank: reserving, drawing and producing bursts (V-80 … V-86)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import DECODE_MS, PREFILL_MS, Rank, Recorder, rank_of

from passtime.sched.contract import CancelRequest

ALWAYS = {"aic_nextn": 2, "aic_nextn_accept_rates": "1,1"}


def bursts_of(**settings: Any) -> Rank:
    merged: dict[str, Any] = {"enable_prefix_caching": False} | ALWAYS | settings
    return rank_of(**merged)


def test_a_first_burst_costs_prefill_and_decode() -> None:  # V-80
    model = Recorder()
    r = bursts_of(timing=model)
    r.submit(1, 5, 4)
    first, second = r.steps(2)
    assert model.asked == [("prefill", 1, 5, 0), ("decode", 1, 5, 5), ("decode", 1, 8, 8)]
    assert (first.duration_ms, second.duration_ms) == (PREFILL_MS + DECODE_MS, DECODE_MS)
    assert [len(seen.outputs) for seen in (first, second)] == [3, 1]  # cut to what is left


def test_bursts_come_one_request_after_the_other() -> None:  # V-84
    r = bursts_of()
    r.submit(1, 4, [11, 12, 13, 14])
    r.submit(2, 4, [21, 22])
    seen = r.step()
    assert seen.outputs == [(1, 11), (1, 12), (1, 13), (2, 21), (2, 22)]
    assert [output.completed for output in seen.effects.outputs] == [False] * 4 + [True]


def test_a_token_of_a_burst_takes_its_slot_at_once() -> None:  # V-84
    r = bursts_of()
    r.submit(1, 4, 9)
    active = [seen.effects.metrics.active_blocks for seen in r.steps(2)]
    assert active == [2, 3]  # 7 and 10 tokens
    (state,) = r.core.running
    assert (state.computed, state.allocated, state.length) == (9, 10, 10)


def test_what_was_promised_and_not_needed_is_returned() -> None:  # V-81, V-84
    r = bursts_of(aic_nextn_accept_rates="0,0")
    r.submit(1, 7, 9)
    passes = r.steps(4)
    assert [len(seen.outputs) for seen in passes] == [1, 1, 1, 1]
    assert [seen.effects.metrics.active_blocks for seen in passes] == [2, 3, 3, 3]
    assert r.core.pool.reserved == 0


def test_a_reservation_covers_the_longest_burst_and_preempts_for_it() -> None:  # V-81
    r = bursts_of(num_gpu_blocks=4)
    r.submit(1, 6, 9)
    r.submit(2, 6, 9)
    seen = r.step()  # 9 tokens each at most: three blocks, together two too many
    assert seen.victims == [2]
    assert seen.who == [1, 1, 1]
    assert seen.fpm.num_prefill_requests == 2  # the victim's work was done (V-81)
    assert seen.duration_ms == PREFILL_MS + DECODE_MS
    assert r.waiting == [2]


def test_a_request_near_its_end_asks_for_less() -> None:  # V-81
    r = bursts_of(num_gpu_blocks=4)
    r.submit(1, 6, 2)
    r.submit(2, 6, 2)
    seen = r.step()
    assert (seen.victims, seen.who) == ([], [1, 1, 2, 2])


def test_the_last_one_preempts_itself_and_nothing_is_said() -> None:  # V-81
    r = bursts_of(num_gpu_blocks=2)
    r.submit(1, 6, 9)
    seen = r.step()
    assert (seen.victims, seen.outputs, seen.duration_ms) == ([1], [], PREFILL_MS)
    assert r.waiting == [1]


def test_a_clamped_burst_draws_as_many_trials() -> None:  # V-83
    def lengths(first_output: int) -> list[int]:
        r = bursts_of(aic_nextn=4, aic_nextn_accept_rates="0.5,0.5,0.5,0.5")
        r.submit(1, 4, first_output)
        r.step()
        r.send(CancelRequest(UUID(int=1)))
        r.submit(2, 4, 60)
        return [len(seen.outputs) for seen in r.steps(8)]

    assert lengths(first_output=1) == lengths(first_output=60)


def test_a_prefill_rank_bursts_by_one_and_draws_nothing() -> None:  # V-83
    r = bursts_of(worker_type="prefill")
    r.submit(1, 4, 3)
    assert [len(seen.outputs) for seen in r.steps(3)] == [1, 1, 1]


@pytest.mark.parametrize(("rates", "expected"), [("1,1", [3, 3]), ("0,1", [1, 1]), ("1,0", [2, 2])])
def test_a_burst_ends_with_the_first_draft_that_is_refused(
    rates: str, expected: list[int]
) -> None:  # V-83, V-85
    r = bursts_of(aic_nextn_accept_rates=rates)
    r.submit(1, 4, 40)
    assert [len(seen.outputs) for seen in r.steps(2)] == expected


def test_max_model_len_cuts_a_burst() -> None:  # V-4
    r = bursts_of(max_model_len=9)
    r.submit(1, 7, 40)
    seen = r.step()
    assert [output.completed for output in seen.effects.outputs] == [False, True]


def test_what_wants_no_output_is_outside_of_every_burst() -> None:  # V-80
    r = bursts_of()
    r.submit(1, 4, 0)
    r.submit(2, 4, 3)
    seen = r.step()
    assert seen.who == [1, 2, 2, 2]
    assert seen.effects.outputs[0].token_id is None
