"""Who runs in a pass, for how many tokens, and who has to go (V-20 … V-55)."""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import DECODE_MS, PREFILL_MS, Recorder, rank_of, request, words

from passtime.sched.contract import ActivateDestination, CancelRequest, ReserveDestination
from passtime.sched.vllm.scheduled import ScheduledPass, WorkItem

HANDOFF = UUID(int=500)


# --- The running phase (V-20, V-41, V-43) -------------------------------------------------------


def test_running_requests_come_first_and_a_long_prompt_takes_the_rest() -> None:  # V-43
    r = rank_of(max_num_batched_tokens=8)
    r.submit(1, 4, 9)
    r.step()
    r.submit(2, 20, 2)
    chunks = [seen.fpm.sum_prefill_tokens for seen in r.steps(3)]
    assert chunks == [7, 7, 6]
    assert r.running == [1, 2]


def test_a_prompt_that_is_not_through_leaves_nothing_for_the_next() -> None:  # V-38, V-43
    r = rank_of(max_num_batched_tokens=8)
    r.submit(1, 12, 1)
    r.submit(2, 1, 1)
    assert r.step().admitted == [(1, 0)]
    assert r.waiting == [2]
    second = r.step()
    assert second.admitted == [(2, 0)]
    assert second.who == [1, 2]


def test_a_token_takes_its_slot_in_the_pass_after_it_was_sampled() -> None:  # V-41
    r = rank_of()
    r.submit(1, 7, 8)
    active = [seen.effects.metrics.active_blocks for seen in r.steps(7)]
    assert active == [2, 2, 3, 3, 3, 3, 4]


def test_an_empty_pass_takes_no_time() -> None:  # V-64
    r = rank_of(enable_chunked_prefill=False, max_num_batched_tokens=4)
    r.submit(1, 5, 1)
    seen = r.step()
    assert (seen.duration_ms, seen.outputs, seen.admitted) == (0.0, [], [])
    assert r.waiting == [1]


# --- The waiting phase (V-30 … V-38) ------------------------------------------------------------


def test_at_most_max_num_seqs_run() -> None:  # V-30
    r = rank_of(max_num_seqs=2)
    for number in (1, 2, 3):
        r.submit(number, 4, 3)
    assert r.step().admitted == [(1, 0), (2, 0)]
    r.steps(2)
    assert r.step().admitted == [(3, 0)]


@pytest.mark.parametrize("tokens", [12, 13])
def test_a_prompt_that_leaves_no_room_is_rejected_at_the_head(tokens: int) -> None:  # V-31
    r = rank_of(max_model_len=12)
    r.submit(1, 4, 9)
    r.step()
    r.submit(2, tokens, 3)
    r.submit(3, 4, 1)
    seen = r.step()
    assert seen.who == [1, 3, 2]  # rejections after all other outputs (V-10.6)
    last = seen.effects.outputs[-1]
    assert (last.token_id, last.completed, last.rejected, last.cached_tokens) == (
        None,
        True,
        True,
        None,
    )
    assert seen.admitted == [(3, 0)]
    assert seen.duration_ms == PREFILL_MS + DECODE_MS


def test_a_prompt_larger_than_the_pool_is_rejected() -> None:  # V-33
    r = rank_of(num_gpu_blocks=3)
    r.submit(1, 13, 1)
    r.submit(2, 12, 1)
    seen = r.step()
    assert [(o.request_id.int, o.rejected) for o in seen.effects.outputs] == [
        (2, False),
        (1, True),
    ]


def test_rejecting_goes_on_when_the_budget_is_used_up() -> None:  # V-37
    r = rank_of(max_num_batched_tokens=4, max_model_len=8)
    for number, tokens in ((1, 4), (2, 9), (3, 8), (4, 1)):
        r.submit(number, tokens, 1)
    assert r.step().who == [1, 2, 3]
    assert r.waiting == [4]


def test_nobody_waits_or_runs_after_a_lone_rejection() -> None:
    r = rank_of(max_model_len=4)
    r.submit(1, 4, 1)
    seen = r.step()
    assert (seen.duration_ms, seen.who) == (0.0, [1])
    assert r.rank.is_drained()


def test_admission_is_strictly_in_order() -> None:  # V-35
    r = rank_of(num_gpu_blocks=4)
    r.submit(1, 8, 9)
    r.submit(2, 12, 1)  # three blocks, two are left
    r.submit(3, 1, 1)
    assert r.step().admitted == [(1, 0)]
    assert r.waiting == [2, 3]


def test_the_gate_asks_for_the_whole_prompt_even_if_a_chunk_would_fit() -> None:  # V-35
    r = rank_of(num_gpu_blocks=4, max_num_batched_tokens=8)
    r.submit(1, 5, 9)
    r.submit(2, 12, 1)
    assert r.step().admitted == [(1, 0)]


