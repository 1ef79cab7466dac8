"""When requests arrive: by the trace's clock, or as slots become free (R-20 … R-22)."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from passtime.errors import TraceError
from passtime.sched.workload.rows import Workload


class Arrivals(Protocol):
    """Where a replay gets its requests from."""

    def next_time(self) -> float | None:
        """Earliest pending arrival, None if there is none at present."""
        ...

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """(arrival time, row) of everything that arrives up to ``now_ms``, in release order."""
        ...

    def ended(self, row: int, now_ms: float) -> None:
        """A request reached its terminal state: its session may go on, or free its slot."""
        ...

    def abandoned(self, row: int, now_ms: float) -> None:
        """A request failed: its session is over, whatever turns it had left."""
        ...

    def exhausted(self) -> bool:
        """Whether nothing will ever arrive again unless a request ends."""
        ...


class Sessions:
    """Which rows are turns of which session, in file order; row order inside a session."""

    def __init__(self, workload: Workload) -> None:
        """Without session ids every row is a session of its own."""
        rows = range(len(workload))
        self.following: dict[int, int] = {}
        self.index: list[int] = list(rows)
        self.first_rows: list[int] = list(rows)
        if workload.session_ids is None:
            return
        self.first_rows = []
        numbers: dict[str, int] = {}
        latest: dict[str, int] = {}
        for row, session in enumerate(workload.session_ids):
            if session in latest:
                self.following[latest[session]] = row
            else:
                numbers[session] = len(numbers)
                self.first_rows.append(row)
            latest[session] = row
            self.index[row] = numbers[session]


def trace_times(workload: Workload, rows: list[int], speedup_ratio: float) -> list[float]:
    """Ready times of sessions' first rows: rebased to 0, divided by the speed-up (R-20)."""
    if not (math.isfinite(speedup_ratio) and speedup_ratio > 0):
        raise TraceError(
            f"arrival_speedup_ratio must be a finite positive number, got {speedup_ratio}"
        )
    stamps: list[float] = []
    for row in rows:
        stamp = workload.timestamp_ms[row]
        if stamp is None:
            raise TraceError(
                f"{workload.source}: row {row + 1}: a session's first turn needs a timestamp "
                "to be replayed by the trace's clock; give one, or replay with a concurrency"
            )
        stamps.append(stamp)
    start = min(stamps)
    return [(stamp - start) / speedup_ratio for stamp in stamps]


class TraceArrivals:
    """Open loop: first turns at their timestamps, later ones after their delay (R-20, R-22)."""

    def __init__(self, workload: Workload, *, speedup_ratio: float) -> None:
        """Raises TraceError for a bad ratio or a missing first timestamp."""
        sessions = Sessions(workload)
        self._sessions = sessions
        self._delay_ms = workload.delay_ms
        self._ratio = speedup_ratio
        times = trace_times(workload, sessions.first_rows, speedup_ratio)
        # Rows of one session rise, so (time, session, row) is (time, session, turn).
        self._heap = [
            (time, sessions.index[row], row)
            for time, row in zip(times, sessions.first_rows, strict=True)
        ]
        heapq.heapify(self._heap)

    def next_time(self) -> float | None:
        """Earliest ready time."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """Everything ready up to ``now_ms``; a request's arrival is its ready time."""
        released = []
        while self._heap and self._heap[0][0] <= now_ms:
            time, _, row = heapq.heappop(self._heap)
            released.append((time, row))
        return released

    def ended(self, row: int, now_ms: float) -> None:
        """Queue the session's next turn."""
        following = self._sessions.following.get(row)
        if following is not None:
            delay = 0.0 if self._delay_ms is None else self._delay_ms[following] / self._ratio
            heapq.heappush(self._heap, (now_ms + delay, self._sessions.index[following], following))

    def abandoned(self, row: int, now_ms: float) -> None:
        """Queue nothing."""

    def exhausted(self) -> bool:
        """Nothing is queued."""
        return not self._heap


class ClosedLoopArrivals:
    """Closed loop: at most ``concurrency`` sessions at a time, in file order (R-21, R-22)."""

    def __init__(self, workload: Workload, *, concurrency: int) -> None:
        """Timestamps are ignored."""
        self._sessions = Sessions(workload)
        self._delay_ms = workload.delay_ms
        self._free_slots = concurrency
        self._next_session = 0
        self._freed_at_ms = 0.0
        self._later: list[tuple[float, int, int]] = []

    def next_time(self) -> float | None:
        """Now, if a slot is free for another session; else the earliest delayed turn."""
        times = [self._later[0][0]] if self._later else []
        if self._free_slots and self._next_session < len(self._sessions.first_rows):
            times.append(self._freed_at_ms)
        return min(times, default=None)

    def due(self, now_ms: float) -> list[tuple[float, int]]:
        """Delayed turns that are ready, and a new session for each free slot.

        A new session is ready when its slot was freed, which is now: slots are freed by outputs
        applied at this very timestamp.
        """
        ready = []
        while self._later and self._later[0][0] <= now_ms:
            ready.append(heapq.heappop(self._later))
        first_rows = self._sessions.first_rows
        while self._free_slots and self._next_session < len(first_rows):
            self._free_slots -= 1
            ready.append((now_ms, self._next_session, first_rows[self._next_session]))
            self._next_session += 1
        return [(time, row) for time, _, row in sorted(ready)]

    def ended(self, row: int, now_ms: float) -> None:
        """The session's next turn follows after its delay, or its slot is free."""
        following = self._sessions.following.get(row)
        if following is None:
            self.abandoned(row, now_ms)
            return
        delay = 0.0 if self._delay_ms is None else self._delay_ms[following]
        heapq.heappush(self._later, (now_ms + delay, self._sessions.index[following], following))

    def abandoned(self, row: int, now_ms: float) -> None:
        """The session's slot is free."""
        self._free_slots += 1
        self._freed_at_ms = now_ms

    def exhausted(self) -> bool:
        """No delayed turn is queued and no session is left to start."""
        return not self._later and self._next_session >= len(self._sessions.first_rows)
