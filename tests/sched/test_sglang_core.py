"""The SGLang core by its contract: passes, metrics, commands, handoffs and KV events."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from passtime.errors import CommandError, ProviderError
from passtime.sched.config import EngineConfig, FixedConfig, SglangConfig
from passtime.sched.contract import (
    Admission,
    Applied,
    DestinationReserved,
    Noop,
    Output,
    PressureState,
    RankPass,
    Removed,
    Request,
    SourceHeld,
    Stored,
)
from passtime.sched.core import Core
from passtime.sched.sglang.core import SglangCore
from passtime.sched.timing import FixedTiming, PassShape
from passtime.sched.tokens import local_block_hash, sequence_hash

PAGE = 4


def core(*, timing: Any = None, **settings: Any) -> SglangCore:
    """A rank of 16 pages of 4 tokens; prefill 10 ms, decode 5 ms."""
    sglang = {key: settings.pop(key) for key in SglangConfig.__struct_fields__ if key in settings}
    config = EngineConfig(
        backend="sglang",
        sglang=SglangConfig(**sglang),
        timing_model=FixedConfig(10.0, 5.0),
        **{"block_size": PAGE, "num_gpu_blocks": 16} | settings,
    )
    return SglangCore(config, timing or FixedTiming(prefill_ms=10.0, decode_ms=5.0))


def request(number: int, prompt: int, output: int, *, tokens: list[int] | None = None) -> Request:
    """A request whose prompt nobody shares, unless ``tokens`` are given."""
    prompt_tokens = tokens or [1000 * number + position for position in range(prompt)]
    planned = [1000 * number + 500 + index for index in range(output)]
    return Request(request_id=UUID(int=number), tokens=prompt_tokens, output_token_ids=planned)


def step(rank: SglangCore, now_ms: float = 0.0) -> RankPass:
    """One pass of a rank that is a group by itself."""
    rank_pass = rank.execute_pass(now_ms)
    metrics = rank_pass.pending.effects.forward_pass
    prefilled = metrics.sum_prefill_tokens > 0
    decoded = any(output.token_id is not None for output in rank_pass.pending.effects.outputs)
    rank.settle_group(group_prefilled=prefilled, group_worked=prefilled or decoded)
    return rank_pass


def outputs(rank_pass: RankPass) -> list[tuple[int, int | None, bool]]:
    return [
        (output.request_id.int, output.token_id, output.completed)
        for output in rank_pass.pending.effects.outputs
    ]


def free_pages(rank: SglangCore) -> int:
    return rank.cache.total_pages - rank.cache.occupied_pages


def test_the_core_is_what_the_adapter_expects() -> None:
    rank: Core = core()
    assert rank.is_drained()


# --- Passes -----------------------------------------------------------------------------------


def test_a_prefill_pass_runs_alone_and_keeps_the_others_in_place() -> None:
    rank = core()
    rank.submit(request(1, 8, 4))
    first = step(rank)
    assert (first.end_ms, outputs(first)) == (10.0, [(1, 1500, False)])
    rank.submit(request(2, 6, 4))
    second = step(rank, 10.0)
    assert (second.end_ms, outputs(second)) == (20.0, [(2, 2500, False)])
    assert second.start_effects.admissions == [Admission(UUID(int=2), 0)]
    third = step(rank, 20.0)
    assert (third.end_ms, outputs(third)) == (25.0, [(1, 1501, False), (2, 2501, False)])


def test_outputs_are_ordered_by_kind_then_by_request() -> None:
    """Completions without a token, only tokens, first tokens, then rejections."""
    rank = core(max_model_len=20)
    for number, prompt, output in ((1, 4, 3), (2, 20, 5), (3, 4, 1), (4, 4, 0), (5, 4, 2)):
        rank.submit(request(number, prompt, output))
    rank_pass = step(rank)
    assert rank_pass.pending.effects.outputs == [
        Output(UUID(int=4), None, completed=True),
        Output(UUID(int=3), 3500, completed=True),
        Output(UUID(int=1), 1500, completed=False),
        Output(UUID(int=5), 5500, completed=False),
        Output(UUID(int=2), None, completed=True, rejected=True),
    ]


def test_an_only_token_takes_no_kv_slot() -> None:
    """A prompt of whole pages with one output token takes no page for that token."""
    rank = core(num_gpu_blocks=4)
    rank.submit(request(1, 12, 1))
    step(rank)
    assert free_pages(rank) == 1


def test_without_room_first_tokens_wait_for_a_decode_pass() -> None:
    rank = core(num_gpu_blocks=4, clip_max_new_tokens=0, max_prefill_tokens=12)
    rank.submit(request(1, 8, 3))
    rank.submit(request(2, 4, 3))
    prefill = step(rank)
    assert outputs(prefill) == []
    assert prefill.end_ms == 10.0
    decode = step(rank, 10.0)
    assert outputs(decode) == [(2, 2500, False)]
    assert [event.request_id.int for event in decode.start_effects.pressure_events] == [1]


def test_a_retraction_tells_what_it_found() -> None:
    rank = core(num_gpu_blocks=7, clip_max_new_tokens=0)
    rank.submit(request(1, 11, 9))
    rank.submit(request(2, 12, 9))
    now = 0.0
    while not (rank_pass := step(rank, now)).start_effects.pressure_events:
        now = rank_pass.end_ms
    (event,) = rank_pass.start_effects.pressure_events
    assert event.at_ms == now
    assert event.kind == "sglang_retraction"
    assert event.request_id == UUID(int=1)
    assert event.state_before == PressureState(
        running_requests=2, waiting_requests=None, active_blocks=7
    )
    assert event.state_after.running_requests == 1
    assert event.request_active_blocks_before == 3
    assert event.logical_available_blocks_before == 0
    assert event.required_blocks_before == 1
    assert [r.request_id.int for r in rank.waiting] == [1]
    assert rank.waiting[0].output_tokens > 0


def test_the_victim_is_the_one_with_the_fewest_outputs() -> None:
    rank = core(num_gpu_blocks=8, clip_max_new_tokens=0)
    rank.submit(request(1, 8, 20))
    step(rank)
    step(rank, 10.0)
    rank.submit(request(2, 8, 20))
    now = 15.0
    victims: list[Any] = []
    while not victims:
        rank_pass = step(rank, now)
        now = rank_pass.end_ms
        victims = rank_pass.start_effects.pressure_events
    assert [event.request_id.int for event in victims] == [2]


def test_forward_pass_metrics_of_a_chunked_prefill() -> None:
    rank = core(chunked_prefill_size=8)
    rank.submit(request(1, 6, 4))
    rank.submit(request(2, 20, 4))
    rank.submit(request(3, 5, 4))
    metrics = step(rank).pending.effects.forward_pass
    assert (metrics.num_prefill_requests, metrics.sum_prefill_tokens) == (1, 6)
    assert (metrics.num_queued_prefill, metrics.sum_queued_prefill_tokens) == (2, 25)
    assert metrics.var_queued_prefill_length == 56.25
    metrics = step(rank, 10.0).pending.effects.forward_pass
    assert (metrics.num_prefill_requests, metrics.sum_prefill_tokens) == (1, 8)
    assert metrics.sum_prefill_kv_tokens == 0
    metrics = step(rank, 20.0).pending.effects.forward_pass
    assert metrics.sum_prefill_kv_tokens == 8
    assert (metrics.num_decode_requests, metrics.num_queued_prefill) == (0, 2)


def test_forward_pass_metrics_of_a_decode_pass_count_lengths_before_it() -> None:
    rank = core()
    rank.submit(request(1, 6, 4))
    rank.submit(request(2, 9, 2))
    step(rank)
    metrics = step(rank, 10.0).pending.effects.forward_pass
    assert (metrics.num_decode_requests, metrics.sum_decode_kv_tokens) == (2, 17)
    assert metrics.var_decode_kv_tokens == 2.25
    assert metrics.duration_ms == 5.0


def test_the_cache_figures_are_those_of_the_pass() -> None:
    """A decode pass has looked nothing up: nothing of nothing, not a miss."""
    rank = core()
    shared = list(range(9))
    rank.submit(request(1, 9, 1, tokens=shared))
    figures = [step(rank).pending.effects.metrics]
    rank.submit(request(2, 9, 3, tokens=shared))
    for now in (10.0, 20.0, 25.0):
        figures.append(step(rank, now).pending.effects.metrics)
    rank.submit(request(3, 6, 1))
    figures.append(step(rank, 30.0).pending.effects.metrics)
    assert [(m.sglang_cache_hit_tokens, m.sglang_cache_total_tokens) for m in figures] == [
        (0, 9),
        (8, 9),
        (0, 0),
        (0, 0),
        (0, 6),
    ]


def test_metrics_count_idle_cached_pages_as_occupied() -> None:
    rank = core()
    rank.submit(request(1, 8, 1))
    rank.submit(request(2, 8, 9))
    step(rank)
    metrics = rank.metrics()
    assert (metrics.active_blocks, metrics.running_requests) == (2 + 3, 1)


def test_hints_say_whether_repeating_an_idle_pass_can_help() -> None:
    """A head that waits for the ratio to decay: "retry" until it has reached its floor."""
    rank = core(max_prefill_tokens=4)
    rank.submit(request(1, 8, 1))
    hints = [step(rank).same_timestamp_retry for _ in range(605)]
    assert hints[:600] == ["retry"] * 600
    assert hints[-1] == "exhausted"


def test_deferred_passes_count_down() -> None:
    rank = core(prefill_decode_interval=2)
    rank.submit(request(1, 4, 1))
    step(rank)
    rank.submit(request(2, 4, 1))
    assert not rank.is_drained()
    first = step(rank, 10.0)
    assert (first.end_ms, first.same_timestamp_retry) == (10.0, 1)
    assert step(rank, 10.0).same_timestamp_retry == 0
    assert step(rank, 10.0).start_effects.admissions == [Admission(UUID(int=2), 0)]


def test_a_rank_counts_down_after_its_last_request() -> None:
    rank = core(prefill_decode_interval=2)
    rank.submit(request(1, 4, 1))
    step(rank)
    assert rank.has_requests()
    step(rank, 10.0)
    step(rank, 10.0)
    assert rank.is_drained()


def test_a_model_of_whole_passes_is_asked_with_their_shapes() -> None:
    class Recorder(FixedTiming):
        composition = "pass"

        def __init__(self) -> None:
            super().__init__(prefill_ms=1.0, decode_ms=1.0)
            self.shapes: list[PassShape] = []

        def predict_pass_ms(self, shape: PassShape) -> float:
            self.shapes.append(shape)
            return 3.0

    timing = Recorder()
    rank = core(timing=timing)
    shared = list(range(8))
    rank.submit(request(1, 8, 1, tokens=shared))
    assert step(rank).end_ms == 3.0
    rank.submit(request(2, 10, 2, tokens=[*shared, 98, 99]))
    rank.submit(request(3, 3, 2))
    step(rank, 3.0)
    step(rank, 6.0)
    assert timing.shapes == [
        PassShape(1, 8, 0, 36, 0, 0, 0, 64),
        PassShape(2, 5, 8, 2 * 8 + 3 + 6, 0, 0, 0, 64),
        PassShape(0, 0, 0, 0, 2, 15, 11, 64),
    ]


def test_a_nonsense_answer_of_the_model_is_an_error() -> None:
    rank = core(timing=FixedTiming(prefill_ms=10.0, decode_ms=-1.0))
    rank.submit(request(1, 8, 3))
    step(rank)
    with pytest.raises(ProviderError, match="invalid duration"):
        step(rank, 10.0)


def test_a_lone_request_that_cannot_grow_goes_on_when_room_is_made() -> None:
    """The pass says that it is stuck; releasing the source that holds the pool frees it."""
    rank = core(num_gpu_blocks=4, clip_max_new_tokens=0)
    rank.submit_handoff_prefill(UUID(int=9), request(1, 8, 1))
    rank.submit(request(2, 4, 9))
    now = step(rank).end_ms
    while (rank_pass := step(rank, now)).stuck is None:
        now = rank_pass.end_ms
    assert (rank_pass.end_ms, outputs(rank_pass)) == (now, [])
    rank.release_source(UUID(int=9))
    assert outputs(step(rank, now)) == [(2, 2504, False)]


# --- Commands ---------------------------------------------------------------------------------


def test_an_id_may_be_known_once() -> None:
    rank = core()
    rank.submit(request(1, 8, 3))
    with pytest.raises(CommandError, match="already active"):
        rank.submit(request(1, 4, 3))
    assert [r.prompt_tokens for r in rank.waiting] == [8]


@pytest.mark.parametrize("passes", [0, 1])
def test_a_cancelled_request_returns_its_pages(passes: int) -> None:
    rank = core(enable_prefix_caching=False)
    rank.submit(request(1, 8, 3))
    for index in range(passes):
        step(rank, 10.0 * index)
    outcome = rank.cancel(UUID(int=1), pass_in_flight=False)
    assert (outcome.result, outcome.retired) == (Applied(), [UUID(int=1)])
    assert rank.is_drained()
    assert free_pages(rank) == 16
    assert rank.cancel(UUID(int=1), pass_in_flight=False).result == Noop()


# --- Handoff ----------------------------------------------------------------------------------

HANDOFF = UUID(int=900)


def test_a_completed_source_keeps_its_pages_until_released() -> None:
    rank = core(worker_type="prefill", kv_transfer_bandwidth=2.0, kv_transfer_bytes_per_token=100)
    rank.submit_handoff_prefill(HANDOFF, request(1, 10, 1))
    (event,) = step(rank).pending.effects.lifecycle_events
    assert isinstance(event, SourceHeld)
    assert event.transfer_timing.full_prompt_tokens == 10
    assert not rank.has_requests()
    assert not rank.is_drained()
    with pytest.raises(CommandError, match="already active"):
        rank.submit_handoff_prefill(HANDOFF, request(2, 4, 1))
    outcome = rank.release_source(HANDOFF)
    assert (outcome.result, outcome.retired) == (Applied(), [UUID(int=1)])
    assert rank.is_drained()
    assert rank.cache.peek(list(request(1, 10, 1).tokens), 10) == 8
    assert rank.release_source(HANDOFF).result == Noop()


def test_releasing_a_source_early_makes_it_an_ordinary_request() -> None:
    rank = core(worker_type="prefill")
    rank.submit_handoff_prefill(HANDOFF, request(1, 10, 1))
    outcome = rank.release_source(HANDOFF)
    assert (outcome.result, outcome.retired) == (Applied(), [])
    assert step(rank).pending.effects.lifecycle_events == []
    assert rank.is_drained()


def test_cancelling_a_source_removes_a_request_that_has_not_completed() -> None:
    rank = core(worker_type="prefill", chunked_prefill_size=4)
    rank.submit_handoff_prefill(HANDOFF, request(1, 10, 1))
    step(rank)
    outcome = rank.cancel_source(HANDOFF)
    assert (outcome.result, outcome.retired) == (Applied(), [UUID(int=1)])
    assert rank.is_drained()


def test_an_activated_destination_decodes_in_its_first_pass() -> None:
    rank = core(worker_type="decode")
    outcome = rank.reserve_destination(HANDOFF, request(1, 10, 2), pass_in_flight=False)
    assert outcome.lifecycle_events == [DestinationReserved(HANDOFF, UUID(int=1), 12)]
    assert rank.metrics().waiting_requests == 1
    assert rank.activate_destination(HANDOFF).result == Applied()
    rank_pass = step(rank)
    assert rank_pass.start_effects.admissions == [Admission(UUID(int=1), 0)]
    assert (rank_pass.end_ms, outputs(rank_pass)) == (5.0, [(1, 1500, False)])
    assert outputs(step(rank, 5.0)) == [(1, 1501, True)]
    assert rank.is_drained()


def test_a_destination_reuses_what_is_cached() -> None:
    rank = core(worker_type="decode")
    rank.submit(request(1, 9, 1, tokens=list(range(9))))
    assert step(rank).end_ms == 0.0  # a decode rank is not charged for prefill
    outcome = rank.reserve_destination(
        HANDOFF, request(2, 12, 2, tokens=list(range(12))), pass_in_flight=False
    )
    assert outcome.lifecycle_events == [DestinationReserved(HANDOFF, UUID(int=2), 4)]


def test_reservations_wait_in_order_and_hold_prefill_back() -> None:
    rank = core(worker_type="decode", enable_prefix_caching=False)
    first, second = UUID(int=901), UUID(int=902)
    rank.reserve_destination(first, request(1, 40, 2), pass_in_flight=False)
    assert rank.reserve_destination(second, request(2, 30, 2), pass_in_flight=False) is not None
    rank.submit(request(3, 4, 1))
    assert rank.retry_destinations() == []
    assert step(rank).start_effects.admissions == []
    events = rank.cancel_destination(first).lifecycle_events
    assert events == [DestinationReserved(second, UUID(int=2), 32)]
    assert step(rank).start_effects.admissions == [Admission(UUID(int=3), 0)]


def test_a_reservation_in_mid_pass_is_tried_when_the_pass_completes() -> None:
    rank = core(worker_type="decode")
    outcome = rank.reserve_destination(HANDOFF, request(1, 8, 2), pass_in_flight=True)
    assert outcome.lifecycle_events == []
    assert rank.retry_destinations() == [DestinationReserved(HANDOFF, UUID(int=1), 8)]


@pytest.mark.parametrize("stage", ["pending", "reserved", "active"])
def test_a_destination_can_be_cancelled_in_every_stage(stage: str) -> None:
    rank = core(worker_type="decode", enable_prefix_caching=False)
    rank.reserve_destination(HANDOFF, request(1, 8, 2), pass_in_flight=stage == "pending")
    if stage == "active":
        rank.activate_destination(HANDOFF)
        step(rank)
    outcome = rank.cancel_destination(HANDOFF)
    assert (outcome.result, outcome.retired) == (Applied(), [UUID(int=1)])
    assert rank.is_drained()
    assert free_pages(rank) == 16
    assert rank.cancel_destination(HANDOFF).result == Noop()


@pytest.mark.parametrize(
    ("settings", "prompt", "message"),
    [
        ({}, 65, "exceeds the KV pool capacity"),
        ({"max_model_len": 20}, 20, "max_model_len is 20"),
    ],
)
def test_a_destination_that_can_never_fit_is_refused(
    settings: dict[str, Any], prompt: int, message: str
) -> None:
    rank = core(worker_type="decode", **settings)
    with pytest.raises(CommandError, match=message):
        rank.reserve_destination(HANDOFF, request(1, prompt, 2), pass_in_flight=False)
    assert rank.is_drained()


def test_a_handoff_id_may_be_used_once() -> None:
    rank = core(worker_type="decode")
    rank.reserve_destination(HANDOFF, request(1, 8, 2), pass_in_flight=True)
    with pytest.raises(CommandError, match="already pending"):
        rank.reserve_destination(HANDOFF, request(2, 8, 2), pass_in_flight=True)
    rank.retry_destinations()
    with pytest.raises(CommandError, match="already active"):
        rank.reserve_destination(HANDOFF, request(2, 8, 2), pass_in_flight=True)


# --- KV events --------------------------------------------------------------------------------


def hashes(tokens: list[int]) -> list[int]:
    """Sequence hashes of the whole pages of a prompt."""
    chain: list[int] = []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        parent = chain[-1] if chain else None
        chain.append(sequence_hash(parent, local_block_hash(tokens[start : start + PAGE])))
    return chain


def test_a_prompt_is_announced_as_it_is_admitted_and_its_output_as_it_fills_pages() -> None:
    rank = core(emit_kv_events=True, emit_kv_token_ids=True)
    rank.submit(request(1, 10, 4))
    tokens = [*request(1, 10, 4).tokens, 1500, 1501]
    (event,) = step(rank).pending.effects.kv_events
    assert event.event_id == 0
    assert isinstance(event.data, Stored)
    assert event.data.parent_hash is None
    assert [block.block_hash for block in event.data.blocks] == hashes(tokens[:8])
    assert event.data.blocks[1].token_ids == tuple(tokens[4:8])
    (event,) = step(rank, 10.0).pending.effects.kv_events
    assert isinstance(event.data, Stored)
    assert event.data.parent_hash == hashes(tokens)[1]
    assert [block.block_hash for block in event.data.blocks] == hashes(tokens)[2:]


def test_duplicates_are_announced_once_and_removed_with_the_last_copy() -> None:
    rank = core(emit_kv_events=True, num_gpu_blocks=7)
    tokens = list(range(8))
    rank.submit(request(1, 8, 1, tokens=tokens))
    rank.submit(request(2, 8, 1, tokens=tokens))
    events = step(rank).pending.effects.kv_events
    assert [type(event.data) for event in events] == [Stored]
    rank.submit(request(3, 24, 1))
    removed = [e.data for e in step(rank, 10.0).pending.effects.kv_events]
    assert Removed(block_hashes=tuple(hashes(tokens)[1:])) in removed
    assert rank.cache.peek(tokens, 8) == 4


def test_nothing_is_announced_unless_asked_for() -> None:
    rank = core()
    rank.submit(request(1, 10, 4))
    assert step(rank).pending.effects.kv_events == []