def test_only_blocks_that_somebody_uses_shorten_what_the_gate_asks_for() -> None:  # V-35
    r = rank_of(num_gpu_blocks=4)
    shared = words(9, 8)
    r.submit(1, [*shared, 1], 9)  # three blocks
    r.step()
    r.submit(2, [*shared, 2], 1)  # three blocks, two of them shared and in use
    assert r.step().admitted == [(2, 8)]
    r.send(CancelRequest(UUID(int=1)))
    assert r.core.pool.unreferenced == 2
    r.submit(3, words(3, 9), 1)  # three of the four
    r.submit(4, [*shared, 4], 1)  # its two hits are nobody's now: three blocks, one is left
    assert r.step().admitted == [(3, 0)]


def test_a_full_hit_without_output_is_admitted_at_budget_0_but_only_one() -> None:  # V-36
    r = rank_of(max_num_batched_tokens=8)
    shared = words(9, 8)
    r.submit(1, shared, 1)
    r.step()
    r.submit(2, 8, 1)
    r.submit(3, shared, 0)
    r.submit(4, shared, 0)
    seen = r.step()
    assert seen.admitted == [(2, 0), (3, 8)]
    assert seen.who == [3, 2]  # what wants no token completes first (V-60)
    assert r.waiting == [4]
    assert r.step().admitted == [(4, 8)]


def test_without_chunks_a_prompt_waits_for_a_budget_that_holds_it() -> None:  # V-40.3
    r = rank_of(enable_chunked_prefill=False, max_num_batched_tokens=8)
    r.submit(1, 5, 3)
    r.submit(2, 8, 1)  # blocked beside 1's prompt, and beside 1's decode
    r.submit(3, 1, 1)  # and nobody overtakes
    assert r.step().admitted == [(1, 0)]
    assert [seen.admitted for seen in r.steps(2)] == [[], []]
    assert r.step().admitted == [(2, 0)]
    assert r.step().admitted == [(3, 0)]


def test_without_chunks_only_the_prompt_part_must_fit() -> None:  # V-40.3, V-42
    r = rank_of(
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=8,
        num_gpu_blocks=6,
    )
    r.submit(1, 4, 20)
    r.submit(2, 4, 20)
    assert r.steps(10)[-1].victims == [2]  # with 9 tokens generated
    while r.running:
        r.step()
    again = r.step()
    assert again.admitted == [(2, 0)]
    assert (again.fpm.sum_prefill_tokens, again.who) == (8, [])
    rest = r.step()
    assert (rest.fpm.num_prefill_requests, rest.who) == (0, [2])


# --- Preemption (V-44, V-45, V-21) --------------------------------------------------------------


def test_the_last_request_has_to_go_and_waits_at_the_front() -> None:  # V-44, S25
    r = rank_of(num_gpu_blocks=6, max_num_seqs=3, enable_prefix_caching=False)
    r.submit(1, 8, 9)
    r.submit(2, 8, 9)
    r.submit(3, 5, 9)
    first = r.step()
    assert first.who == [1, 2, 3]
    r.submit(4, 1, 1)
    second = r.step()
    assert second.victims == [3]
    assert r.waiting == [3, 4]
    victim = r.core.waiting[0]
    assert (victim.computed, victim.allocated, victim.length, victim.generated) == (0, 0, 6, 1)
    assert second.admitted == []  # nobody is admitted in a pass that preempts (V-30)
    assert second.who == [1, 2]


def test_two_victims_of_one_pass() -> None:  # S03
    r = rank_of(num_gpu_blocks=5, enable_prefix_caching=False)
    r.submit(1, 8, 9)
    r.submit(2, 8, 9)
    r.submit(3, 3, 9)
    assert r.step().who == [1, 2, 3]
    second = r.step()
    assert second.victims == [3, 2]  # the block of 3 was enough for 1, not for 2
    assert second.who == [1]
    assert r.waiting == [2, 3]


def test_victims_of_one_allocation_until_it_fits() -> None:  # S03, V-40.6
    r = rank_of(
        num_gpu_blocks=15,
        max_num_batched_tokens=15,
        preemption_mode="fifo",
        enable_prefix_caching=False,
    )
    for number in (1, 2, 3):
        r.submit(number, 2, 20)
    r.submit(4, 45, 2)
    assert [seen.fpm.sum_prefill_tokens for seen in r.steps(3)] == [15, 12, 12]
    assert r.core.pool.free == 3  # for the three decodes; then 4 wants three more
    fourth = r.step()
    assert fourth.victims == [1, 2]
    assert fourth.who == [3, 4]
    assert r.waiting == [2, 1]


@pytest.mark.parametrize(
    ("mode", "victims", "produced"), [("lifo", [3], [1, 2]), ("fifo", [1], [2])]
)
def test_a_first_victim_makes_the_walk_skip_one_request(
    mode: str, victims: list[int], produced: list[int]
) -> None:  # V-21: with 1 gone the list is one shorter, and the index passes over 3
    r = rank_of(num_gpu_blocks=6, preemption_mode=mode, enable_prefix_caching=False)
    r.submit(1, 5, 9)
    r.submit(2, 8, 9)
    r.submit(3, 5, 9)
    assert r.step().who == [1, 2, 3]
    second = r.step()
    assert second.victims == victims
    assert second.who == produced
    if mode == "fifo":
        assert (second.fpm.num_decode_requests, second.fpm.sum_decode_kv_tokens) == (1, 9)
        assert r.step().who == [2, 3]  # the skipped one lost a pass, nothing else


