"""The reference pass: one pass replayed again and again, to see what the device is doing."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec

from passtime.calibrate.clock import ClockPolicy, sample_visit
from passtime.calibrate.log import Point
from passtime.calibrate.runners import Runner

LOOK_SAMPLES = 9
SETTLE_SHARE = 0.1  # of the budget, at most, for warming up


class Reference:
    """The reference pass of a session, made ready once and kept."""

    def __init__(
        self, runner: Runner, clock: ClockPolicy, point: Point, session_ms: float | None
    ) -> None:
        """``session_ms`` is the reference that earlier starts of the measurement settled at."""
        self._runner = runner
        self._clock = clock
        self._point = point
        self._work = runner.prepare(point.batch)
        self._session_ms = session_ms

    @property
    def session_ms(self) -> float:
        """What the pass takes on the settled device: what later looks are compared with."""
        assert self._session_ms is not None, "settle comes first"
        return self._session_ms

    def settle(self, deadline: float, budget_s: float) -> dict[str, Any]:
        """Replay until three medians in a row agree; the facts, for a note.

        ``burst_ms`` is the pass right after the device idled, ``sustained_ms`` at the end.
        """
        clock, runner = self._clock, self._runner
        scale = min(1.0, SETTLE_SHARE * budget_s / clock.settle_max_s)
        runner.sleep(scale * clock.idle_s)
        started = runner.now()
        burst_ms = self._replay_for(scale * clock.burst_s)
        steps: list[float] = []
        settled = False
        while not settled and runner.now() < deadline:
            steps.append(self._replay_for(scale * clock.settle_step_s))
            spent_s = runner.now() - started
            agree = len(steps) >= 3 and max(steps[-3:]) <= (1 + clock.settle_tol) * min(steps[-3:])
            settled = agree and spent_s >= scale * clock.settle_min_s
            if spent_s >= scale * clock.settle_max_s:
                break
        sustained_ms = steps[-1] if steps else burst_ms
        if self._session_ms is None:
            self._session_ms = sustained_ms
        return {
            "point": self._point.id,
            "burst_ms": burst_ms,
            "sustained_ms": sustained_ms,
            "session_ms": self._session_ms,
            "settled": settled,
            "seconds": round(runner.now() - started, 3),
        }

    def look(self, *, deadline: float) -> dict[str, Any] | None:
        """The pass now, and its ratio to the settled one; None if there was no time.

        A device that throttles throughout has no ratio.
        """
        clock = msgspec.structs.replace(
            self._clock,
            warm_s=self._clock.warm_s / 4,
            visit_samples=LOOK_SAMPLES,
            rel_ci=self._clock.reference_rel_ci,
        )
        seen = sample_visit(self._runner, self._work, clock, deadline=deadline)
        if seen.stop == "throttled":
            return {"ms": None, "ratio": None, "stop": seen.stop}
        if len(seen.samples_ms) < LOOK_SAMPLES:
            return None
        now_ms = median(seen.samples_ms)
        return {"ms": now_ms, "ratio": now_ms / self.session_ms, "stop": seen.stop}

    def _replay_for(self, seconds: float) -> float:
        """Median ms per pass of replays over that time, one at least."""
        ends = self._runner.now() + seconds
        samples = [1e3 * self._runner.replay(self._work, 1)]
        while self._runner.now() < ends:
            samples.append(1e3 * self._runner.replay(self._work, 1))
        return median(samples)
