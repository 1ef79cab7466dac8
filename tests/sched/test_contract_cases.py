"""The contract's acceptance cases (C-60 … C-67) and what commands do between start and end."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from passtime.errors import CommandError, ConfigError, PoisonedError, ProviderError
from passtime.sched.config import EngineConfig, LaunchConfig, launch_config
from passtime.sched.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    CommandContext,
    DestinationAccepted,
    DestinationReserved,
    Noop,
    PendingPass,
    RankIdentity,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
)
from passtime.sched.group import GroupedEngine
from passtime.sched.rank import SchedulerRank
from passtime.sched.replay.outcome import Outcome
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.timing import FixedTiming
from passtime.sched.workload.rows import Workload

SMALL = {
    "num_gpu_blocks": 8,
    "block_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "speedup_ratio": 0.0,
    "timing_model": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 10.0},
}
HANDOFF = UUID(int=99)


def engine(**changes: Any) -> EngineConfig:
    return launch_config({"engine": SMALL | changes}, source="test").engine


def rank(**changes: Any) -> SchedulerRank:
    return SchedulerRank.new(RankIdentity(worker_id=1), engine(**changes))


def request(number: int, tokens: list[int], *output: int, limit: int = 0) -> Request:
    return Request(
        request_id=UUID(int=number),
        tokens=tokens,
        max_output_tokens=limit,
        output_token_ids=list(output) if output else None,
    )


def send(rank: SchedulerRank, command: Any, pending: PendingPass | None = None) -> Any:
    context = CommandContext(now_ms=0.0, pass_in_flight=pending is not None)
    return rank.apply_command(command, context, pending)


PROMPT = [1, 2, 3, 4]


class TestCancelInMidPass:
    def test_removing_the_state_suppresses_pending_output(self) -> None:  # C-60
        r = rank()
        send(r, Submit(request(1, PROMPT, 5, 6)))
        pending = r.execute_pass(0.0).pending
        assert [output.token_id for output in pending.effects.outputs] == [5]
        effects = send(r, CancelRequest(UUID(int=1)), pending)
        assert effects.result == Applied()
        assert effects.suppressed_pending_output
        assert pending.effects.outputs == []
        assert effects.metrics.active_blocks == 0
        assert effects.retired_requests == [UUID(int=1)]

    def test_noop_keeps_the_output_of_a_completed_request(self) -> None:  # C-61
        r = rank()
        send(r, Submit(request(1, PROMPT, 5)))
        pending = r.execute_pass(0.0).pending
        effects = send(r, CancelRequest(UUID(int=1)), pending)
        assert effects.result == Noop()
        assert not effects.suppressed_pending_output
        assert len(pending.effects.outputs) == 1

    def test_explicit_discard_drops_it(self) -> None:  # C-61
        r = rank()
        send(r, Submit(request(1, PROMPT, 5)))
        pending = r.execute_pass(0.0).pending
        effects = send(r, CancelRequest(UUID(int=1), discard_pending_output=True), pending)
        assert effects.result == Noop()
        assert effects.suppressed_pending_output
        assert pending.effects.outputs == []


class TestHandoff:
    def test_reservation_is_tracked_until_cancelled(self) -> None:  # C-62
        r = rank(worker_type="decode")
        effects = send(r, ReserveDestination(HANDOFF, request(1, PROMPT, limit=2)))
        assert effects.result == DestinationAccepted(UUID(int=1))
        assert effects.lifecycle_events == [DestinationReserved(HANDOFF, UUID(int=1), 4)]
        assert r.tracks(HANDOFF)
        assert r.waiting_for_external_command()
        assert send(r, CancelDestination(HANDOFF)).result == Applied()
        assert not r.tracks(HANDOFF)
        assert r.is_drained()

    def test_source_is_held_until_released(self) -> None:  # C-63
        r = rank(worker_type="prefill")
        send(r, SubmitHandoffPrefill(HANDOFF, request(1, PROMPT, 5)))
        executed = r.execute_pass(0.0)
        effects = r.complete_pass(executed.pending, executed.end_ms)
        (output,) = effects.outputs
        assert (output.token_id, output.completed) == (5, True)
        (held,) = effects.lifecycle_events
        assert isinstance(held, SourceHeld)
        assert held.transfer_timing.full_prompt_tokens == 4
        assert not r.tracks(HANDOFF)
        assert not r.is_drained()
        assert r.waiting_for_external_command()
        released = send(r, ReleaseSource(HANDOFF))
        assert released.result == Applied()
        assert released.retired_requests == [UUID(int=1)]
        assert r.is_drained()

    def test_activated_request_decodes_without_prefill(self) -> None:  # V-77, V-78
        r = rank(worker_type="decode")
        send(r, ReserveDestination(HANDOFF, request(1, PROMPT, 7, 8)))
        assert send(r, ActivateDestination(HANDOFF)).result == Applied()
        executed = r.execute_pass(0.0)
        assert executed.end_ms == 10.0
        (admission,) = executed.start_effects.admissions
        assert admission.reused_input_tokens == 0
        assert [o.token_id for o in executed.pending.effects.outputs] == [7]

    def test_cancelling_the_source_suppresses_its_pending_output(self) -> None:  # C-34
        r = rank(worker_type="prefill")
        send(r, SubmitHandoffPrefill(HANDOFF, request(1, [1] * 20, 5)))  # needs two passes
        first = r.execute_pass(0.0)
        effects = send(r, CancelSource(HANDOFF), first.pending)
        assert effects.result == Applied()
        assert effects.retired_requests == [UUID(int=1)]
        assert effects.metrics.active_blocks == 0
        assert r.is_drained()

    def test_second_reservation_waits_for_capacity(self) -> None:  # V-75, V-76
        r = rank(worker_type="decode")
        send(r, ReserveDestination(UUID(int=91), request(1, [1] * 20, limit=1)))
        waiting = send(r, ReserveDestination(UUID(int=92), request(2, [2] * 16, limit=1)))
        assert waiting.lifecycle_events == []
        assert waiting.metrics.waiting_requests == 2
        freed = send(r, CancelDestination(UUID(int=91)))
        assert freed.lifecycle_events == [DestinationReserved(UUID(int=92), UUID(int=2), 16)]


class TestRefusedCommandsChangeNothing:  # C-15
    def refused(self, r: SchedulerRank, command: Any, words: str) -> None:
        before = send(r, CancelRequest(UUID(int=77))).metrics
        with pytest.raises(CommandError, match=words):
            send(r, command)
        assert send(r, CancelRequest(UUID(int=77))).metrics == before

    def test_known_request_id_in_any_role(self) -> None:
        r = rank(worker_type="decode")
        send(r, Submit(request(1, PROMPT, limit=1)))
        send(r, ReserveDestination(HANDOFF, request(2, PROMPT, limit=1)))
        for number in (1, 2):
            self.refused(r, Submit(request(number, PROMPT, limit=1)), "already active")

    def test_held_source_counts_as_active(self) -> None:
        r = rank(worker_type="prefill")
        send(r, SubmitHandoffPrefill(HANDOFF, request(1, PROMPT, 5)))
        executed = r.execute_pass(0.0)
        r.complete_pass(executed.pending, executed.end_ms)
        self.refused(r, Submit(request(1, PROMPT, limit=1)), "already active")
        again = SubmitHandoffPrefill(HANDOFF, request(2, PROMPT, limit=1))
        self.refused(r, again, f"handoff {HANDOFF} is already active")

    def test_destination_handoff_ids(self) -> None:
        r = rank(worker_type="decode")
        send(r, ReserveDestination(UUID(int=91), request(1, [1] * 30, limit=1)))
        send(r, ReserveDestination(UUID(int=92), request(2, [2] * 30, limit=1)))
        third = request(3, PROMPT, limit=1)
        self.refused(r, ReserveDestination(UUID(int=91), third), "already active")
        self.refused(r, ReserveDestination(UUID(int=92), third), "already pending")
        too_long = request(4, [1] * 33, limit=1)
        self.refused(r, ReserveDestination(UUID(int=93), too_long), "exceeds the KV pool capacity")


def test_preemption_shows_as_a_pressure_event_at_pass_start() -> None:  # C-64
    r = rank(num_gpu_blocks=6, enable_prefix_caching=False)
    send(r, Submit(request(1, list(range(8)), limit=8)))
    send(r, Submit(request(2, list(range(8, 16)), limit=8)))
    now = 0.0
    while not (executed := r.execute_pass(now)).start_effects.pressure_events:
        r.complete_pass(executed.pending, executed.end_ms)
        now = executed.end_ms
    assert now == 50.0
    (event,) = executed.start_effects.pressure_events
    assert (event.at_ms, event.request_id) == (50.0, UUID(int=2))
    before, after = event.state_before, event.state_after
    assert (before.running_requests, before.waiting_requests, before.active_blocks) == (2, 0, 6)
    assert (after.running_requests, after.waiting_requests, after.active_blocks) == (1, 1, 3)
    assert event.request_active_blocks_before == 3


# --- Times (C-64 … C-67) ------------------------------------------------------------------------


def replayed(rows: list[tuple[float, int, int]], core: Any, **changes: Any) -> Outcome:
    """Replay (arrival, prompt, outputs) rows of one content that is shared as far as it goes."""
    launch = launch_config({"engine": SMALL | {"speedup_ratio": 1.0} | changes}, source="test")
    timing = launch.engine.timing_model
    workload = Workload(
        source="test",
        timestamp_ms=[row[0] for row in rows],
        input_tokens=[row[1] for row in rows],
        output_tokens=[row[2] for row in rows],
        block_ids=[list(range(-(-row[1] // 16))) for row in rows],
        trace_block_size=16,
    )
    from passtime.providers import live_timing

    options = ReplayOptions(core=core)
    return replay(workload, launch, live_timing(timing, source="test"), options)


def fixed(prefill_ms: float, decode_ms: float) -> dict[str, Any]:
    return {"type": "fixed", "prefill_ms": prefill_ms, "decode_ms": decode_ms}


LARGE = {"block_size": 16, "num_gpu_blocks": 4096, "max_num_batched_tokens": 8192}


@pytest.mark.parametrize("core", ["literal", "lockstep"])
class TestTimes:
    def test_preempted_request_is_prefilled_anew(self, core: str) -> None:  # C-64
        outcome = replayed(
            [(0, 8, 8), (0, 8, 8)],
            core,
            num_gpu_blocks=6,
            enable_prefix_caching=False,
        )
        assert outcome.first_token_ms.tolist() == [10.0, 10.0]
        assert outcome.last_token_ms.tolist() == [80.0, 120.0]
        assert outcome.admission_count.tolist() == [1, 2]
        assert outcome.preemptions == 1

    def test_mixed_pass_lasts_prefill_plus_decode(self, core: str) -> None:  # C-65, S01
        outcome = replayed(
            [(0, 40, 4), (11.5, 40, 3)],
            core,
            timing_model=fixed(10, 1),
            enable_prefix_caching=False,
            **LARGE,
        )
        assert outcome.first_token_ms.tolist() == [10.0, 23.0]
        assert outcome.second_token_ms[0] == 11.0
        assert outcome.last_token_ms[0] == 23.0

    def test_chunks_cost_a_full_prefill_call_each(self, core: str) -> None:  # C-65
        outcome = replayed(
            [(0, 40, 3)],
            core,
            timing_model=fixed(10, 1),
            **LARGE | {"max_num_batched_tokens": 32},
        )
        assert outcome.first_token_ms[0] == 20.0

    def test_polynomial_defaults(self, core: str) -> None:  # C-66
        outcome = replayed([(0, 40, 3)], core, timing_model={"type": "polynomial"}, **LARGE)
        assert outcome.first_token_ms[0] == 17.109431
        assert outcome.last_token_ms[0] == 28.657812999999997

    @pytest.mark.parametrize(("prompt", "reused"), [(48, 32), (49, 48)])
    def test_full_hit_computes_its_last_block_anew(
        self, core: str, prompt: int, reused: int
    ) -> None:  # C-67, S07
        outcome = replayed(
            [(0, 48, 1), (1000, prompt, 1)], core, timing_model=fixed(10, 1), **LARGE
        )
        assert outcome.reused_tokens.tolist() == [0, reused]


def test_bursts_share_the_end_of_their_pass() -> None:  # C-67
    outcome = replayed(
        [(0, 40, 9)],
        "literal",
        timing_model=fixed(10, 1),
        aic_nextn=2,
        aic_nextn_accept_rates="1,1",
        **LARGE,
    )
    assert outcome.first_token_ms[0] == outcome.second_token_ms[0] == 11.0
    assert outcome.last_token_ms[0] == 13.0
    assert outcome.gap_ms.tolist() == [0.0, 1.0]
    assert outcome.gap_count.tolist() == [6, 2]


# --- The group (C-50 … C-58) --------------------------------------------------------------------


class FailsOnThirdPass:
    """A model that raises when it is asked about its third prefill."""

    def __init__(self) -> None:
        self.calls = 0

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("no such shape")
        return 1.0

    def predict_decode_ms(self, *arguments: int) -> float:
        return 1.0


def launch(dp_size: int = 1) -> LaunchConfig:
    return launch_config({"engine": SMALL, "dp_size": dp_size}, source="test")


def test_failing_model_poisons_the_group_and_names_the_pass() -> None:  # C-57, P15
    group = GroupedEngine(3, launch(), FailsOnThirdPass())
    for number in (1, 2, 3):
        group.apply_command(0, Submit(request(number, [number] * 16, limit=1)), 0.0)
    for now in (0.0, 1.0):
        executed = group.execute_pass(now)
        assert executed is not None
        group.complete_pass(executed.pass_id, executed.end_ms)
    with pytest.raises(ProviderError, match=r"worker 3, pass 2 at 2\.0 ms.*no such shape"):
        group.execute_pass(2.0)
    assert not group.is_ready()
    assert not group.is_drained()
    with pytest.raises(PoisonedError, match="worker 3 is poisoned"):
        group.execute_pass(3.0)


def test_barrier_shows_outputs_of_all_ranks_at_the_latest_end() -> None:  # C-53, C-55, C-56
    class ByPrompt(FixedTiming):
        def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
            return float(mean_isl)

    group = GroupedEngine(0, launch(dp_size=3), ByPrompt(prefill_ms=0, decode_ms=1))
    group.apply_command(0, Submit(request(1, [1] * 4, limit=1)), 0.0)
    group.apply_command(1, Submit(request(2, [2] * 9, limit=1)), 0.0)
    executed = group.execute_pass(5.0)
    assert executed is not None
    assert (executed.end_ms, executed.participating_ranks) == (14.0, 3)
    assert [rank.end_ms for rank in executed.ranks] == [9.0, 14.0]
    with pytest.raises(CommandError, match=r"before its modeled boundary 14\.0ms"):
        group.complete_pass(executed.pass_id, 13.0)
    with pytest.raises(CommandError, match="pass ID mismatch: expected 0, got 7"):
        group.complete_pass(7, 14.0)
    effects = group.complete_pass(executed.pass_id, 15.0)
    assert [len(effect.outputs) for effect in effects] == [1, 1, 0]
    assert [effect.forward_pass.duration_ms for effect in effects] == [9.0, 9.0, 9.0]
    assert group.is_drained()


def test_bad_commands_to_the_group() -> None:  # C-51
    group = GroupedEngine(0, launch(dp_size=2), FixedTiming(prefill_ms=1, decode_ms=1))
    submit = Submit(request(1, PROMPT, limit=1))
    with pytest.raises(CommandError, match="finite and non-negative"):
        group.apply_command(0, submit, -1.0)
    with pytest.raises(CommandError, match="rank 2 is out of range for dp_size 2"):
        group.apply_command(2, submit, 0.0)
    assert group.execute_pass(0.0) is None


def test_external_model_needs_a_live_one() -> None:  # C-44
    config = engine(timing_model={"type": "external", "provider": "passtime", "config": {}})
    with pytest.raises(ConfigError, match="with_timing_model"):
        SchedulerRank.new(RankIdentity(), config)


def test_seed_offset_beyond_64_bits_is_refused() -> None:  # C-38
    with pytest.raises(ConfigError, match="overflow"):
        _ = RankIdentity(worker_id=2**63, dp_rank=0, dp_size=2).seed_offset
