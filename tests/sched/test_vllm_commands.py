"""Commands to a vLLM rank: cancelling, both sides of a handoff, and what counts as more room."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import DECODE_MS, PREFILL_MS, Rank, rank_of, request, words

from passtime.errors import CommandError
from passtime.sched.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    DestinationReserved,
    Noop,
    ReleaseSource,
    ReserveDestination,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
    TransferTiming,
)


def handoff(number: int) -> UUID:
    return UUID(int=500 + number)


def source(number: int, *prompt_and_output: Any) -> SubmitHandoffPrefill:
    return SubmitHandoffPrefill(handoff(number), request(number, *prompt_and_output))


def reserve(number: int, *prompt_and_output: Any) -> ReserveDestination:
    return ReserveDestination(handoff(number), request(number, *prompt_and_output))


def reserved(events: list[Any]) -> list[tuple[int, int]]:
    """(request number, transferable tokens) of reservations."""
    assert all(isinstance(event, DestinationReserved) for event in events)
    return [(event.request_id.int, event.transferable_prompt_tokens) for event in events]


# --- What no rank takes (C-10) ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])
def test_a_request_needs_a_prompt(backend: str) -> None:
    r = rank_of(backend=backend)
    for command in (Submit(request(1, [], 2)), source(1, [], 2), reserve(1, [], 2)):
        with pytest.raises(CommandError, match=r"request .*01 has an empty prompt"):
            r.send(command)
    assert r.rank.is_drained()


# --- Cancelling (V-87, V-88) --------------------------------------------------------------------


def test_cancelling_in_mid_pass_frees_at_once_and_shortens_nothing() -> None:
    r = rank_of()
    r.submit(1, 8, 5)
    r.submit(2, 4, 5)
    r.start()
    effects = r.send(CancelRequest(UUID(int=1)))
    assert (effects.result, effects.retired_requests) == (Applied(), [UUID(int=1)])
    assert effects.metrics.active_blocks == 1
    seen = r.finish()
    assert (seen.who, seen.duration_ms) == ([2], PREFILL_MS)


def test_a_preempted_request_can_be_cancelled() -> None:
    r = rank_of(num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 9)
    r.submit(2, 8, 9)
    while not r.step().pressure:
        pass
    assert r.send(CancelRequest(UUID(int=2))).result == Applied()
    assert (r.running, r.waiting) == ([1], [])


def test_what_the_scheduler_does_not_hold_is_not_cancelled() -> None:
    r = rank_of(num_gpu_blocks=4)
    r.send(source(1, 4, 1))
    r.step()
    r.send(reserve(2, 8, 1))
    r.send(reserve(3, 8, 1))
    for number in (1, 2, 3, 99):  # held, reserved, pending, unknown
        assert r.send(CancelRequest(UUID(int=number))).result == Noop()
    assert r.core.sources.held
    assert r.core.destinations.pending
    assert r.core.destinations.reserved


def test_a_cancelled_id_may_come_again() -> None:
    r = rank_of()
    for _ in range(3):
        r.submit(1, 8, 5)
        r.step()
        r.send(CancelRequest(UUID(int=1)))
    assert r.rank.is_drained()


# --- The prefill side (V-71 … V-73, V-79) -------------------------------------------------------


def test_a_held_source_owns_blocks_but_no_place() -> None:  # V-72
    r = rank_of(max_num_seqs=1, num_gpu_blocks=4)
    tokens = words(1, 9)
    r.send(source(1, tokens, 1))
    seen = r.step()
    (held,) = seen.effects.lifecycle_events
    assert isinstance(held, SourceHeld)
    assert (held.handoff_id, held.request_id) == (handoff(1), UUID(int=1))
    assert seen.effects.metrics.active_blocks == 3
    r.submit(2, [*tokens[:8], 5], 1)  # its first two blocks are findable, and in use
    r.submit(3, 8, 1)
    assert r.step().admitted == [(2, 8)]
    assert r.step().admitted == []  # 3 needs two blocks, and one is left
    r.send(ReleaseSource(handoff(1)))
    assert r.step().admitted == [(3, 0)]


def test_a_source_released_too_early_is_an_ordinary_request() -> None:  # V-73
    r = rank_of(max_num_batched_tokens=4)
    r.send(source(1, 8, 1))
    r.step()
    released = r.send(ReleaseSource(handoff(1)))
    assert (released.result, released.retired_requests) == (Applied(), [])
    seen = r.step()
    assert (seen.who, seen.effects.lifecycle_events) == ([1], [])
    assert r.rank.is_drained()


@pytest.mark.parametrize("command", [ReleaseSource, CancelSource])
def test_ending_a_held_source(command: Callable[[UUID], Any]) -> None:  # V-73, V-79
    r = rank_of()
    r.send(source(1, 8, 1))
    r.step()
    effects = r.send(command(handoff(1)))
    assert (effects.result, effects.retired_requests) == (Applied(), [UUID(int=1)])
    assert effects.metrics.active_blocks == 0
    assert r.send(command(handoff(1))).result == Noop()


def test_cancelling_a_pending_source_takes_its_request_along() -> None:  # V-79, C-34
    r = rank_of()
    r.send(source(1, 8, 3))
    r.start()
    effects = r.send(CancelSource(handoff(1)))
    assert effects.suppressed_pending_output
    assert r.finish().outputs == []
    assert r.rank.is_drained()


def test_a_source_that_ended_in_the_pass_in_flight_is_suppressed_with_its_event() -> None:  # C-34
    r = rank_of()
    r.send(source(1, 8, 1))
    r.start()
    effects = r.send(CancelSource(handoff(1)))  # it is held already, though nobody was told
    assert (effects.result, effects.suppressed_pending_output) == (Applied(), True)
    seen = r.finish()
    assert (seen.outputs, seen.effects.lifecycle_events) == ([], [])


def test_one_handoff_holds_one_source() -> None:  # C-15
    r = rank_of()
    r.send(source(1, 8, 1))
    with pytest.raises(CommandError, match=f"handoff {handoff(1)} is already active"):
        r.send(SubmitHandoffPrefill(handoff(1), request(2, 4, 1)))


@pytest.mark.parametrize(
    ("mode", "size", "bandwidth", "missing", "delay_ms"),
    [
        ("full_prompt", 131072, 50.0, 4, ((1000 * 131072) / (50.0 * 1e9)) * 1000),
        ("destination_missing", 131072, 50.0, 4, ((4 * 131072) / (50.0 * 1e9)) * 1000),
        ("destination_missing", 131072, 50.0, 0, 0.0),
        ("full_prompt", None, 50.0, 4, None),
        ("full_prompt", 131072, None, 4, None),
        ("full_prompt", 131072, 0.0, 4, None),
    ],
)
def test_how_long_the_transfer_takes(
    mode: Any, size: int | None, bandwidth: float | None, missing: int, delay_ms: float | None
) -> None:  # C-16
    r = rank_of(
        kv_transfer_timing_mode=mode,
        kv_transfer_bytes_per_token=size,
        kv_transfer_bandwidth=bandwidth,
        num_gpu_blocks=256,
    )
    r.send(source(1, 1000, 1))
    (held,) = r.step().effects.lifecycle_events
    assert isinstance(held, SourceHeld)
    assert held.transfer_timing == TransferTiming(
        mode=mode, full_prompt_tokens=1000, kv_bytes_per_token=size, bandwidth_gb_s=bandwidth
    )
    assert held.transfer_timing.delay_ms(missing) == delay_ms


# --- The decode side (V-74 … V-79) --------------------------------------------------------------


def test_what_is_cached_need_not_be_transferred() -> None:  # V-75: whole blocks, no V-51 cut
    r = rank_of()
    r.submit(1, words(9, 8), 1)
    r.step()
    assert reserved(r.send(reserve(2, words(9, 8), 1)).lifecycle_events) == [(2, 0)]
    assert reserved(r.send(reserve(3, [*words(9, 8), 1, 2], 1)).lifecycle_events) == [(3, 4)]
    assert r.core.pool.unreferenced == 0  # pinned


def test_reservations_are_served_in_order_and_one_at_a_time() -> None:  # V-75
    r = rank_of(num_gpu_blocks=6)
    r.submit(1, 16, 9)
    r.step()
    for number, tokens in ((2, 12), (3, 4), (4, 4)):  # 3 and 4 would fit beside 1
        assert r.send(reserve(number, tokens, 1)).lifecycle_events == []
    freed = r.send(CancelRequest(UUID(int=1)))
    assert reserved(freed.lifecycle_events) == [(2, 12)]
    assert reserved(r.send(CancelDestination(handoff(2))).lifecycle_events) == [(3, 4)]
    assert reserved(r.send(ActivateDestination(handoff(3))).lifecycle_events) == [(4, 4)]


def test_a_full_rank_reserves_nothing() -> None:  # V-75
    r = rank_of(max_num_seqs=1)
    r.submit(1, 4, 2)
    r.step()
    assert r.send(reserve(2, 4, 1)).lifecycle_events == []
    seen = r.step()  # 1 ends, and with it the reason
    assert reserved(seen.effects.lifecycle_events) == [(2, 4)]


def test_while_a_reservation_waits_nobody_else_is_admitted() -> None:  # V-30, V-74
    r = rank_of(num_gpu_blocks=4)
    r.send(reserve(1, 8, 1))
    r.send(reserve(2, 12, 1))
    r.submit(3, 4, 1)
    assert r.step().admitted == []
    r.send(ActivateDestination(handoff(1)))
    assert r.step().admitted == [(1, 0)]
    r.send(CancelDestination(handoff(2)))
    assert r.step().admitted == [(3, 0)]


def test_an_activated_request_takes_the_place_of_its_arrival() -> None:  # V-77
    r = rank_of(max_num_seqs=1)
    r.submit(1, 4, 3)
    r.send(reserve(2, 4, 2))
    r.submit(3, 4, 1)
    r.send(reserve(4, 4, 2))
    r.step()
    for number in (4, 2):
        r.send(ActivateDestination(handoff(number)))
    assert r.waiting == [2, 3, 4]
    assert [q.request_id.int for q in r.core.materialized] == [2, 4]


def test_an_activated_request_decodes_from_its_first_pass_on() -> None:  # V-78
    r = rank_of()
    r.send(reserve(1, 8, 2))
    r.send(ActivateDestination(handoff(1)))
    seen = r.step()
    assert (seen.admitted, seen.who, seen.duration_ms) == ([(1, 0)], [1], DECODE_MS)
    assert seen.effects.outputs[0].cached_tokens == 0


def test_activation_makes_whole_blocks_findable_at_once() -> None:  # V-77
    r = rank_of()
    r.send(reserve(1, words(9, 10), 2))
    r.submit(2, [*words(9, 8), 1], 1)
    r.send(ActivateDestination(handoff(1)))
    assert r.step().admitted == [(1, 0), (2, 8)]


@pytest.mark.parametrize("stage", ["pending", "reserved", "waiting", "running", "preempted"])
def test_a_destination_can_be_given_up_at_every_stage(stage: str) -> None:  # V-79
    r = rank_of(num_gpu_blocks=4, enable_prefix_caching=False)
    if stage in ("pending", "preempted"):
        r.submit(9, 8 if stage == "pending" else 4, 9)
        r.step()
    r.send(reserve(1, 12 if stage == "pending" else 8, 8))
    if stage not in ("pending", "reserved"):
        r.send(ActivateDestination(handoff(1)))
    if stage in ("running", "preempted"):
        r.step()
    if stage == "preempted":
        r.step()
        assert (r.running, r.waiting) == ([9], [1])
    effects = r.send(CancelDestination(handoff(1)))
    assert (effects.result, effects.retired_requests) == (Applied(), [UUID(int=1)])
    assert r.send(CancelDestination(handoff(1))).result == Noop()
    r.send(CancelRequest(UUID(int=9)))
    assert r.rank.is_drained()
    assert r.core.pool.free == 4


def test_a_given_up_reservation_unpins_its_deepest_block_first() -> None:  # V-79
    r = rank_of(num_gpu_blocks=4)
    r.submit(1, words(9, 12), 1)
    r.step()
    r.send(reserve(2, words(9, 12), 1))
    r.send(CancelDestination(handoff(2)))
    r.submit(3, 8, 0)  # one fresh block and one evicted
    r.step()
    r.submit(4, words(9, 12), 0)
    assert r.step().admitted == [(4, 8)]


# --- What counts as more room (V-76, V-88) ------------------------------------------------------


def one_running(r: Rank) -> None:
    r.submit(1, 8, 9)
    r.step()


def one_waiting(r: Rank) -> None:
    r.submit(1, 8, 9)


def one_held(r: Rank) -> None:
    r.send(source(1, 8, 1))
    r.step()


def one_reserved(r: Rank) -> None:
    r.send(reserve(1, 8, 9))


def one_pending(r: Rank) -> None:
    r.start()
    r.send(reserve(1, 8, 9))


def one_activated(r: Rank) -> None:
    r.send(reserve(1, 8, 9))
    r.send(ActivateDestination(handoff(1)))


def one_about_to_end(r: Rank) -> None:
    r.submit(1, 8, 2)
    r.step()


@pytest.mark.parametrize(
    ("before", "act", "rises"),
    [
        (one_running, CancelRequest(UUID(int=1)), True),
        (one_waiting, CancelRequest(UUID(int=1)), False),  # it owned nothing
        (one_held, ReleaseSource(handoff(1)), True),
        (one_held, CancelSource(handoff(1)), True),
        (one_reserved, CancelDestination(handoff(1)), True),
        (one_pending, CancelDestination(handoff(1)), True),
        (one_activated, CancelDestination(handoff(1)), True),
        (one_reserved, ActivateDestination(handoff(1)), False),
        (one_about_to_end, None, True),
        (one_running, None, False),
    ],
)
def test_what_makes_a_deferred_reservation_worth_another_try(
    before: Callable[[Rank], None], act: Any, rises: bool
) -> None:
    r = rank_of()
    before(r)
    generation = r.core.generation
    if act is None:
        r.step()
    else:
        assert r.send(act).result == Applied()
    assert r.core.generation == generation + rises


def test_the_first_reservation_is_tried_once_as_long_as_nothing_changes() -> None:  # V-75
    r = rank_of(num_gpu_blocks=4)
    r.submit(1, 12, 9)
    r.step()
    r.send(reserve(2, 8, 1))
    (head,) = r.core.destinations.pending
    assert head.tried_generation == r.core.generation
    r.core.pool.capacity += 4  # room that nobody told of
    assert r.step().effects.lifecycle_events == []
    assert reserved(r.send(CancelRequest(UUID(int=1))).lifecycle_events) == [(2, 8)]
