"""What the neutral adapter (``rank.py``) needs of a scheduler core.

A core owns requests, queues and the KV pool of one rank and computes passes eagerly: all state
changes happen at the pass start, visibility is the adapter's business (C-26).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from passtime.sched.contract import (
    CommandResult,
    HandoffId,
    KvEvent,
    LifecycleEvent,
    Metrics,
    RankPass,
    Request,
    RequestId,
)


@dataclass(slots=True)
class CommandOutcome:
    """What a command did to the core; ``retired`` requests are no longer owned (C-14)."""

    result: CommandResult
    lifecycle_events: list[LifecycleEvent] = field(default_factory=list)
    retired: list[RequestId] = field(default_factory=list)


class Core(Protocol):
    """One rank's scheduler. Commands raise CommandError and change nothing when refused (C-15).

    ``pass_in_flight`` is about the whole group (C-13) and decides whether a deferred destination
    is tried inside the command (V-75).
    """

    def submit(self, request: Request) -> CommandOutcome:
        """Queue a request."""
        ...

    def submit_handoff_prefill(self, handoff_id: HandoffId, request: Request) -> CommandOutcome:
        """Queue a request whose KV is held for a decode rank when it completes (V-71)."""
        ...

    def cancel(self, request_id: RequestId, *, pass_in_flight: bool) -> CommandOutcome:
        """Remove a request from the scheduler (V-87)."""
        ...

    def reserve_destination(
        self, handoff_id: HandoffId, request: Request, *, pass_in_flight: bool
    ) -> CommandOutcome:
        """Queue a reservation (V-74, S-58)."""
        ...

    def activate_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """Let a reserved request decode (V-77)."""
        ...

    def release_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Free a held source (V-73)."""
        ...

    def cancel_source(self, handoff_id: HandoffId) -> CommandOutcome:
        """Give a handoff up on the prefill side (V-79)."""
        ...

    def cancel_destination(self, handoff_id: HandoffId) -> CommandOutcome:
        """Give a handoff up on the decode side (V-79)."""
        ...

    def execute_pass(self, now_ms: float) -> RankPass:
        """Schedule and compute one pass, completely."""
        ...

    def retry_destinations(self) -> list[LifecycleEvent]:
        """Try the first deferred reservation once more (V-75); also for an idle rank."""
        ...

    def settle_group(self, *, group_prefilled: bool, group_worked: bool) -> None:
        """The group's pass was computed: did any rank prefill, or do model work (S-43, S-44)."""
        ...

    def group_drained(self) -> None:
        """A group pass completed and left no rank anything to do (V-89)."""
        ...

    def drain_kv_events(self) -> list[KvEvent]:
        """KV events since the last call, in order."""
        ...

    def metrics(self) -> Metrics:
        """A fresh snapshot (C-24)."""
        ...

    def has_requests(self) -> bool:
        """Whether any request is in the scheduler (C-33)."""
        ...

    def is_drained(self) -> bool:
        """Nothing in the scheduler, no hold, no reservation, no countdown (C-33)."""
        ...
