"""An independent opinion of one rank: who is where, and what every command must answer.

It knows the rules of the contract (C-12 … C-37) and nothing of how a rank keeps its state. What a
pass will do it does not foresee; it takes the pass's full effects at its start and from then on
knows what may be shown at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machine_audit import Place

from passtime.sched.config import EngineConfig
from passtime.sched.contract import (
    ActivateDestination,
    Admission,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    CommandResult,
    CompletionEffects,
    DestinationAccepted,
    DestinationReserved,
    HandoffId,
    KvEvent,
    LifecycleEvent,
    Noop,
    Output,
    ReleaseSource,
    Removed,
    Request,
    RequestId,
    ReserveDestination,
    SourceHeld,
    StartEffects,
    Stored,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from passtime.sched.tokens import local_block_hash, sequence_hash


@dataclass(frozen=True, slots=True)
class Refusal:
    """A CommandError with these words in its message (C-15)."""

    words: str


@dataclass(slots=True)
class Life:
    """One submission of a request, until it ends."""

    request: Request
    place: Place
    produced: list[int] = field(default_factory=list)
    reuse: int | None = None  # of the first admission
    reported: bool = False  # its first output has been made


@dataclass(slots=True)
class PendingEffects:
    """What the end of the pass in flight may show."""

    outputs: list[Output]
    lifecycle_events: list[LifecycleEvent]
    kv_events: list[KvEvent]


class RankModel:
    """What one rank must know after everything it was told."""

    def __init__(self, config: EngineConfig, dp_rank: int) -> None:
        """Nothing was submitted."""
        self._config = config
        self._dp_rank = dp_rank
        self.lives: dict[RequestId, Life] = {}
        self.sources: dict[HandoffId, RequestId] = {}
        self.destinations: dict[HandoffId, RequestId] = {}
        self.tracked: dict[HandoffId, RequestId] = {}  # C-35
        self.pending: PendingEffects | None = None
        self.cached: set[int] = set()  # by replaying KV events
        self.preemptions = 0
        self.submitted = 0
        self.ended = 0
        self._next_event = 0

    def places(self) -> dict[RequestId, Place]:
        """Where every live request is."""
        return {request_id: life.place for request_id, life in self.lives.items()}

    # --- What a command must answer (C-12, C-15, V-71 … V-87) -----------------------------------

    def expected(self, command: Command) -> CommandResult | Refusal:
        """The result that the contract asks for."""
        match command:
            case Submit(request):
                return self._unless_known(request) or Submitted(request.request_id)
            case SubmitHandoffPrefill(handoff_id, request):
                refusal = self._unless_known(request)
                if refusal is None and handoff_id in self.sources:
                    refusal = Refusal(f"handoff {handoff_id} is already active")
                return refusal or Submitted(request.request_id)
            case ReserveDestination(handoff_id, request):
                refusal = self._unless_known(request) or self._unless_reservable(
                    handoff_id, request
                )
                return refusal or DestinationAccepted(request.request_id)
            case CancelRequest(request_id):
                applies = self._place(request_id) is Place.SCHEDULER
            case ActivateDestination(handoff_id):
                applies = self._place(self.destinations.get(handoff_id)) is Place.RESERVED
            case ReleaseSource(handoff_id) | CancelSource(handoff_id):
                applies = handoff_id in self.sources
            case CancelDestination(handoff_id):
                applies = handoff_id in self.destinations
        return Applied() if applies else Noop()

    def _place(self, request_id: RequestId | None) -> Place | None:
        life = self.lives.get(request_id) if request_id else None
        return life.place if life else None

    def _unless_known(self, request: Request) -> Refusal | None:
        request_id = request.request_id
        known = request_id in self.lives
        return Refusal(f"request {request_id} is already active") if known else None

    def _unless_reservable(self, handoff_id: HandoffId, request: Request) -> Refusal | None:
        if handoff_id in self.destinations:
            pending = self._place(self.destinations[handoff_id]) is Place.PENDING
            state = "pending" if pending else "active"
            return Refusal(f"destination handoff {handoff_id} is already {state}")
        config, prompt = self._config, len(request.tokens)
        limit = config.max_model_len
        if config.backend == "sglang" and limit is not None and prompt >= limit:
            return Refusal("leaves no room for output")
        tokens = prompt
        if config.backend == "trtllm":
            tokens += self.output_limit(request)
        if tokens > config.total_kv_tokens:
            return Refusal("destination prompt exceeds the KV pool capacity")
        return None

    def output_limit(self, request: Request) -> int:
        """Tokens that the request produces if nobody interferes (V-4, T-2, S-6)."""
        config, prompt, limit = self._config, len(request.tokens), request.output_limit
        if config.max_model_len is not None:
            limit = min(limit, max(0, config.max_model_len - prompt))
        if config.backend == "trtllm" and prompt < config.total_kv_tokens:
            limit = min(limit, config.total_kv_tokens - prompt)
        return limit

    def is_rejected(self, request: Request) -> bool:
        """Whether the request can only end as rejected (V-31, V-33, T-3, S-28)."""
        config, tokens = self._config, len(request.tokens)
        if config.max_model_len is not None and tokens >= config.max_model_len:
            return True
        if config.backend == "trtllm":
            tokens += self.output_limit(request)
        return config.backend != "sglang" and tokens > config.total_kv_tokens

    # --- After a command ------------------------------------------------------------------------

    def applied(self, command: Command, effects: CommandEffects, *, in_flight: bool) -> None:
        """A command was carried out: check its effects, and follow it."""
        applied = not isinstance(effects.result, Noop)
        suppressed = self._suppress(command, applied)
        assert effects.suppressed_pending_output == suppressed
        retired = self._follow(command) if applied else []
        assert effects.retired_requests == retired
        if suppressed or applied:
            self._track(command)
        self._untrack(retired)
        if in_flight and isinstance(command, Submit | CancelRequest | ReserveDestination):
            assert effects.lifecycle_events == []
        self._reserved(effects.lifecycle_events)
        self.replay(effects.kv_events)

    def _suppress(self, command: Command, applied: bool) -> bool:
        """C-34: take the command's request out of the pending pass; True if an output went."""
        match command:
            case CancelRequest(request_id, discard):
                candidate: RequestId | None = request_id
                applies = applied or discard
            case CancelSource(handoff_id) | CancelDestination(handoff_id):
                candidate, applies = self.tracked.get(handoff_id), applied
            case _:
                return False
        pending = self.pending
        if pending is None or candidate is None or not applies:
            return False
        outputs = [output for output in pending.outputs if output.request_id != candidate]
        suppressed = outputs != pending.outputs
        pending.outputs = outputs
        pending.lifecycle_events = [
            event for event in pending.lifecycle_events if event.request_id != candidate
        ]
        return suppressed

    def _follow(self, command: Command) -> list[RequestId]:
        """Move what an applied command moves; return who is retired by it."""
        match command:
            case Submit(request):
                self._begin(request, Place.SCHEDULER)
            case SubmitHandoffPrefill(handoff_id, request):
                self._begin(request, Place.SCHEDULER)
                self.sources[handoff_id] = request.request_id
            case ReserveDestination(handoff_id, request):
                self._begin(request, Place.PENDING)
                self.destinations[handoff_id] = request.request_id
            case ActivateDestination(handoff_id):
                self.lives[self.destinations[handoff_id]].place = Place.SCHEDULER
            case CancelRequest(request_id):
                return self._end(request_id)
            case ReleaseSource(handoff_id):
                request_id = self.sources.pop(handoff_id)
                if self._place(request_id) is Place.HELD:
                    return self._end(request_id)
            case CancelSource(handoff_id):
                return self._end(self.sources[handoff_id])
            case CancelDestination(handoff_id):
                return self._end(self.destinations[handoff_id])
        return []

    def _begin(self, request: Request, place: Place) -> None:
        assert request.request_id not in self.lives
        self.lives[request.request_id] = Life(request, place)
        self.submitted += 1

    def _end(self, request_id: RequestId) -> list[RequestId]:
        """It was alive, and now it is not: once per submission."""
        del self.lives[request_id]
        self.ended += 1
        for table in (self.sources, self.destinations):
            for handoff_id in [h for h, r in table.items() if r == request_id]:
                del table[handoff_id]
        return [request_id]

    def _track(self, command: Command) -> None:
        match command:
            case SubmitHandoffPrefill(handoff_id, request) | ReserveDestination(
                handoff_id, request
            ):
                self.tracked[handoff_id] = request.request_id
            case ReleaseSource(handoff_id) | CancelSource(handoff_id):
                self.tracked.pop(handoff_id, None)
            case CancelDestination(handoff_id):
                self.tracked.pop(handoff_id, None)
            case CancelRequest(request_id):
                self._untrack([request_id])

    def _untrack(self, request_ids: Sequence[RequestId]) -> None:
        self.tracked = {h: r for h, r in self.tracked.items() if r not in request_ids}

    def _reserved(self, events: list[LifecycleEvent]) -> None:
        """At most the first pending destination became a reserved one (V-75)."""
        assert len(events) <= 1
        for event in events:
            assert isinstance(event, DestinationReserved)
            first = next(r for r, life in self.lives.items() if life.place is Place.PENDING)
            assert event.request_id == first == self.destinations[event.handoff_id]
            self.lives[first].place = Place.RESERVED
            blocks, rest = divmod(event.transferable_prompt_tokens, self._config.block_tokens)
            assert rest == 0
            prompt = len(self.lives[first].request.tokens)
            assert 0 <= blocks <= -(-prompt // self._config.block_tokens)

    # --- Passes ---------------------------------------------------------------------------------

    def started(self, start: StartEffects, effects: CompletionEffects) -> None:
        """A pass of this rank was computed; ``effects`` will be shown at its end."""
        assert start.kv_events == []
        for admission in start.admissions:
            self._admitted(admission)
        self.preemptions += len(start.pressure_events)
        assert self._config.backend != "trtllm" or not start.pressure_events
        for output in effects.outputs:
            self._produced(output)
        for event in effects.lifecycle_events:
            assert isinstance(event, SourceHeld)
            assert self.sources[event.handoff_id] == event.request_id
            life = self.lives[event.request_id]
            life.place = Place.HELD
            assert event.transfer_timing.full_prompt_tokens == len(life.request.tokens)
        completed = {output.request_id for output in effects.outputs if output.completed}
        held = {event.request_id for event in effects.lifecycle_events}
        assert held <= completed
        assert len(completed) == sum(output.completed for output in effects.outputs)
        for request_id in completed - held:
            self._end(request_id)
        self.replay(effects.kv_events)
        self.pending = PendingEffects(
            list(effects.outputs), list(effects.lifecycle_events), list(effects.kv_events)
        )

    def _admitted(self, admission: Admission) -> None:
        """C-20: the credit is whole blocks, none without caching or for a destination's first."""
        life = self.lives[admission.request_id]
        assert life.place is Place.SCHEDULER
        assert not self.is_rejected(life.request)
        reused = admission.reused_input_tokens
        tokens = len(life.request.tokens) + len(life.produced)
        assert 0 <= reused <= tokens
        assert reused % self._config.block_tokens == 0
        assert self._config.enable_prefix_caching or reused == 0
        if life.reuse is None:
            activated = admission.request_id in self.destinations.values()
            assert not activated or reused == 0
            life.reuse = reused

    def _produced(self, output: Output) -> None:
        """C-21: planned tokens in order, the first admission's credit once, the right end."""
        life = self.lives[output.request_id]
        assert life.place is Place.SCHEDULER
        rejected = self.is_rejected(life.request)
        assert output.rejected == rejected
        if rejected:
            assert (output.token_id, output.completed, output.cached_tokens) == (None, True, None)
            return
        tells_credit = self._config.backend != "sglang" and not life.reported
        assert output.cached_tokens == (life.reuse if tells_credit else None)
        assert life.reuse is not None
        life.reported = True
        limit = self.output_limit(life.request)
        if output.token_id is None:
            assert output.completed
            assert limit == 0
            return
        planned = life.request.output_token_ids
        if planned is not None:
            assert output.token_id == planned[len(life.produced)]
        life.produced.append(output.token_id)
        assert len(life.produced) <= limit
        assert output.completed == (len(life.produced) == limit)

    def completed(self, effects: CompletionEffects) -> int:
        """The group's pass ended: what is shown is what was pending, and at most one reservation
        more (C-31, C-32); returns how many.
        """
        pending = self.pending or PendingEffects([], [], [])
        assert effects.outputs == pending.outputs
        known = len(pending.lifecycle_events)
        assert effects.lifecycle_events[:known] == pending.lifecycle_events
        reserved = effects.lifecycle_events[known:]
        self._reserved(reserved)
        known = len(pending.kv_events)
        assert effects.kv_events[:known] == pending.kv_events
        self.replay(effects.kv_events[known:])
        self._untrack([output.request_id for output in effects.outputs if output.completed])
        self.pending = None
        return len(reserved)

    # --- KV events (V-90 … V-92, C-25) ----------------------------------------------------------

    def replay(self, events: list[KvEvent]) -> None:
        """Follow KV events as a router would."""
        for event in events:
            assert event.event_id == self._next_event
            assert event.dp_rank == self._dp_rank
            self._next_event += 1
            match event.data:
                case Stored() as stored:
                    self._stored(stored)
                case Removed(block_hashes=block_hashes):
                    assert block_hashes
                    assert len(set(block_hashes)) == len(block_hashes)
                    assert self.cached.issuperset(block_hashes)
                    self.cached.difference_update(block_hashes)

    def _stored(self, stored: Stored) -> None:
        assert stored.blocks
        assert stored.start_position is None
        parent = stored.parent_hash
        assert parent is None or parent in self.cached
        for block in stored.blocks:
            assert block.block_hash == sequence_hash(parent, block.tokens_hash)
            if self._config.emit_kv_token_ids:
                assert block.token_ids is not None
                assert len(block.token_ids) == self._config.block_tokens
                assert block.tokens_hash == local_block_hash(block.token_ids)
            else:
                assert block.token_ids is None
            assert block.block_hash not in self.cached or self._config.backend == "sglang"
            self.cached.add(block.block_hash)
            parent = block.block_hash
