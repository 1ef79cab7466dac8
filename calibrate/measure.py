"""The measurement: rounds over all points in random order, each visit logged as it ends.

First the plan, and then, where time is kept for it, batches of points that the plan's showed to be
needed. Both are measured alike.

Whatever happens (a kill, Ctrl-C, a driver that fails, memory that runs out, a budget that ends)
the log holds every visit that ended, and the next start goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, isinf
from statistics import median
from typing import Any

import msgspec

from passtime.calibrate.book import Book
from passtime.calibrate.clock import ClockPolicy, Sampled, sample_visit
from passtime.calibrate.hindsight import hindsight
from passtime.calibrate.log import (
    Addition,
    Header,
    Log,
    LogWriter,
    Note,
    Point,
    Visit,
    VisitKey,
    read_log,
)
from passtime.calibrate.reference import Reference
from passtime.calibrate.refine import Refinement
from passtime.calibrate.rounds import due, visit_order, wanted_visits
from passtime.calibrate.runners import OutOfDeviceMemory, Runner, RunnerFailed
from passtime.errors import DeviceError

MAX_RESTARTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a measurement came to: visits of this and earlier starts, and points.

    ``added`` of the ``points`` were not in the plan; ``unmeasured`` ones have no sample.
    """

    visits: int
    elapsed_s: float
    fewest_samples: int
    unmeasured: tuple[Point, ...]
    restarts: int
    points: int
    added: int


Progress = Callable[[float, str], None]
"""Told the share of the budget that is used up, and what is going on."""


