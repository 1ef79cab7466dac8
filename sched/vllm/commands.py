"""Commands to the rank (V-71 … V-79, V-87, V-88): each checks first, then changes (C-15)."""

from __future__ import annotations

from passtime.errors import CommandError
from passtime.sched.contract import (
    Applied,
    DestinationAccepted,
    DestinationReserved,
    HandoffId,
    LifecycleEvent,
    Noop,
    Request,
    RequestId,
    Submitted,
)
from passtime.sched.core import CommandOutcome
from passtime.sched.vllm.handoff import PendingDestination, ReservedDestination
from passtime.sched.vllm.policy import blocks
from passtime.sched.vllm.requests import RequestState, RequestStatus
from passtime.sched.vllm.state import RankState


class CommandedRank(RankState):
    """A rank's state with the commands that a driver may send at any time."""

    # --- Ordinary requests ----------------------------------------------------------------------

    def submit(self, request: Request) -> CommandOutcome:
        """Queue a request at the end (C-12)."""
        self._refuse_known(request.request_id)
        self._enqueue(request)
        return CommandOutcome(Submitted(request.request_id))

    def cancel(self, request_id: RequestId, *, pass_in_flight: bool) -> CommandOutcome:
        """Remove a request of the scheduler with its blocks, at once (V-87, V-88)."""
        request = self.requests.get(request_id)
        if request is None:
            return CommandOutcome(Noop())
        self._cancel_scheduled(request)
        events = [] if pass_in_flight else self.retry_destinations()
        return CommandOutcome(Applied(), events, [request_id])

    def _cancel_scheduled(self, request: RequestState) -> None:
        freed = request.allocated > 0 or request.status is RequestStatus.RUNNING
        self.remove(request)
        if freed:
            self.generation += 1

    def _enqueue(self, request: Request) -> None:
        state = self._state_of(request)
        self.requests[state.request_id] = state
        self.waiting.append(state)

    def _state_of(self, request: Request) -> RequestState:
        self.arrivals += 1
        return RequestState(
            request,
            limit=self.policy.output_limit(request),
            arrival_order=self.arrivals,
            block_tokens=self.config.block_tokens,
            caching=self.config.enable_prefix_caching,
        )

    def _refuse_known(self, request_id: RequestId) -> None:
        known = (
            request_id in self.requests
            or self.sources.holds(request_id)
            or self.destinations.knows(request_id)
        )
        if known:
            raise CommandError(f"request {request_id} is already active")

    # --- Prefill side of a handoff --------------------------------------------------------------

    def submit_handoff_prefill(self, handoff_id: HandoffId, request: Request) -> CommandOutcome:
        """Queue a request and register that its KV is to be held (V-71)."""
        self._refuse_known(request.request_id)
        if handoff_id in self.sources.pending or handoff_id in self.sources.held:
            raise CommandError(f"handoff {handoff_id} is already active")
        self.sources.pending[handoff_id] = request.request_id
        self._enqueue(request)
        return CommandOutcome(Submitted(request.request_id))

    def release_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Free a held source; a pending one just becomes an ordinary request (V-73)."""
        if self.sources.pending.pop(handoff_id, None) is not None:
            return CommandOutcome(Applied(), self.retry_destinations())
        return self._release_held(handoff_id)

    def cancel_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Free a held source, or remove the request that has not completed (V-79)."""
        request_id = self.sources.pending.get(handoff_id)
        if request_id is None:
            return self._release_held(handoff_id)
        self._cancel_scheduled(self.requests[request_id])
        return CommandOutcome(Applied(), self.retry_destinations(), [request_id])

    def _release_held(self, handoff_id: HandoffId) -> CommandOutcome:
        request = self.sources.held.pop(handoff_id, None)
        if request is None:
            return CommandOutcome(Noop())
        self.release(request)
        self.generation += 1
        return CommandOutcome(Applied(), self.retry_destinations(), [request.request_id])

    # --- Decode side of a handoff ---------------------------------------------------------------

    def reserve_destination(
        self, handoff_id: HandoffId, request: Request, *, pass_in_flight: bool
    ) -> CommandOutcome:
        """Queue a reservation, and try it unless a pass is in flight (V-74)."""
        self._refuse_known(request.request_id)
        destinations = self.destinations
        if destinations.pending_entry(handoff_id) is not None:
            raise CommandError(f"destination handoff {handoff_id} is already pending")
        if handoff_id in destinations.reserved or handoff_id in destinations.active:
            raise CommandError(f"destination handoff {handoff_id} is already active")
        needed = self.policy.destination_blocks(request)
        if needed > self.config.num_gpu_blocks:
            raise CommandError(
                f"destination prompt exceeds the KV pool capacity: it needs {needed} blocks "
                f"of {self.config.num_gpu_blocks}"
            )
        state = self._state_of(request)
        state.status = RequestStatus.REMOTE
        destinations.pending.append(PendingDestination(handoff_id, state))
        events = [] if pass_in_flight else self.retry_destinations()
        return CommandOutcome(DestinationAccepted(request.request_id), events)

    def retry_destinations(self) -> list[LifecycleEvent]:
        """Try the first waiting reservation, once per capacity generation (V-75)."""
        pending = self.destinations.pending
        if not pending:
            return []
        head = pending[0]
        tried, head.tried_generation = head.tried_generation, self.generation
        if len(self.running) >= self.config.seqs_limit or tried == self.generation:
            return []
        reservation = self._reserve(head)
        if reservation is None:
            return []
        del pending[0]
        self.destinations.reserved[head.handoff_id] = reservation
        tokens = reservation.reserved_blocks * self.config.block_tokens
        return [DestinationReserved(head.handoff_id, head.request.request_id, tokens)]

    def _reserve(self, head: PendingDestination) -> ReservedDestination | None:
        """Pin what is cached of the prompt and promise the rest (V-75); T-12 pins nothing."""
        request = head.request
        hits = self.lookup(request)[0] if self.policy.destinations_reuse_prefix else []
        fresh = blocks(request.prompt_tokens, self.config.block_tokens) - len(hits)
        if not self.policy.destination_fits(request, self) or not self.pool.reserve(hits, fresh):
            return None
        self.record_evictions()
        return ReservedDestination(head.handoff_id, request, hits, fresh)

    def activate_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """The KV is here: the prompt is computed, its full blocks are findable (V-77)."""
        reservation = self.destinations.reserved.pop(handoff_id, None)
        if reservation is None:
            return CommandOutcome(Noop())
        active_before = self.pool.active
        request = reservation.request
        self.pool.pins_to_references(reservation.pinned)
        for block, copy in zip(request.blocks, reservation.pinned, strict=False):
            block.copy = copy
        for block in request.blocks[len(reservation.pinned) :]:
            block.copy = self.pool.take_reserved()
        request.allocated = request.computed = request.furthest = request.prompt_tokens
        self.finalise(request, 0, request.prompt_tokens)
        request.status = RequestStatus.WAITING
        request.activated = True
        self.requests[request.request_id] = request
        self.destinations.active[handoff_id] = request
        for queue in (self.waiting, self.materialized):
            later = (i for i, r in enumerate(queue) if r.arrival_order > request.arrival_order)
            queue.insert(next(later, len(queue)), request)
        if self.pool.active < active_before:
            self.generation += 1
        return CommandOutcome(Applied(), self.retry_destinations())

    def cancel_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """Give a reservation up in whatever state it is (V-79)."""
        destinations = self.destinations
        pending = destinations.pending_entry(handoff_id)
        if pending is not None:
            destinations.pending.remove(pending)
            request = pending.request
            self.generation += 1
        elif handoff_id in destinations.reserved:
            reservation = destinations.reserved.pop(handoff_id)
            request = reservation.request
            self.pool.unpin(reversed(reservation.pinned))
            self.pool.unreserve(reservation.reserved_blocks)
            self.generation += 1
        elif handoff_id in destinations.active:
            request = destinations.active[handoff_id]
            self._cancel_scheduled(request)
        else:
            return CommandOutcome(Noop())
        return CommandOutcome(Applied(), self.retry_destinations(), [request.request_id])
