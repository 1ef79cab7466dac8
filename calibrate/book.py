"""What has been measured so far: the visits of a log, counted point by point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from statistics import median

from passtime.calibrate.log import Log, Visit, VisitKey

MAX_FAILURES_OF_A_POINT = 2


class Book:
    """Visits that count, samples, costs and failures; kept up to date visit by visit."""

    def __init__(self, earlier: Log | None, points: int) -> None:
        """Begin with the visits of an earlier start, if there was one."""
        self.visits: list[Visit] = []
        self.samples_ms: dict[int, list[float]] = {}
        self.done = [0] * points
        self.elapsed_s = 0.0
        self.reference_ms: float | None = None
        self.launch_overhead_ms: float | None = None
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._failures: Counter[int] = Counter()
        self._oom: set[int] = set()
        self._in_round: set[tuple[int, int]] = set()
        self._costs_s: dict[int, list[float]] = {}
        if earlier is None:
            return
        before_s = 0.0
        for visit in earlier.visits:
            elapsed_s = float(visit.clocks.get("elapsed_s", before_s))
            self.enter(visit, elapsed_s - before_s)
            before_s = elapsed_s
        accepted = {visit.key for visit in earlier.accepted()}
        self.withdraw([visit.key for visit in earlier.visits if visit.key not in accepted])
        self.elapsed_s = earlier.elapsed_s
        for note in earlier.notes:
            if note.topic == "warm_up" and self.reference_ms is None:
                self.reference_ms = float(note.values["session_ms"])
            if note.topic == "launch_overhead":
                self.launch_overhead_ms = float(note.values["ms"])

    def last_round(self, points: Container[int]) -> int:
        """The round to go on with, for some points."""
        return max((visit.round for visit in self.visits if visit.point in points), default=0)

    def add_points(self, count: int) -> None:
        """Make room for points that were added."""
        self.done += [0] * count

    def enter(self, visit: Visit, cost_s: float) -> None:
        """Count a visit."""
        self.visits.append(visit)
        self._attempts[visit.point, visit.round] += 1
        if visit.stop == "failed":
            self._failures[visit.point] += 1
            return
        if visit.stop == "oom":
            self._oom.add(visit.point)
        self._in_round.add((visit.point, visit.round))
        if visit.samples_ms:
            self.done[visit.point] += 1
            self.samples_ms.setdefault(visit.point, []).extend(visit.samples_ms)
            self._costs_s.setdefault(visit.point, []).append(cost_s)

    def withdraw(self, keys: Sequence[VisitKey]) -> None:
        """Take visits back, so that their points are visited again."""
        taken = set(keys)
        for visit in [visit for visit in self.visits if visit.key in taken]:
            self.visits.remove(visit)
            self._in_round.discard((visit.point, visit.round))
            if visit.samples_ms:
                self.done[visit.point] -= 1
                kept = [v for v in self.visits if v.point == visit.point]
                self.samples_ms[visit.point] = [ms for v in kept for ms in v.samples_ms]

    def visited(self, point: int, round_: int) -> bool:
        """Whether the point has a visit of this round that counts."""
        return (point, round_) in self._in_round

    def next_attempt(self, point: int, round_: int) -> int:
        """The number of the next visit of a point in a round, withdrawn ones counted."""
        return self._attempts[point, round_] + 1

    def failed(self, key: VisitKey) -> bool:
        """Whether that visit, the last of its point, ended with the runner."""
        return self.visits[-1].key == key and self.visits[-1].stop == "failed"

    def given_up(self, point: int) -> bool:
        """Whether the point is not to be tried again: no memory for it, or it kills the runner."""
        return point in self._oom or self._failures[point] >= MAX_FAILURES_OF_A_POINT

    def pass_s(self, point: int) -> float | None:
        """What a pass of the point took so far; None before its first sample."""
        samples = self.samples_ms.get(point)
        return median(samples) / 1e3 if samples else None

    def mean_cost_s(self) -> dict[int, float]:
        """Mean seconds per visit of the points that have any; never 0."""
        return {point: max(1e-6, sum(c) / len(c)) for point, c in self._costs_s.items()}