class Measurement:
    """One start of a measurement on an open log.

    ``reopen`` is called whenever the runner fails; the clock of its ``now`` goes on. ``pass_s``
    and ``visit_s`` are the expected seconds of a pass and a visit per point id: they bridge the
    time until it had one. ``refinement`` adds points to the plan; None measures the plan alone.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        reopen: Callable[[], Runner],
        writer: LogWriter,
        header: Header,
        earlier: Log | None,
        clock: ClockPolicy,
        pass_s: Sequence[float],
        visit_s: Sequence[float],
        budget_s: float,
        memory_bytes: int,
        progress: Progress,
        say: Callable[[str], None] = lambda sentence: None,
        refinement: Refinement | None = None,
    ) -> None:
        """Takes the runner over, and closes it after ``run``.

        ``earlier`` is what the log held when it was opened; None for a new one. ``say`` gets
        sentences about what the user should know of.
        """
        self._runner = runner
        self._reopen = reopen
        self._writer = writer
        self._header = header
        self._clock = clock
        self._pass_s = pass_s
        self._expected_s = list(visit_s)
        self._budget_s = budget_s
        self._memory_bytes = memory_bytes
        self._progress = progress
        self._say = say
        self._refinement = refinement
        self._points = list(header.plan)
        self._stage = range(len(self._points))
        self._ends_s = budget_s if refinement is None else budget_s - refinement.kept_s
        for addition in () if earlier is None else earlier.additions:
            self._enter_stage(addition.points)
        self._book = Book(earlier, len(self._points))
        self._reference: Reference | None = None
        self._restarts = 0

    def run(self) -> Summary:
        """Measure until every point has enough, or the budget is used up."""
        self._started_at = self._runner.now()
        visits_before = len(self._book.visits)
        try:
            self._note("start", self._circumstances())
            self._measure_stage()
            while self._add_points():
                self._measure_stage()
            if len(self._book.visits) > visits_before:
                self._flag_in_hindsight()
                self._note("end", {"at": _now_text(), "load_average": list(os.getloadavg())})
        finally:
            self._runner.close()
        counts = [len(self._book.samples_ms.get(point.id, ())) for point in self._points]
        return Summary(
            visits=len(self._book.visits),
            elapsed_s=self._elapsed_s,
            fewest_samples=min(filter(None, counts), default=0),
            unmeasured=tuple(p for p, count in zip(self._points, counts, strict=True) if not count),
            restarts=self._restarts,
            points=len(self._points),
            added=len(self._points) - len(self._header.plan),
        )

    # --- Stages: the plan, then each batch of points added to it ----------------------------------

    def _measure_stage(self) -> None:
        """Round after round over the stage's points."""
        if not self._unfinished():
            return
        if self._reference is None:
            self._warm_up()
            self._check()
        for round_ in range(self._book.last_round(self._stage), self._clock.rounds):
            if not self._round(round_):
                break

    def _add_points(self) -> bool:
        """Choose points by what was measured; whether there are any."""
        if self._refinement is None:
            return False
        self._ends_s = self._budget_s
        self._tell("choosing points")
        choice = self._refinement.choose(
            read_log(self._writer.source),
            left_s=self._left_s,
            rounds=self._clock.min_rounds,
            slower=self._slower(),
        )
        if choice.judgement is not None:
            self._note("judgement", msgspec.to_builtins(choice.judgement))
        if not choice.points:
            return False
        self._writer.append(Addition(points=choice.points))
        self._book.add_points(len(choice.points))
        self._enter_stage(choice.points)
        return True

    def _enter_stage(self, points: Sequence[Point]) -> None:
        """Take over points that are in the log."""
        assert self._refinement is not None
        self._stage = range(len(self._points), len(self._points) + len(points))
        self._points += points
        self._expected_s += map(self._refinement.visit_s, points)
        self._ends_s = self._budget_s

    # --- Time -------------------------------------------------------------------------------------

    @property
    def _elapsed_s(self) -> float:
        return self._book.elapsed_s + self._runner.now() - self._started_at

    @property
    def _left_s(self) -> float:
        """Until the stage has to end."""
        return self._ends_s - self._elapsed_s

    def _unfinished(self) -> bool:
        """Whether any point of the stage could still be visited in the time that is left."""
        clock, costs = self._clock, self._visit_costs_s()
        return any(
            costs[point] <= self._left_s
            and self._book.done[point] < clock.rounds
            and not self._book.given_up(point)
            for point in self._stage
        )

    def _visit_costs_s(self) -> list[float]:
        """Seconds per visit: as measured, else as expected times how wrong expectations were."""
        measured, slower = self._book.mean_cost_s(), self._slower()
        return [measured.get(p, slower * cost) for p, cost in enumerate(self._expected_s)]

    def _slower(self) -> float:
        """How many times what was expected visits took so far; 1 before the first."""
        measured = self._book.mean_cost_s()
        ratios = [cost / self._expected_s[point] for point, cost in measured.items()]
        return median(ratios) if ratios else 1.0

    # --- A round ----------------------------------------------------------------------------------

    def _round(self, round_: int) -> bool:
        """Visit the points that are due; whether another round could do anything."""
        costs = self._visit_costs_s()
        stage, done = self._stage, self._book.done
        wanted = wanted_visits(
            [costs[point] for point in stage],
            [done[point] for point in stage],
            left_s=self._left_s,
            fewest=self._clock.min_rounds,
            most=self._clock.rounds,
        )
        order = [
            stage[index]
            for index in visit_order(len(stage), seed=self._header.seed, round_=round_)
            if due(wanted[index], done[stage[index]], round_=round_, rounds=self._clock.rounds)
            and not self._book.visited(stage[index], round_)
        ]
        size = self._clock.reference_every or len(order)
        for start in range(0, len(order), max(1, size)):
            self._block(order[start : start + size], round_, costs)
        return self._unfinished()

    def _block(self, points: Sequence[int], round_: int, costs: Sequence[float]) -> None:
        """Visit some points and, where a reference is watched, see that it has not moved."""
        if not self._clock.reference_every:
            self._visit_all(points, round_, costs)
            return
        for attempt in range(1, self._clock.drift_retries + 1):
            keys = self._visit_all(points, round_, costs)
            if not keys:
                return
            drift = self._drift(round_)
            if drift is None:
                self._about("flag", keys, flag="unwatched")
            elif drift > self._clock.drift_tol:
                again_s = sum(costs[point] for point in points)
                if attempt < self._clock.drift_retries and self._left_s > again_s:
                    moved = "failed" if isinf(drift) else f"moved by {drift:.1%}"
                    self._about("discard", keys, cause=f"the reference pass {moved}")
                    continue
                self._about("flag", keys, flag="drift")
            elif drift > self._clock.unsteady_tol:
                self._about("flag", keys, flag="unsteady")
            return

    def _visit_all(
        self, points: Sequence[int], round_: int, costs: Sequence[float]
    ) -> list[VisitKey]:
        keys = []
        for point in points:
            while (key := self._visit(self._points[point], round_, costs[point])) is not None:
                keys.append(key)
                if not self._book.failed(key):
                    break
        return keys

    # --- A visit ----------------------------------------------------------------------------------

    def _visit(self, point: Point, round_: int, cost_s: float) -> VisitKey | None:
        """Visit a point and log it; None if it cannot be, or if there is no time for it."""
        if self._book.given_up(point.id) or self._left_s < cost_s:
            return None
        self._tell(f"round {round_ + 1}, {point.regime} {point.id}")
        started_s, started_at = self._elapsed_s, _now_text()
        error: str | None = None
        try:
            sampled = self._sample(point)
        except OutOfDeviceMemory as fault:
            sampled, error = Sampled(samples_ms=(), stop="oom"), str(fault)
        except RunnerFailed as fault:
            sampled, error = Sampled(samples_ms=(), stop="failed"), str(fault)
        visit = Visit(
            point=point.id,
            round=round_,
            attempt=self._book.next_attempt(point.id, round_),
            samples_ms=sampled.samples_ms,
            stop=sampled.stop,
            flags=sampled.flags,
            clocks={**sampled.clocks, "elapsed_s": round(self._elapsed_s, 6)},
            error=error,
            started_at=started_at,
        )
        self._writer.append(visit)
        self._book.enter(visit, self._elapsed_s - started_s)
        if sampled.stop == "failed":
            self._restart(str(error))
        return visit.key

    def _sample(self, point: Point) -> Sampled:
        needed = self._runner.memory_bytes(point.batch)
        if needed > self._memory_bytes:
            raise OutOfDeviceMemory(
                f"needs {needed / 2**30:.2f} GiB, {self._memory_bytes / 2**30:.2f} GiB may be used"
            )
        work = self._runner.prepare(point.batch)
        try:
            sampled = sample_visit(
                self._runner,
                work,
                self._clock,
                deadline=self._runner.now() + self._left_s,
                expected_s=self._book.pass_s(point.id),
            )
            return replace(sampled, clocks={**sampled.clocks, **self._runner.facts_of(work)})
        finally:
            self._runner.release(work)

    def _restart(self, error: str) -> None:
        """Open the runner again after it failed; DeviceError once that has happened too often."""
        self._note("restart", {"error": error})
        self._restarts += 1
        self._runner.close()
        if self._restarts >= MAX_RESTARTS:
            raise DeviceError(
                f"{error}; that was failure {self._restarts}, so measuring is given up. "
                f"What was measured is kept in {self._writer.source}"
            )
        self._say(f"{error}: starting again")
        self._runner = self._reopen()
        self._warm_up()

    # --- The reference pass -----------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Settle the device by its reference pass, where the clock's policy has one."""
        if not self._clock.reference_every:
            return
        self._tell("warming up")
        try:
            self._reference = Reference(
                self._runner, self._clock, self._reference_point(), self._book.reference_ms
            )
            deadline = self._runner.now() + self._left_s
            self._note("warm_up", self._reference.settle(deadline, self._budget_s))
            self._book.reference_ms = self._reference.session_ms
            self._time_launch()
        except RunnerFailed as fault:
            self._restart(str(fault))

    def _check(self) -> None:
        """The runner's own checks, before the first visit of a log."""
        if self._book.visits:
            return
        try:
            for topic, values in self._runner.checks():
                self._note(topic, values)
        except RunnerFailed as fault:
            self._restart(str(fault))

    def _time_launch(self) -> None:
        """Time a pass of nothing, once."""
        empty = self._runner.empty()
        if empty is None or self._book.launch_overhead_ms is not None:
            return
        deadline = self._runner.now() + self._left_s
        sampled = sample_visit(self._runner, empty, self._clock, deadline=deadline)
        if sampled.samples_ms:
            self._book.launch_overhead_ms = median(sampled.samples_ms)
            self._note("launch_overhead", {"ms": self._book.launch_overhead_ms})

    def _drift(self, round_: int) -> float | None:
        """How far the reference has moved, as a share: inf if it cannot even be measured.

        None if there was no time to look.
        """
        assert self._reference is not None
        try:
            seen = self._reference.look(deadline=self._runner.now() + self._left_s)
        except RunnerFailed as fault:
            self._restart(str(fault))
            return inf
        if seen is None:
            return None
        self._note("reference", {"round": round_, **seen})
        return inf if seen["ratio"] is None else abs(float(seen["ratio"]) - 1)

    def _reference_point(self) -> Point:
        """The longest pure prefill that a settling step still holds often."""
        prefills = [p for p in self._header.plan if p.regime == "prefill"]
        longest_s = self._clock.settle_step_s / 10
        short = [p for p in prefills if self._pass_s[p.id] <= longest_s]
        return max(short or prefills, key=lambda p: self._pass_s[p.id])

    def _flag_in_hindsight(self) -> None:
        """Compare the rounds, where disturbances are watched at all."""
        if self._clock.reference_every:
            found = hindsight(self._points, self._book.visits, self._clock)
            for flag, keys in found.items():
                self._about("flag", keys, flag=flag)

    # --- Telling and noting -----------------------------------------------------------------------

    def _tell(self, doing: str) -> None:
        self._progress(self._elapsed_s / self._budget_s, doing)

    def _note(self, topic: str, values: dict[str, Any]) -> None:
        self._writer.append(Note(topic=topic, values=values))

    def _about(self, topic: str, keys: Sequence[VisitKey], **values: str) -> None:
        """Discard or flag visits, in the log and in the book."""
        self._note(topic, {"visits": [list(key) for key in keys], **values})
        if topic == "discard":
            self._book.withdraw(keys)

    def _circumstances(self) -> dict[str, Any]:
        return {
            "at": _now_text(),
            "load_average": list(os.getloadavg()),
            "software": dict(self._runner.software),
            "telemetry": msgspec.to_builtins(self._runner.telemetry()),
        }


def _now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
