"""The neutral adapter around a scheduler core (C-30 … C-38).

The core computes a pass at its start; the adapter decides what the driver may see when, lets
commands edit the pending pass, and tracks which request a handoff is about.
"""

from __future__ import annotations

from passtime.errors import CommandError
from passtime.sched.config import EngineConfig, builtin_timing
from passtime.sched.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandContext,
    CommandEffects,
    CompletionEffects,
    ForwardPassMetrics,
    HandoffId,
    Noop,
    PendingPass,
    RankIdentity,
    RankPass,
    ReleaseSource,
    RequestId,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from passtime.sched.core import CommandOutcome, Core
from passtime.sched.sglang.core import SglangCore
from passtime.sched.timing import TimingModel
from passtime.sched.vllm.core import VllmCore


class SchedulerRank:
    """One scheduler rank behind the neutral contract."""

    def __init__(self, core: Core) -> None:
        """Wrap a core; use :meth:`new` or :meth:`with_timing_model`."""
        self._core = core
        self._tracked: dict[HandoffId, RequestId] = {}

    @classmethod
    def new(cls, identity: RankIdentity, config: EngineConfig) -> SchedulerRank:
        """A rank with the built-in timing model that ``config`` selects.

        Raises ConfigError for an external model: that needs :meth:`with_timing_model` (C-44).
        """
        timing = builtin_timing(config.timing_model)
        return cls.with_timing_model(identity, config, timing, identity.seed_offset)

    @classmethod
    def with_timing_model(
        cls, identity: RankIdentity, config: EngineConfig, timing: TimingModel, seed_offset: int
    ) -> SchedulerRank:
        """A rank with a live timing model; ``seed_offset`` separates random streams (C-38)."""
        core_class = SglangCore if config.backend == "sglang" else VllmCore
        return cls(
            core_class(
                config,
                timing,
                seed_offset=seed_offset,
                dp_rank=identity.dp_rank,
                dp_size=identity.dp_size,
            )
        )

    # --- Commands (C-12 … C-15, C-34 … C-36) ----------------------------------------------------

    def apply_command(
        self, command: Command, context: CommandContext, pending_pass: PendingPass | None
    ) -> CommandEffects:
        """Carry out a command; it may remove its request's outputs from ``pending_pass``.

        Raises CommandError and changes nothing if the core refuses it (C-15), or if it brings a
        request without a prompt (C-10).
        """
        _refuse_empty_prompt(command)
        outcome = self._dispatch(command, context)
        suppressed = self._suppress(command, outcome, pending_pass)
        if suppressed or not isinstance(outcome.result, Noop):
            self._track(command)
        self._forget_requests(set(outcome.retired))
        return CommandEffects(
            result=outcome.result,
            lifecycle_events=outcome.lifecycle_events,
            kv_events=self._core.drain_kv_events(),
            retired_requests=outcome.retired,
            metrics=self._core.metrics(),
            suppressed_pending_output=suppressed,
        )

    def _dispatch(self, command: Command, context: CommandContext) -> CommandOutcome:
        core, in_flight = self._core, context.pass_in_flight
        match command:
            case Submit(request):
                return core.submit(request)
            case CancelRequest(request_id):
                return core.cancel(request_id, pass_in_flight=in_flight)
            case SubmitHandoffPrefill(handoff_id, request):
                return core.submit_handoff_prefill(handoff_id, request)
            case ReserveDestination(handoff_id, request):
                return core.reserve_destination(handoff_id, request, pass_in_flight=in_flight)
            case ActivateDestination(handoff_id):
                return core.activate_destination(handoff_id)
            case ReleaseSource(handoff_id):
                return core.release_source(handoff_id)
            case CancelSource(handoff_id):
                return core.cancel_source(handoff_id)
            case CancelDestination(handoff_id):
                return core.cancel_destination(handoff_id)

    def _suppress(
        self, command: Command, outcome: CommandOutcome, pending: PendingPass | None
    ) -> bool:
        """Take the command's request out of the pending pass (C-34); True if an output went."""
        match command:
            case CancelRequest(request_id, discard):
                candidate: RequestId | None = request_id
                applies = discard or not isinstance(outcome.result, Noop)
            case CancelSource(handoff_id) | CancelDestination(handoff_id):
                candidate = self._tracked.get(handoff_id)
                applies = not isinstance(outcome.result, Noop)
            case _:
                return False
        if pending is None or candidate is None or not applies:
            return False
        effects = pending.effects
        kept = [output for output in effects.outputs if output.request_id != candidate]
        suppressed = len(kept) < len(effects.outputs)
        effects.outputs = kept
        effects.lifecycle_events = [
            event for event in effects.lifecycle_events if event.request_id != candidate
        ]
        return suppressed

    # --- Handoff tracking (C-35) ----------------------------------------------------------------

    def tracks(self, handoff_id: HandoffId) -> bool:
        """Whether the adapter knows the request of a handoff."""
        return handoff_id in self._tracked

    def _track(self, command: Command) -> None:
        match command:
            case SubmitHandoffPrefill(handoff_id, request) | ReserveDestination(
                handoff_id, request
            ):
                self._tracked[handoff_id] = request.request_id
            case ReleaseSource(handoff_id) | CancelSource(handoff_id):
                self._tracked.pop(handoff_id, None)
            case CancelDestination(handoff_id):
                self._tracked.pop(handoff_id, None)
            case CancelRequest(request_id):
                self._forget_requests({request_id})

    def _forget_requests(self, requests: set[RequestId]) -> None:
        if requests and self._tracked:
            self._tracked = {h: r for h, r in self._tracked.items() if r not in requests}

    # --- Passes (C-30 … C-33) -------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether there is anything to do (C-33)."""
        return not self._core.is_drained()

    def is_drained(self) -> bool:
        """Whether the rank owns nothing any more (C-33)."""
        return self._core.is_drained()

    def waiting_for_external_command(self) -> bool:
        """Holds or reservations, but no request that a pass could serve (C-33)."""
        return not self._core.has_requests() and not self._core.is_drained()

    def execute_pass(self, now_ms: float) -> RankPass:
        """Compute a pass completely; its pending half is the caller's to keep (C-26)."""
        return self._core.execute_pass(now_ms)

    def settle_group(self, *, group_prefilled: bool, group_worked: bool) -> None:
        """The whole group's pass was computed (S-43, S-44)."""
        self._core.settle_group(group_prefilled=group_prefilled, group_worked=group_worked)

    def group_drained(self) -> None:
        """The group completed a pass and nobody has anything to do any more (V-89)."""
        self._core.group_drained()

    def complete_pass(self, pending: PendingPass, end_ms: float) -> CompletionEffects:
        """Release what a pass retained, with fresh metrics (C-31)."""
        effects = pending.effects
        effects.lifecycle_events += self._core.retry_destinations()
        effects.kv_events += self._core.drain_kv_events()
        metrics = self._core.metrics()
        metrics.sglang_cache_hit_tokens = effects.metrics.sglang_cache_hit_tokens
        metrics.sglang_cache_total_tokens = effects.metrics.sglang_cache_total_tokens
        effects.metrics = metrics
        effects.forward_pass.duration_ms = max(0.0, end_ms - pending.started_at_ms)
        self._forget_requests({o.request_id for o in effects.outputs if o.completed})
        return effects

    def complete_idle_group_pass(self, started_at_ms: float, end_ms: float) -> CompletionEffects:
        """The group's pass ended and this rank took no part (C-32)."""
        return CompletionEffects(
            outputs=[],
            lifecycle_events=self._core.retry_destinations(),
            kv_events=self._core.drain_kv_events(),
            metrics=self._core.metrics(),
            forward_pass=ForwardPassMetrics(duration_ms=max(0.0, end_ms - started_at_ms)),
        )

    def next_internal_deadline_ms(self) -> float | None:
        """No rank here acts by itself (C-30)."""
        return None

    def process_internal_work(self) -> None:
        """Nothing to do (C-30)."""


def _refuse_empty_prompt(command: Command) -> None:
    match command:
        case (
            Submit(request) | SubmitHandoffPrefill(_, request) | ReserveDestination(_, request)
        ) if not len(request.tokens):
            raise CommandError(f"request {request.request_id} has an empty prompt")
