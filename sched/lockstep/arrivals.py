"""Arrivals of workloads without sessions, where nothing has to be looked up per request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from passtime.sched.replay.arrivals import (
    Arrivals,
    ClosedLoopArrivals,
    TraceArrivals,
    trace_times,
)
from passtime.sched.workload.rows import Workload


def has_turns(workload: Workload) -> bool:
    """Whether some session has a second turn, which arrives when the first has ended."""
    sessions = workload.session_ids
    return sessions is not None and len(set(sessions)) < len(sessions)


def arrivals_of(
    workload: Workload, *, concurrency: int | None, arrival_speedup_ratio: float
) -> Arrivals:
    """Where a replay's requests come from (R-20 … R-22)."""
    if has_turns(workload):
        if concurrency is None:
            return TraceArrivals(workload, speedup_ratio=arrival_speedup_ratio)
        return ClosedLoopArrivals(workload, concurrency=concurrency)
    if concurrency is None:
        return TimedArrivals(arrival_times(workload, arrival_speedup_ratio))
    return SlotArrivals(len(workload), concurrency=concurrency)


def arrival_times(workload: Workload, arrival_speedup_ratio: float) -> list[float]:
    """Per row, without turns that depend on others (R-20)."""
    return trace_times(workload, list(range(len(workload))), arrival_speedup_ratio)


class TimedArrivals:
    """Open loop: every request arrives at a time known beforehand."""

    def __init__(self, times_ms: Sequence[float]) -> None:
        """One time per row; rows of equal times arrive in file order."""
        self._rows = sorted(range(len(times_ms)), key=times_ms.__getitem__)
        self._times_ms = [times_ms[row] for row in self._rows]
        self._next = 0

    def next_time(self) -> float | None:
        """The earliest time still to come."""
        return self._times_ms[self._next] if self._next < len(self._times_ms) else None

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """Everything up to ``now_ms``."""
        start = self._next
        self._next = end = bisect_right(self._times_ms, now_ms, start)
        return list(zip(self._times_ms[start:end], self._rows[start:end], strict=True))

    def ended(self, row: int, now_ms: float) -> None:
        """Nothing depends on it."""

    def exhausted(self) -> bool:
        """Nothing is left."""
        return self._next == len(self._times_ms)


class SlotArrivals:
    """Closed loop: the next row arrives when a slot becomes free."""

    def __init__(self, requests: int, *, concurrency: int) -> None:
        """All slots are free at time 0."""
        self._requests = requests
        self._next_row = 0
        self._free_slots = concurrency
        self._freed_at_ms = 0.0

    def next_time(self) -> float | None:
        """When a slot became free for a row that is left."""
        if self._free_slots and self._next_row < self._requests:
            return self._freed_at_ms
        return None

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """A row for each free slot."""
        start = self._next_row
        self._next_row = end = min(start + self._free_slots, self._requests)
        self._free_slots -= end - start
        return [(now_ms, row) for row in range(start, end)]

    def ended(self, row: int, now_ms: float) -> None:
        """Its slot is free."""
        self._free_slots += 1
        self._freed_at_ms = now_ms

    def exhausted(self) -> bool:
        """No row is left."""
        return self._next_row == self._requests
