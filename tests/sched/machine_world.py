"""A group of ranks beside the models of its ranks: every step is done to both and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from machine_audit import Place, audit
from machine_model import RankModel, Refusal
from machine_snapshot import snapshot
from machine_steps import ActivateAll, Advance, Life, Misuse, RunPasses, Send, Step

from passtime.errors import CommandError, LiveLockError, PasstimeError, PoisonedError
from passtime.sched.config import launch_config
from passtime.sched.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    CompletionEffects,
    Noop,
    Removed,
    Request,
    StartEffects,
    Submit,
)
from passtime.sched.group import GroupedEngine, GroupPass

NAN = float("nan")
STRANGER = Request(request_id=UUID(int=999), tokens=[1], max_output_tokens=1)


class CountingTiming:
    """Times that differ from rank to rank; it refuses questions that no pass may ask."""

    def __init__(self, scale_ms: float) -> None:
        self._scale_ms = scale_ms

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        assert batch_size > 0
        assert mean_isl > mean_prefix >= 0
        return self._scale_ms * batch_size * (mean_isl - mean_prefix)

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        assert active_kv_tokens >= batch_size > 0
        assert mean_context_length == active_kv_tokens // batch_size
        return self._scale_ms * active_kv_tokens / total_kv_tokens


class World:
    """One group, a model of each of its ranks, and what was seen to happen."""

    def __init__(self, life: Life, seen: Counter[str]) -> None:
        """Nothing has happened; ``seen`` counts on."""
        launch = launch_config({"engine": life.settings, "dp_size": life.dp_size}, source="life")
        self.config = launch.engine
        self.group = GroupedEngine(5, launch, CountingTiming(life.scale_ms))
        self.models = [RankModel(self.config, dp_rank) for dp_rank in range(life.dp_size)]
        self.seen = seen
        self.now_ms = 0.0
        self.flying: GroupPass | None = None
        self.next_pass = 0
        self.poisoned = False

    def take(self, step: Step) -> None:
        """Do one step, and look whether everything is as it should be."""
        self.seen["steps"] += 1
        match step:
            case Send(rank, command):
                self.send(rank, command)
            case ActivateAll(rank):
                self.activate_all(rank)
            case Advance(wait_ms):
                self.advance(wait_ms)
            case RunPasses(count):
                for _ in range(2 * count):
                    self.advance(0.0)
                    self.check()
            case Misuse(what):
                self.misuse(what)
        self.check()

    # --- Commands -------------------------------------------------------------------------------

    def activate_all(self, rank: int) -> None:
        """Activate every reserved destination of a rank."""
        model = self.models[rank]
        for handoff_id, request_id in list(model.destinations.items()):
            if model.lives[request_id].place is Place.RESERVED:
                self.send(rank, ActivateDestination(handoff_id))

    def send(self, rank: int, command: Command) -> None:
        """Send a command and compare what comes of it with the model's expectation."""
        model, flying = self.models[rank], self.flying is not None
        if self.poisoned:
            self.refused(PoisonedError, "is poisoned", lambda: self.apply(rank, command))
            return
        expected = model.expected(command)
        when = "in mid-pass" if flying else "between passes"
        self.seen[f"{type(command).__name__} {type(expected).__name__} {when}"] += 1
        if isinstance(expected, Refusal):
            self.refused(CommandError, expected.words, lambda: self.apply(rank, command))
            return
        before = snapshot(self.group) if isinstance(expected, Noop) else None
        effects = self.apply(rank, command)
        assert effects.result == expected
        if isinstance(expected, Noop) and not effects.suppressed_pending_output:
            assert snapshot(self.group) == before
        self.seen["output suppressed"] += effects.suppressed_pending_output
        self.seen["reserved by a command"] += len(effects.lifecycle_events)
        model.applied(command, effects, in_flight=flying)
        self.check_metrics(rank, effects)

    def apply(self, rank: int, command: Command) -> CommandEffects:
        """Send a command, whatever comes of it."""
        return self.group.apply_command(rank, command, self.now_ms)

    def refused(self, kind: type[PasstimeError], words: str, act: Callable[[], object]) -> None:
        """An error with these words, and nothing whatever has changed (C-15)."""
        before = snapshot(self.group)
        with pytest.raises(kind) as caught:
            act()
        assert words in str(caught.value)
        assert snapshot(self.group) == before

    # --- Passes ---------------------------------------------------------------------------------

    def advance(self, wait_ms: float) -> None:
        """Start a pass or complete the one in flight."""
        if self.poisoned:
            group, now_ms = self.group, self.now_ms
            self.refused(PoisonedError, "is poisoned", lambda: group.execute_pass(now_ms))
            self.refused(PoisonedError, "is poisoned", lambda: group.complete_pass(0, now_ms))
        elif self.flying is None:
            self.start_pass(wait_ms)
        else:
            self.complete_pass(self.flying, wait_ms)

    def start_pass(self, wait_ms: float) -> None:
        """Exactly the ranks take part that have something to serve (C-53, C-54)."""
        self.now_ms += wait_ms
        qualified = [rank for rank in range(len(self.models)) if self.qualifies(rank)]
        assert self.group.is_ready() == bool(qualified)
        try:
            flying = self.group.execute_pass(self.now_ms)
        except LiveLockError:
            assert self.config.backend == "sglang"  # S-64
            self.poisoned = True
            self.seen["live-lock"] += 1
            return
        if not qualified:
            assert flying is None
            return
        assert flying is not None
        assert (flying.pass_id, flying.started_at_ms) == (self.next_pass, self.now_ms)
        assert [rank.dp_rank for rank in flying.ranks] == qualified
        assert flying.participating_ranks == len(self.models)
        assert flying.end_ms == max(rank.end_ms for rank in flying.ranks)
        self.next_pass += 1
        self.flying = flying
        pending = self.group._in_flight.pending  # type: ignore[union-attr]
        for rank in flying.ranks:
            assert rank.end_ms >= self.now_ms
            effects = pending[rank.dp_rank].effects
            self.models[rank.dp_rank].started(rank.start_effects, effects)
            self.check_pass(rank.dp_rank, rank.start_effects, effects)

    def qualifies(self, rank: int) -> bool:
        """C-33, C-53: something in the scheduler, or (SGLang) a countdown."""
        scheduled = Place.SCHEDULER in self.models[rank].places().values()
        counting = self.config.backend == "sglang" and self.core(rank).rounds_without_prefill > 0
        return scheduled or counting

    def check_pass(self, rank: int, start: StartEffects, effects: CompletionEffects) -> None:
        """What the pass says of itself agrees with what it left behind (C-22, C-23)."""
        metrics, found = effects.forward_pass, audit(self.core(rank))
        assert metrics.num_queued_prefill + metrics.num_queued_decode == found.waiting
        if self.config.backend != "sglang":
            assert metrics.sum_prefill_tokens <= self.config.token_budget
        for event in start.pressure_events:
            before, after = event.state_before, event.state_after
            assert event.at_ms == self.now_ms
            assert before.running_requests == after.running_requests + 1
            assert 0 < event.request_active_blocks_before <= before.active_blocks
            assert after.active_blocks <= before.active_blocks
        outputs = effects.outputs
        self.seen["pass"] += 1
        self.seen["preemption"] += len(start.pressure_events)
        self.seen["source held"] += len(effects.lifecycle_events)
        self.seen["eviction told"] += sum(isinstance(e.data, Removed) for e in effects.kv_events)
        self.seen["rejected"] += sum(output.rejected for output in outputs)
        self.seen["prefix reused"] += sum(a.reused_input_tokens > 0 for a in start.admissions)
        self.seen["completed"] += sum(o.completed and o.token_id is not None for o in outputs)
        self.seen["completed without a token"] += sum(
            output.token_id is None and not output.rejected for output in outputs
        )

    def complete_pass(self, flying: GroupPass, late_ms: float) -> None:
        """Everybody is shown the modeled end, however late the caller is (C-56)."""
        self.flying = None
        self.now_ms = max(self.now_ms, flying.end_ms + late_ms)
        shown = self.group.complete_pass(flying.pass_id, self.now_ms)
        assert len(shown) == len(self.models)
        for rank, (model, effects) in enumerate(zip(self.models, shown, strict=True)):
            self.seen["reserved at a pass end"] += model.completed(effects)
            assert effects.forward_pass.duration_ms == flying.end_ms - flying.started_at_ms
            self.check_metrics(rank, effects)

    # --- What a group refuses (C-51, C-53, C-56) ------------------------------------------------

    def misuse(self, what: str) -> None:
        """Ask for something impossible."""
        if self.poisoned:
            return
        group, flying, submit = self.group, self.flying, Submit(STRANGER)
        refused: list[tuple[str, Callable[[], object]]]
        match what, flying:
            case "no time", _:
                words = "command time must be finite and non-negative, got -1.0"
                refused = [(words, lambda: group.apply_command(0, submit, -1.0))]
                words = "command time must be finite and non-negative, got nan"
                refused += [(words, lambda: group.apply_command(0, submit, NAN))]
                if flying is None:
                    words = "pass start must be finite and non-negative, got nan"
                    refused += [(words, lambda: group.execute_pass(NAN))]
            case "no rank", _:
                beyond = len(self.models)
                words = f"attention-DP rank {beyond} is out of range for dp_size {beyond}"
                refused = [(words, lambda: self.apply(beyond, submit))]
                words = f"attention-DP rank -1 is out of range for dp_size {beyond}"
                refused += [(words, lambda: self.apply(-1, submit))]
            case "start again", GroupPass():
                words = "engine 5 already has a pass in flight"
                refused = [(words, lambda: group.execute_pass(self.now_ms))]
            case "wrong pass", GroupPass(pass_id=pass_id, end_ms=end_ms):
                words = f"pass ID mismatch: expected {pass_id}, got {pass_id + 1}"
                refused = [(words, lambda: group.complete_pass(pass_id + 1, end_ms))]
            case "too early", GroupPass(pass_id=pass_id, end_ms=end_ms):
                words = f"before its modeled boundary {end_ms}ms"
                refused = [(words, lambda: group.complete_pass(pass_id, end_ms - 0.5))]
                refused += [(words, lambda: group.complete_pass(pass_id, NAN))]
            case "no pass", None:
                words = "engine 5 has no pass in flight"
                refused = [(words, lambda: group.complete_pass(0, self.now_ms))]
            case _:
                return
        for words, act in refused:
            self.refused(CommandError, words, act)
        self.seen[f"misuse refused: {what}"] += 1

    # --- What always holds ----------------------------------------------------------------------

    def check(self) -> None:
        """Every rank is as its model says, and its inside is in order."""
        if self.poisoned:
            assert not self.group.is_ready()
            assert not self.group.is_drained()
            assert not self.group.waiting_for_external_command()
            return
        ranks = range(len(self.models))
        drained = [not (self.models[rank].lives or self.qualifies(rank)) for rank in ranks]
        for rank, model in enumerate(self.models):
            found = audit(self.core(rank))
            assert found.places == model.places()
            assert model.submitted == model.ended + len(model.lives)
            assert self.group.ranks[rank]._tracked == model.tracked
            if self.config.emit_kv_events:
                assert found.cached == model.cached
            assert self.group.ranks[rank].is_drained() == drained[rank]
        flying = self.flying is not None
        assert self.group.pass_in_flight == flying
        assert self.group.is_drained() == (all(drained) and not flying)
        somebody_can = any(map(self.qualifies, ranks))
        waits = not flying and not somebody_can and not all(drained)
        assert self.group.waiting_for_external_command() == waits

    def check_metrics(self, rank: int, effects: CommandEffects | CompletionEffects) -> None:
        """C-24: what is told is what is there, in mid-pass too."""
        metrics, found = effects.metrics, audit(self.core(rank))
        assert (metrics.dp_rank, metrics.total_blocks) == (rank, self.config.num_gpu_blocks)
        assert metrics.active_blocks == found.shown_blocks
        assert metrics.running_requests == found.running
        assert metrics.waiting_requests == found.waiting
        sglang = self.config.backend == "sglang"
        assert metrics.preemptions_total == (0 if sglang else self.models[rank].preemptions)

    def core(self, rank: int) -> Any:
        """The scheduler inside a rank."""
        return self.group.ranks[rank]._core

    def end(self) -> None:
        """After everything is cancelled nobody holds a block."""
        if self.poisoned:
            return
        for rank, model in enumerate(self.models):
            for request_id in list(model.lives):
                self.send(rank, CancelRequest(request_id, discard_pending_output=True))
            for handoff_id in list(model.sources):
                self.send(rank, CancelSource(handoff_id))
            for handoff_id in list(model.destinations):
                self.send(rank, CancelDestination(handoff_id))
            assert model.lives == model.sources == model.destinations == {}
            assert audit(self.core(rank)).held_blocks == 0
        if self.flying is not None:
            self.complete_pass(self.flying, 0.0)
        self.check()
