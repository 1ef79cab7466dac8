"""What a router is told of the prefix cache (C-25, C-36, V-56, V-90 … V-92)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import Rank, rank_of, request, words

from passtime.sched.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    KvEvent,
    ReleaseSource,
    Removed,
    ReserveDestination,
    Stored,
    StoredBlock,
    SubmitHandoffPrefill,
)
from passtime.sched.tokens import local_block_hash, sequence_hash

HANDOFF = UUID(int=500)

# V-56: tokens 0 … 11 in blocks of 4.
LOCAL = [9143094415614847814, 12124091508212882195, 1088361764653601668]
SEQUENCE = [9143094415614847814, 9510318385840434533, 16998148715716822651]


def events_of(**settings: Any) -> Rank:
    return rank_of(emit_kv_events=True, **settings)


def chain(tokens: list[int]) -> list[int]:
    """Sequence hashes of the whole blocks of a prompt."""
    hashes: list[int] = []
    for start in range(0, len(tokens) - 3, 4):
        local = local_block_hash(tokens[start : start + 4])
        hashes.append(sequence_hash(hashes[-1] if hashes else None, local))
    return hashes


def told(events: list[KvEvent]) -> list[tuple[str, Any]]:
    """('stored', (parent, hashes)) and ('removed', hashes) in order."""
    found: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event.data, Stored):
            hashes = [block.block_hash for block in event.data.blocks]
            found.append(("stored", (event.data.parent_hash, hashes)))
        else:
            found.append(("removed", list(event.data.block_hashes)))
    return found


def stored(parent: int | None, *hashes: int) -> tuple[str, Any]:
    return ("stored", (parent, list(hashes)))


# --- Stored (V-92) ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_prompt_s_whole_blocks_are_one_event_with_the_published_hashes(
    with_tokens: bool,
) -> None:  # V-56
    r = events_of(dp_rank=2, emit_kv_token_ids=with_tokens)
    r.submit(1, list(range(14)), 1)
    blocks = tuple(
        StoredBlock(
            block_hash=SEQUENCE[index],
            tokens_hash=LOCAL[index],
            token_ids=tuple(range(4 * index, 4 * index + 4)) if with_tokens else None,
        )
        for index in range(3)
    )
    data = Stored(parent_hash=None, blocks=blocks, start_position=None)
    assert r.step().effects.kv_events == [KvEvent(event_id=0, dp_rank=2, data=data)]


def test_events_are_shown_at_the_end_of_their_pass() -> None:  # C-26
    r = events_of()
    r.submit(1, 8, 1)
    started = r.start()
    assert started.start_effects.kv_events == []
    assert len(r.finish().effects.kv_events) == 1


def test_a_chunk_s_parent_is_the_block_before_it() -> None:
    r = events_of(max_num_batched_tokens=6)
    tokens = words(1, 16)
    r.submit(1, tokens, 1)
    hashes = chain(tokens)
    assert [told(seen.effects.kv_events) for seen in r.steps(3)] == [
        [stored(None, hashes[0])],  # tokens 0 … 5
        [stored(hashes[0], hashes[1], hashes[2])],  # … 11
        [stored(hashes[2], hashes[3])],
    ]


def test_generated_blocks_are_stored_when_their_last_token_is_computed() -> None:  # V-54
    r = events_of()
    r.submit(1, words(1, 6), [91, 92, 93, 94, 95, 96])
    hashes = chain([*words(1, 6), 91, 92])
    events = [told(seen.effects.kv_events) for seen in r.steps(6)]
    assert events == [[stored(None, hashes[0])], [], [stored(hashes[0], hashes[1])], [], [], []]
    assert r.rank.is_drained()  # tokens 9 … 11 never filled a block


def test_speculation_stores_a_generated_block_in_the_pass_that_fills_it() -> None:  # V-84
    r = events_of(aic_nextn=2, aic_nextn_accept_rates="1,1")
    r.submit(1, words(1, 6), [91, 92, 93, 94, 95, 96])
    hashes = chain([*words(1, 6), 91, 92, 93, 94])
    events = [told(seen.effects.kv_events) for seen in r.steps(2)]
    assert events == [[stored(None, hashes[0]), stored(hashes[0], hashes[1])], []]


def test_what_is_reused_is_not_told_again() -> None:
    r = events_of()
    shared = words(9, 8)
    r.submit(1, [*shared, 1], 1)
    r.submit(2, [*shared, 2, 2, 2, 2], 1)
    last = chain([*shared, 2, 2, 2, 2])
    assert told(r.step().effects.kv_events) == [
        stored(None, last[0], last[1]),
        stored(last[1], last[2]),
    ]


def test_a_second_copy_is_not_told_and_starts_no_event() -> None:
    r = events_of(aic_nextn=1)
    r.submit(1, words(9, 8), 1)
    r.step()
    tokens = [*words(9, 8), 1, 2, 3, 4, 5]
    r.submit(2, tokens, 1)
    seen = r.step()
    assert seen.admitted == [(2, 4)]  # speculation computes the second block anew
    hashes = chain(tokens)
    assert told(seen.effects.kv_events) == [stored(hashes[1], hashes[2])]
    assert len(r.core.pool.index[hashes[1]]) == 2


def test_an_activated_destination_is_told_with_its_command() -> None:  # V-77, C-36
    r = events_of(worker_type="decode")
    tokens = words(1, 10)
    hashes = chain(tokens)
    reserved = r.send(ReserveDestination(HANDOFF, request(1, tokens, 2)))
    assert reserved.kv_events == []
    assert told(r.send(ActivateDestination(HANDOFF)).kv_events) == [stored(None, *hashes)]
    assert r.step().effects.kv_events == []


def test_a_destination_tells_only_what_was_not_there() -> None:
    r = events_of()
    tokens = words(1, 12)
    r.submit(1, tokens[:4], 1)
    r.step()
    hashes = chain(tokens)
    r.send(ReserveDestination(HANDOFF, request(2, tokens, 2)))
    assert told(r.send(ActivateDestination(HANDOFF)).kv_events) == [
        stored(hashes[0], hashes[1], hashes[2])
    ]


def test_events_of_a_command_in_mid_pass_come_before_the_pass_s_with_later_ids() -> None:
    r = events_of()
    r.send(ReserveDestination(HANDOFF, request(2, 4, 2)))
    r.submit(1, 4, 1)
    r.start()
    of_command = r.send(ActivateDestination(HANDOFF)).kv_events
    of_pass = r.finish().effects.kv_events
    assert [event.event_id for event in of_pass] == [0]
    assert [event.event_id for event in of_command] == [1]


def test_losing_references_is_no_event() -> None:
    r = events_of()
    r.send(SubmitHandoffPrefill(HANDOFF, request(1, 8, 1)))
    r.step()
    assert r.send(ReleaseSource(HANDOFF)).kv_events == []
    r.send(ReserveDestination(HANDOFF, request(2, words(1, 8), 1)))
    assert r.send(CancelDestination(HANDOFF)).kv_events == []
    r.submit(3, 8, 9)
    r.step()
    assert r.send(CancelRequest(UUID(int=3))).kv_events == []
    assert len(r.core.pool.index) == 4


# --- Removed (V-91) -----------------------------------------------------------------------------


def test_evictions_are_one_event_in_order_before_what_they_made_room_for() -> None:
    r = events_of(num_gpu_blocks=4)
    first, second = words(1, 12), words(2, 12)
    r.submit(1, first, 1)
    r.step()
    r.submit(2, second, 1)
    old, new = chain(first), chain(second)
    assert told(r.step().effects.kv_events) == [
        ("removed", [old[2], old[1]]),  # one block was free
        stored(None, *new),
    ]


def test_evicting_one_of_two_copies_is_no_event() -> None:
    r = events_of(num_gpu_blocks=4)
    tokens = words(1, 8)
    hashes = chain(tokens)
    r.submit(1, tokens, 1)
    r.step()
    r.submit(2, tokens, 1)  # computes its last block anew: a second copy
    assert r.step().effects.kv_events == []
    assert r.core.pool.unreferenced == 3
    r.submit(3, 8, 0)  # two fresh blocks: one free, one evicted
    fresh = chain(words(3, 8))
    assert told(r.step().effects.kv_events) == [stored(None, *fresh)]
    r.submit(4, 16, 0)  # all four go; the last copy of each hash is told
    removed, _ = told(r.step().effects.kv_events)
    assert removed[0] == "removed"
    assert sorted(removed[1]) == sorted([*hashes, *fresh])


def test_a_reservation_tells_what_it_evicts_with_its_command() -> None:  # C-36
    r = events_of(num_gpu_blocks=3)
    r.submit(1, 12, 1)
    r.step()
    old = chain(words(1, 12))
    reserved = r.send(ReserveDestination(HANDOFF, request(2, 8, 2)))
    assert told(reserved.kv_events) == [("removed", [old[2], old[1]])]


def test_a_deferred_reservation_tells_what_it_evicts_at_the_pass_end() -> None:  # C-31
    r = events_of(num_gpu_blocks=3)
    r.submit(1, 12, 1)
    r.start()
    assert r.send(ReserveDestination(HANDOFF, request(2, 4, 2))).lifecycle_events == []
    seen = r.finish()
    hashes = chain(words(1, 12))
    assert told(seen.effects.kv_events) == [stored(None, *hashes), ("removed", [hashes[2]])]
    assert len(seen.effects.lifecycle_events) == 1


# --- When there are none (V-90) -----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"emit_kv_events": False},
        {"emit_kv_events": True, "enable_prefix_caching": False},
        {"emit_kv_events": True, "emit_kv_token_ids": True, "enable_prefix_caching": False},
    ],
)
def test_nothing_is_told_unless_asked_for_and_cached(settings: dict[str, Any]) -> None:
    r = rank_of(num_gpu_blocks=4, **settings)
    events: list[KvEvent] = []
    for number in (1, 2):
        r.submit(number, 12, 4)
        for seen in r.steps(4):
            events += seen.effects.kv_events
    r.send(ReserveDestination(HANDOFF, request(3, 8, 2)))
    events += r.send(ActivateDestination(HANDOFF)).kv_events
    assert events == []


def test_ids_count_on_over_passes_and_commands_and_removals() -> None:
    r = events_of(num_gpu_blocks=4)
    events: list[KvEvent] = []
    for number in range(1, 6):
        r.submit(number, 9, 3)
        for seen in r.steps(3):
            events += seen.effects.kv_events
    assert [event.event_id for event in events] == list(range(len(events)))
    assert sum(isinstance(event.data, Removed) for event in events) == 4