def test_a_victim_s_prompt_leaves_the_questions_of_the_pass() -> None:  # V-45, S13
    model = Recorder()
    r = rank_of(timing=model, num_gpu_blocks=4, max_num_batched_tokens=8, preemption_mode="fifo")
    r.submit(1, 12, 2)
    r.send(ReserveDestination(HANDOFF, request(2, 4, 2)))
    r.send(ActivateDestination(HANDOFF))
    assert r.step().admitted == [(1, 0), (2, 0)]
    model.asked.clear()
    second = r.step()  # 1 computes its last 4 tokens, then 2 takes them for its second block
    assert second.victims == [1]
    assert model.asked == [("decode", 1, 5, 5)]
    assert (second.fpm.num_prefill_requests, second.fpm.sum_prefill_tokens) == (0, 0)
    assert (second.duration_ms, second.who) == (DECODE_MS, [2])
    model.asked.clear()
    third = r.step()  # what it had computed before it went is found again, but for one block
    assert third.admitted == [(1, 8)]
    assert model.asked == [("prefill", 1, 12, 8)]


def test_a_victim_s_tokens_return_to_the_budget() -> None:  # V-45
    r = rank_of()
    r.submit(1, 8, 1)
    r.submit(2, 8, 1)
    first, second = r.core.waiting
    work = ScheduledPass(10, counts_prefill=True)
    work.add(
        WorkItem(
            request=first,
            used=8,
            before=0,
            prompt_new=8,
            prompt_before=0,
            prompt_tokens=8,
            length=8,
            was_complete=False,
        )
    )
    work.undo(second)  # it had no item
    assert (work.budget, work.preempted) == (2, True)
    work.undo(first)
    assert (work.budget, work.items, work.prefill_arguments()) == (10, {}, None)


def test_a_preempted_request_is_one_prefill_over_all_it_knows() -> None:  # V-42
    model = Recorder()
    r = rank_of(timing=model, num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 8)
    r.submit(2, 8, 8)
    assert r.steps(6)[-1].victims == [2]
    while r.running:
        r.step()
    model.asked.clear()
    again = r.step()
    assert again.admitted == [(2, 0)]
    assert model.asked == [("prefill", 1, 8, 0), ("decode", 1, 13, 13)]  # ISL is the prompt's
    assert again.fpm.sum_prefill_tokens == 13
    assert again.effects.outputs[0].cached_tokens is None  # its first admission was told


def test_generated_tokens_are_found_again_after_a_preemption() -> None:  # V-50, V-54
    r = rank_of(num_gpu_blocks=7)
    r.submit(1, 8, 13)
    r.submit(2, 8, 8)
    while not (seen := r.step()).pressure:
        pass
    assert seen.victims == [2]
    length = r.core.waiting[0].length
    assert length == 13
    r.send(CancelRequest(UUID(int=1)))
    assert r.step().admitted == [(2, 12)]


# --- Prefix hits (V-50, V-51, V-54, V-65) -------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "output", "nextn", "reused"),
    [
        (12, 1, None, 8),  # its last block is computed anew: it must produce a token
        (13, 1, None, 12),
        (11, 1, None, 8),
        (4, 1, None, 0),
        (12, 0, None, 12),  # it wants no token
        (12, 1, 2, 4),  # speculation costs one more block
        (13, 1, 2, 8),
        (4, 1, 2, 0),
        (12, 0, 2, 12),
    ],
)
def test_how_much_of_a_cached_prompt_is_used(
    tokens: int, output: int, nextn: int | None, reused: int
) -> None:
    r = rank_of(aic_nextn=nextn)
    r.submit(1, words(9, 12), 1)
    r.step()
    r.submit(2, [*words(9, 12), 77][:tokens], output)
    assert r.step().admitted == [(2, reused)]


def test_a_prompt_hits_what_an_earlier_one_of_its_pass_computes() -> None:  # V-54
    r = rank_of()
    r.submit(1, [*words(9, 8), 1], 1)
    r.submit(2, [*words(9, 8), 2], 1)
    assert r.step().admitted == [(1, 0), (2, 8)]


def test_without_caching_nothing_is_found() -> None:
    r = rank_of(enable_prefix_caching=False)
    r.submit(1, words(9, 8), 1)
    r.submit(2, words(9, 8), 1)
    assert r.step().admitted == [(1, 0), (2, 0)]
    r.submit(3, words(9, 8), 0)
    assert r.step().admitted == [(3, 0)]


def test_blocks_are_evicted_from_the_deepest_of_the_request_that_ended_first() -> None:  # V-55
    r = rank_of(num_gpu_blocks=6)
    r.submit(1, words(1, 12), 1)
    r.step()
    r.submit(2, words(2, 12), 1)
    r.step()
    r.submit(3, 7, 1)  # two fresh blocks: the two deepest of 1
    r.step()
    r.submit(4, words(1, 12), 0)
    assert r.step().admitted == [(4, 4)]
