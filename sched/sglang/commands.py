"""Commands to the rank (S-57 … S-59): each checks first, then changes (C-15)."""

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
from passtime.sched.sglang.requests import RequestState
from passtime.sched.sglang.state import RankState


class CommandedRank(RankState):
    """A rank's state with the commands that a driver may send at any time."""

    # --- Ordinary requests ----------------------------------------------------------------------

    def submit(self, request: Request) -> CommandOutcome:
        """Queue a request at the end (C-12)."""
        self._refuse_known(request.request_id)
        self._enqueue(request)
        return CommandOutcome(Submitted(request.request_id))

    def cancel(self, request_id: RequestId, *, pass_in_flight: bool) -> CommandOutcome:
        """Remove a request of the scheduler and release its lease, at once (S-59)."""
        request = self.requests.get(request_id)
        if request is None:
            return CommandOutcome(Noop())
        self._cancel_scheduled(request)
        events = [] if pass_in_flight else self.retry_destinations()
        return CommandOutcome(Applied(), events, [request_id])

    def _enqueue(self, request: Request) -> RequestState:
        state = RequestState(request, max_model_len=self.config.max_model_len)
        self.requests[state.request_id] = state
        self.waiting.append(state)
        return state

    def _cancel_scheduled(self, request: RequestState) -> None:
        for queue in (self.waiting, self.prebuilt, self.running):
            if request in queue:
                queue.remove(request)
        self.forget(request)
        self.sources.drop_pending(request.request_id)
        if self.cache.release(request.lease):
            self.generation += 1

    def _refuse_known(self, request_id: RequestId) -> None:
        if self.knows(request_id):
            raise CommandError(f"request {request_id} is already active")

    # --- Prefill side of a handoff (S-57) -------------------------------------------------------

    def submit_handoff_prefill(self, handoff_id: HandoffId, request: Request) -> CommandOutcome:
        """Queue a request and register that its lease is to be held."""
        self._refuse_known(request.request_id)
        if handoff_id in self.sources.pending or handoff_id in self.sources.held:
            raise CommandError(f"handoff {handoff_id} is already active")
        self.sources.pending[handoff_id] = self._enqueue(request)
        return CommandOutcome(Submitted(request.request_id))

    def release_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Finish a held source; a pending one just becomes an ordinary request."""
        if self.sources.pending.pop(handoff_id, None) is not None:
            return CommandOutcome(Applied(), self.retry_destinations())
        return self._release_held(handoff_id)

    def cancel_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Finish a held source, or remove the request that has not completed."""
        request = self.sources.pending.get(handoff_id)
        if request is None:
            return self._release_held(handoff_id)
        self._cancel_scheduled(request)
        return CommandOutcome(Applied(), self.retry_destinations(), [request.request_id])

    def _release_held(self, handoff_id: HandoffId) -> CommandOutcome:
        request = self.sources.held.pop(handoff_id, None)
        if request is None:
            return CommandOutcome(Noop())
        self.cache.finish(request.lease, request.tokens)
        self.generation += 1
        return CommandOutcome(Applied(), self.retry_destinations(), [request.request_id])

    # --- Decode side of a handoff (S-58) --------------------------------------------------------

    def reserve_destination(
        self, handoff_id: HandoffId, request: Request, *, pass_in_flight: bool
    ) -> CommandOutcome:
        """Queue a reservation, and try it unless a pass is in flight."""
        self._refuse_known(request.request_id)
        destinations = self.destinations
        if handoff_id in destinations.pending:
            raise CommandError(f"destination handoff {handoff_id} is already pending")
        if handoff_id in destinations.reserved or handoff_id in destinations.active:
            raise CommandError(f"destination handoff {handoff_id} is already active")
        self._refuse_oversized(request)
        state = RequestState(request, max_model_len=self.config.max_model_len)
        destinations.pending[handoff_id] = state
        events = [] if pass_in_flight else self.retry_destinations()
        return CommandOutcome(DestinationAccepted(request.request_id), events)

    def _refuse_oversized(self, request: Request) -> None:
        prompt_tokens, limit = len(request.tokens), self.config.max_model_len
        if limit is not None and prompt_tokens >= limit:
            raise CommandError(
                f"destination prompt of {prompt_tokens} tokens leaves no room for output: "
                f"max_model_len is {limit}"
            )
        needed = self.cache.pages_for(prompt_tokens)
        if needed > self.config.num_gpu_blocks:
            raise CommandError(
                f"destination prompt exceeds the KV pool capacity: it needs {needed} blocks "
                f"of {self.config.num_gpu_blocks}"
            )

    def retry_destinations(self) -> list[LifecycleEvent]:
        """Try the first pending reservation, once per capacity generation."""
        destinations = self.destinations
        if not destinations.pending or destinations.tried_generation == self.generation:
            return []
        handoff_id, request = next(iter(destinations.pending.items()))
        transferable = self.cache.reserve(request.lease, request.tokens)
        if transferable is None:
            destinations.tried_generation = self.generation
            return []
        del destinations.pending[handoff_id]
        destinations.reserved[handoff_id] = request
        return [DestinationReserved(handoff_id, request.request_id, transferable)]

    def activate_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """The KV is here: the prompt is materialised, its complete pages are published."""
        request = self.destinations.reserved.pop(handoff_id, None)
        if request is None:
            return CommandOutcome(Noop())
        request.lease.materialized = request.furthest = request.prompt_tokens
        if self.cache.publish(request.lease, request.tokens):
            self.generation += 1
        self.requests[request.request_id] = request
        self.destinations.active[handoff_id] = request
        self.prebuilt.append(request)
        return CommandOutcome(Applied(), self.retry_destinations())

    def cancel_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """Give a reservation up in whatever stage it is."""
        destinations = self.destinations
        if handoff_id in destinations.pending:
            request = destinations.pending.pop(handoff_id)
            self.generation += 1
        elif handoff_id in destinations.reserved:
            request = destinations.reserved.pop(handoff_id)
            self.cache.release(request.lease)
            self.generation += 1
        elif handoff_id in destinations.active:
            request = destinations.active[handoff_id]
            self._cancel_scheduled(request)
        else:
            return CommandOutcome(Noop())
        return CommandOutcome(Applied(), self.retry_destinations(), [request.request_id])
