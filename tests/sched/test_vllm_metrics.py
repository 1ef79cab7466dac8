"""What a rank tells of itself: passes, snapshots and pressure (C-20 … C-24), counted by hand."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import DECODE_MS, PREFILL_MS, Seen, rank_of, request, words

from passtime.sched.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    ForwardPassMetrics,
    Metrics,
    PressureEvent,
    PressureState,
    ReleaseSource,
    ReserveDestination,
    SubmitHandoffPrefill,
)


def tells(seen: Seen, duration_ms: float, **fields: Any) -> None:
    """All thirteen fields and the duration: what is not named is 0."""
    assert seen.fpm == ForwardPassMetrics(duration_ms=duration_ms, **fields)


# --- Forward-pass metrics (C-23) ----------------------------------------------------------------


def test_the_thirteen_fields() -> None:
    names = [field.name for field in dataclasses.fields(ForwardPassMetrics)]
    assert len(names) == 13 + 1
    assert names[-1] == "duration_ms"


def test_prompts_of_different_lengths() -> None:
    r = rank_of()
    for number, tokens in ((1, 5), (2, 8), (3, 14)):
        r.submit(number, tokens, 2)
    tells(
        r.step(),
        PREFILL_MS,
        num_prefill_requests=3,
        sum_prefill_tokens=27,
        var_prefill_length=14.0,  # 5, 8, 14: mean 9, squares 16 + 1 + 25
    )
    tells(
        r.step(),
        DECODE_MS,
        num_decode_requests=3,
        sum_decode_kv_tokens=6 + 9 + 15,
        var_decode_kv_tokens=14.0,
    )


def test_a_chunk_counts_its_tokens_and_the_whole_prompt_s_length() -> None:
    r = rank_of(max_num_batched_tokens=8)
    r.submit(1, 4, 9)
    r.submit(2, 10, 1)
    tells(
        r.step(),
        PREFILL_MS,
        num_prefill_requests=2,
        sum_prefill_tokens=8,
        var_prefill_length=9.0,  # 4 and 10
    )
    tells(
        r.step(),
        PREFILL_MS + DECODE_MS,
        num_prefill_requests=1,
        sum_prefill_tokens=6,
        sum_prefill_kv_tokens=4,
        num_decode_requests=1,
        sum_decode_kv_tokens=5,
    )


def test_cached_tokens_were_there_before_the_pass() -> None:
    r = rank_of()
    r.submit(1, words(9, 12), 1)
    r.step()
    r.submit(2, [*words(9, 8), 1, 2], 1)
    r.submit(3, [*words(9, 4), 1, 2], 1)
    tells(
        r.step(),
        PREFILL_MS,
        num_prefill_requests=2,
        sum_prefill_tokens=2 + 2,
        var_prefill_length=4.0,
        sum_prefill_kv_tokens=8 + 4,
    )


def test_those_who_wait_for_their_first_pass_are_queued_prefills() -> None:
    r = rank_of(max_num_seqs=1)
    for number, tokens in ((1, 4), (2, 3), (3, 9)):
        r.submit(number, tokens, 2)
    tells(
        r.step(),
        PREFILL_MS,
        num_prefill_requests=1,
        sum_prefill_tokens=4,
        num_queued_prefill=2,
        sum_queued_prefill_tokens=12,
        var_queued_prefill_length=9.0,
    )


def test_the_queue_is_counted_after_the_tokens_came_out() -> None:
    r = rank_of(max_num_seqs=1)
    r.submit(1, 4, 1)
    r.submit(2, 7, 1)
    seen = r.step()
    assert (seen.fpm.num_queued_prefill, r.running, r.waiting) == (1, [], [2])


def test_a_recomputed_request_counts_all_its_tokens_as_prefill() -> None:
    r = rank_of(num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 8)
    r.submit(2, 8, 8)
    preempting = r.steps(6)[-1]
    tells(
        preempting,
        DECODE_MS,
        num_decode_requests=1,  # the victim had no item yet
        sum_decode_kv_tokens=13,
        num_queued_decode=1,
        sum_queued_decode_kv_tokens=8 + 5,
    )
    while r.running:
        r.step()
    tells(
        r.step(),
        PREFILL_MS + DECODE_MS,
        num_prefill_requests=1,
        sum_prefill_tokens=13,  # 5 of them are its own output
    )


def test_a_recomputed_chunk_of_output_alone_counts_as_decode_and_says_nothing() -> None:
    r = rank_of(num_gpu_blocks=6, enable_prefix_caching=False, max_num_batched_tokens=4)
    r.submit(1, 2, 20)
    r.submit(2, 2, 20)
    while not r.step().pressure:
        pass
    length = r.core.waiting[0].length
    assert (r.waiting, length) == ([2], 13)
    while r.running:
        r.step()
    tells(r.step(), PREFILL_MS, num_prefill_requests=1, sum_prefill_tokens=4)
    for _ in range(2):
        alone = r.step()
        tells(alone, 0.0, num_decode_requests=1, sum_decode_kv_tokens=length)
        assert alone.outputs == []
    last = r.step()
    tells(last, DECODE_MS, num_decode_requests=1, sum_decode_kv_tokens=length)
    assert last.who == [2]


def test_a_request_that_wants_no_output_is_a_prefill_and_never_a_decode() -> None:
    r = rank_of()
    shared = words(9, 8)
    r.submit(1, shared, 0)
    tells(r.step(), PREFILL_MS, num_prefill_requests=1, sum_prefill_tokens=8)
    r.submit(2, shared, 0)
    full_hit = r.step()
    tells(full_hit, 0.0)
    assert (full_hit.admitted, full_hit.who) == ([(2, 8)], [2])


def test_destinations_of_every_kind_are_queued_decodes_of_their_prompt() -> None:
    r = rank_of(num_gpu_blocks=8, max_num_seqs=1)
    r.submit(1, 4, 9)
    reserve = [ReserveDestination(UUID(int=500 + n), request(n, 4 * n, 5)) for n in (2, 3, 4)]
    assert r.send(reserve[0]).lifecycle_events  # reserved and then activated
    assert r.send(reserve[1]).lifecycle_events  # reserved
    r.send(ActivateDestination(UUID(int=502)))
    assert not r.send(reserve[2]).lifecycle_events  # four blocks: three are left
    tells(
        r.step(),
        DECODE_MS,  # while a reservation waits, only what was activated may start (V-30)
        num_decode_requests=1,
        sum_decode_kv_tokens=8,
        num_queued_prefill=1,
        sum_queued_prefill_tokens=4,
        num_queued_decode=2,
        sum_queued_decode_kv_tokens=12 + 16,
        var_queued_decode_kv_tokens=4.0,
    )
    r.send(CancelRequest(UUID(int=2)))
    r.send(ActivateDestination(UUID(int=503)))
    for command in (CancelDestination(UUID(int=504)), ActivateDestination(UUID(int=504))):
        r.send(command)
    assert r.step().fpm.num_queued_decode == 1  # activated, and 1 has the only place


def test_speculation_counts_the_pass_not_the_burst() -> None:
    r = rank_of(aic_nextn=2, aic_nextn_accept_rates="1,1")
    r.submit(1, 5, 6)
    tells(r.step(), PREFILL_MS + DECODE_MS, num_prefill_requests=1, sum_prefill_tokens=5)
    tells(r.step(), DECODE_MS, num_decode_requests=1, sum_decode_kv_tokens=8)


def test_on_a_decode_rank_a_recomputation_is_a_prefill_that_takes_no_time() -> None:
    r = rank_of(worker_type="decode", num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 8)
    tells(r.step(), DECODE_MS, num_prefill_requests=1, sum_prefill_tokens=8)


# --- Snapshots (C-24, C-26) ---------------------------------------------------------------------


def snapshot(active: int, running: int, waiting: int, preemptions: int = 0) -> Metrics:
    return Metrics(
        dp_rank=0,
        active_blocks=active,
        total_blocks=8,
        running_requests=running,
        waiting_requests=waiting,
        preemptions_total=preemptions,
    )


def test_a_command_in_mid_pass_sees_what_the_pass_did() -> None:
    r = rank_of(num_gpu_blocks=8)
    r.submit(1, 7, 1)
    r.submit(2, 5, 9)
    r.start()
    assert r.submit(3, 4, 1).metrics == snapshot(active=2, running=1, waiting=1)
    assert r.finish().effects.metrics == snapshot(active=2, running=1, waiting=1)


def test_the_end_of_a_pass_shows_what_commands_did_since_its_start() -> None:
    r = rank_of(num_gpu_blocks=8)
    r.submit(1, 7, 9)
    r.start()
    assert r.send(CancelRequest(UUID(int=1))).metrics == snapshot(active=0, running=0, waiting=0)
    r.submit(2, 4, 1)
    assert r.finish().effects.metrics == snapshot(active=0, running=0, waiting=1)


def test_promised_and_held_blocks_are_active_and_cached_ones_are_not() -> None:
    r = rank_of(num_gpu_blocks=8)
    r.send(SubmitHandoffPrefill(UUID(int=501), request(1, words(9, 8), 1)))
    assert r.step().effects.metrics == snapshot(active=2, running=0, waiting=0)
    reserve = ReserveDestination(UUID(int=502), request(2, [*words(9, 8), 1], 1))
    reserved = r.send(reserve)
    assert reserved.metrics == snapshot(active=3, running=0, waiting=1)  # two pinned, one promised
    assert r.send(ReleaseSource(UUID(int=501))).metrics.active_blocks == 3
    assert r.send(CancelDestination(UUID(int=502))).metrics == snapshot(0, 0, 0)
    assert r.core.pool.unreferenced == 2


def test_usage_is_the_active_share() -> None:
    assert snapshot(active=6, running=1, waiting=0).cache_usage == 0.75


# --- Admissions and outputs (C-20, C-21) --------------------------------------------------------


def test_the_first_output_tells_the_credit_of_the_first_admission() -> None:
    r = rank_of()
    r.submit(1, words(9, 8), 1)
    r.step()
    r.submit(2, [*words(9, 8), 1], 3)
    told = [output.cached_tokens for seen in r.steps(3) for output in seen.effects.outputs]
    assert told == [8, None, None]


def test_a_completion_without_token_tells_it_too() -> None:
    r = rank_of()
    r.submit(1, words(9, 8), 0)
    r.submit(2, words(9, 8), 0)
    outputs = [output for seen in r.steps(1) for output in seen.effects.outputs]
    assert [(o.token_id, o.completed, o.rejected, o.cached_tokens) for o in outputs] == [
        (None, True, False, 0),
        (None, True, False, 8),
    ]


def test_every_admission_is_told_with_its_own_credit() -> None:
    r = rank_of(num_gpu_blocks=7)
    r.submit(1, 8, 13)
    r.submit(2, words(2, 8), 8)
    admitted = r.step().admitted
    while not r.step().pressure:
        pass
    r.send(CancelRequest(UUID(int=1)))
    again = r.step()
    assert [*admitted, *again.admitted] == [(1, 0), (2, 0), (2, 12)]
    assert again.effects.outputs[0].cached_tokens is None


# --- Pressure (C-22) ----------------------------------------------------------------------------


def test_each_preemption_is_told_when_its_pass_starts() -> None:
    r = rank_of(num_gpu_blocks=5, enable_prefix_caching=False)
    r.submit(1, 8, 9)
    r.submit(2, 8, 9)
    r.submit(3, 3, 9)
    r.step()
    r.send(ReserveDestination(UUID(int=501), request(4, 8, 1)))  # waits, and is not counted
    started = r.start()
    assert started.start_effects.pressure_events == [
        PressureEvent(
            at_ms=PREFILL_MS,
            kind="vllm_preemption",
            request_id=UUID(int=victim),
            state_before=PressureState(
                running_requests=running, waiting_requests=waiting, active_blocks=active
            ),
            state_after=PressureState(
                running_requests=running - 1, waiting_requests=waiting + 1, active_blocks=left
            ),
            request_active_blocks_before=blocks,
        )
        for victim, running, waiting, active, left, blocks in [
            (3, 3, 0, 5, 4, 1),  # for 1's third block
            (2, 2, 1, 5, 3, 2),  # for its own
        ]
    ]
    assert r.finish().effects.metrics.preemptions_total == 2


def test_the_count_of_preemptions_lasts_a_lifetime() -> None:
    r = rank_of(num_gpu_blocks=6, enable_prefix_caching=False)
    for number in (1, 2):
        r.submit(number, 8, 8)
    while not r.rank.is_drained():
        last = r.step()
    assert last.effects.metrics.preemptions_total == 1


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_only_vllm_preempts(backend: str) -> None:
    r = rank_of(backend=backend, num_gpu_blocks=6, enable_prefix_caching=False)
    for number in (1, 2):
        r.submit(number, 8, 8)
    events = 0
    while not r.rank.is_drained():
        events += len(r.step().pressure)
    assert events == (1 if backend == "vllm" else 0)
