"""Where a lock-step replay gets its requests from (R-20 … R-22)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from passtime.sched.replay.arrivals import (
    Arrivals,
    ClosedLoopArrivals,
    TraceArrivals,
    trace_times,
)
from passtime.sched.workload.rows import Workload


class Source(Protocol):
    """Requests to come. ``next_ms`` is when the next one arrives, infinity if none is known."""

    @property
    def next_ms(self) -> float:
        """Read after every change: it has to be cheap."""
        ...

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """(arrival time, row) of everything that arrives up to ``now_ms``, in release order."""
        ...

    def ended(self, row: int, now_ms: float) -> None:
        """A request reached its terminal state."""
        ...


def source_of(
    workload: Workload, *, concurrency: int | None, arrival_speedup_ratio: float
) -> Source:
    """The requests of a workload; sessions with several turns need to be kept track of."""
    if not has_turns(workload):
        if concurrency is None:
            return TimedSource(arrival_times(workload, arrival_speedup_ratio))
        return SlotSource(len(workload), concurrency=concurrency)
    if concurrency is None:
        return SessionSource(TraceArrivals(workload, speedup_ratio=arrival_speedup_ratio))
    return SessionSource(ClosedLoopArrivals(workload, concurrency=concurrency))


def has_turns(workload: Workload) -> bool:
    """Whether some session has a second turn, which arrives when the first has ended."""
    sessions = workload.session_ids
    return sessions is not None and len(set(sessions)) < len(sessions)


def arrival_times(workload: Workload, arrival_speedup_ratio: float) -> list[float]:
    """Per row of a workload without turns (R-20)."""
    return trace_times(workload, list(range(len(workload))), arrival_speedup_ratio)


class TimedSource:
    """Open loop: every request arrives at a time known beforehand."""

    def __init__(self, times_ms: Sequence[float]) -> None:
        """One time per row; rows of equal times arrive in file order."""
        self._rows = sorted(range(len(times_ms)), key=times_ms.__getitem__)
        self._times_ms = [*(times_ms[row] for row in self._rows), math.inf]
        self._next = 0
        self.next_ms = self._times_ms[0]

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """Everything up to ``now_ms``."""
        times_ms, start = self._times_ms, self._next
        end = start
        while times_ms[end] <= now_ms:  # few are due at once, and the last of all times is never
            end += 1
        self._next = end
        self.next_ms = times_ms[end]
        return list(zip(times_ms[start:end], self._rows[start:end], strict=True))

    def ended(self, row: int, now_ms: float) -> None:
        """Nothing depends on it."""


class SlotSource:
    """Closed loop: the next row arrives when a slot becomes free."""

    def __init__(self, requests: int, *, concurrency: int) -> None:
        """All slots are free at time 0."""
        self._requests = requests
        self._next_row = 0
        self._free_slots = concurrency
        self.next_ms = 0.0

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """A row for each free slot."""
        start = self._next_row
        self._next_row = end = min(start + self._free_slots, self._requests)
        self._free_slots -= end - start
        self.next_ms = math.inf
        return [(now_ms, row) for row in range(start, end)]

    def ended(self, row: int, now_ms: float) -> None:
        """Its slot is free."""
        self._free_slots += 1
        if self._next_row < self._requests:
            self.next_ms = now_ms


class SessionSource:
    """Sessions of several turns, as the literal replay keeps track of them."""

    def __init__(self, arrivals: Arrivals) -> None:
        """Asks ``arrivals``."""
        self.due = arrivals.due
        self.ended = arrivals.ended
        self._next_time = arrivals.next_time

    @property
    def next_ms(self) -> float:
        """When the next turn or session is ready."""
        time = self._next_time()
        return math.inf if time is None else time
