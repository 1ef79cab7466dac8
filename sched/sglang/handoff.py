"""Which requests a handoff owns on this rank, and in which stage (S-57, S-58). Tables only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from passtime.sched.contract import HandoffId, RequestId
from passtime.sched.sglang.requests import RequestState


@dataclass(slots=True)
class SourceTable:
    """Handoff prefills: registered until they complete, then held until released (S-57)."""

    pending: dict[HandoffId, RequestState] = field(default_factory=dict)
    held: dict[HandoffId, RequestState] = field(default_factory=dict)

    def hold(self, request: RequestState) -> HandoffId | None:
        """A request completed: the handoff that now holds it, None if it has none."""
        handoff_id = _owner(self.pending, request.request_id)
        if handoff_id is not None:
            self.held[handoff_id] = self.pending.pop(handoff_id)
        return handoff_id

    def drop_pending(self, request_id: RequestId) -> None:
        """The request is gone: forget its registration."""
        handoff_id = _owner(self.pending, request_id)
        if handoff_id is not None:
            del self.pending[handoff_id]

    def __bool__(self) -> bool:
        """Whether anything is pending or held."""
        return bool(self.pending or self.held)


@dataclass(slots=True)
class DestinationTable:
    """Decode-side reservations: pending in FIFO order, reserved, active (S-58).

    ``tried_generation`` is the capacity generation in which the head was last tried in vain.
    """

    pending: OrderedDict[HandoffId, RequestState] = field(default_factory=OrderedDict)
    reserved: dict[HandoffId, RequestState] = field(default_factory=dict)
    active: dict[HandoffId, RequestState] = field(default_factory=dict)
    tried_generation: int | None = None

    def drop_active(self, request_id: RequestId) -> None:
        """The request is gone: forget that it came by a handoff."""
        handoff_id = _owner(self.active, request_id)
        if handoff_id is not None:
            del self.active[handoff_id]

    def unstarted(self) -> list[RequestState]:
        """Requests that wait for a reservation or for their KV."""
        return [*self.pending.values(), *self.reserved.values()]

    def __bool__(self) -> bool:
        """Whether anything is pending, reserved or active."""
        return bool(self.pending or self.reserved or self.active)


def _owner(table: dict[HandoffId, RequestState], request_id: RequestId) -> HandoffId | None:
    return next((h for h, request in table.items() if request.request_id == request_id), None)
