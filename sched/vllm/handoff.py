"""Prefill/decode split inside a rank: source holds and destination reservations (V-71 … V-79).

The tables only; moving requests between queues stays in the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passtime.sched.contract import HandoffId, RequestId
from passtime.sched.vllm.blocks import BlockCopy
from passtime.sched.vllm.requests import RequestState


@dataclass(slots=True)
class PendingDestination:
    """A reservation that waits for capacity; tried once per capacity generation (V-75)."""

    handoff_id: HandoffId
    request: RequestState
    tried_generation: int | None = None


@dataclass(slots=True)
class ReservedDestination:
    """Space for a prompt whose KV is on its way: pinned cached blocks, the rest promised."""

    handoff_id: HandoffId
    request: RequestState
    pinned: list[BlockCopy]
    reserved_blocks: int


@dataclass(slots=True)
class SourceTable:
    """Handoff prefills: registered until they complete, then held until released (V-71 … V-73)."""

    pending: dict[HandoffId, RequestId] = field(default_factory=dict)
    held: dict[HandoffId, RequestState] = field(default_factory=dict)

    def handoff_of(self, request_id: RequestId) -> HandoffId | None:
        """The handoff under which a request is registered and not yet held."""
        return next((h for h, r in self.pending.items() if r == request_id), None)

    def drop_pending(self, request_id: RequestId) -> None:
        """The request is gone: forget its registration."""
        handoff_id = self.handoff_of(request_id)
        if handoff_id is not None:
            del self.pending[handoff_id]

    def holds(self, request_id: RequestId) -> bool:
        """Whether the request is held."""
        return any(state.request_id == request_id for state in self.held.values())

    def __bool__(self) -> bool:
        """Whether anything is pending or held."""
        return bool(self.pending or self.held)


@dataclass(slots=True)
class DestinationTable:
    """Decode-side reservations: pending in FIFO order, reserved, active (V-74 … V-77)."""

    pending: list[PendingDestination] = field(default_factory=list)
    reserved: dict[HandoffId, ReservedDestination] = field(default_factory=dict)
    active: dict[HandoffId, RequestState] = field(default_factory=dict)

    def pending_entry(self, handoff_id: HandoffId) -> PendingDestination | None:
        """The waiting reservation of a handoff."""
        return next((entry for entry in self.pending if entry.handoff_id == handoff_id), None)

    def drop_active(self, request_id: RequestId) -> None:
        """The request is gone: forget that it came by a handoff."""
        for handoff_id, state in self.active.items():
            if state.request_id == request_id:
                del self.active[handoff_id]
                return

    def knows(self, request_id: RequestId) -> bool:
        """Whether the request waits for, or has, a reservation."""
        waiting = any(entry.request.request_id == request_id for entry in self.pending)
        return waiting or any(
            entry.request.request_id == request_id for entry in self.reserved.values()
        )

    def __bool__(self) -> bool:
        """Whether anything is pending, reserved or active."""
        return bool(self.pending or self.reserved or self.active)
