"""Points chosen late: where the fit is unsure about what the expected workload asks for.

A plan that fills the box evenly misses what is local, such as a kernel that switches within an
octave. Once the plan is measured, batches of points go where the predictive spread times the
density of the expected workload is largest. Held-out points decide when it is enough; they never
say where to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct

from passtime.calibrate.core import MIN_RESIDUAL_POINTS, Core, fit_core
from passtime.calibrate.fit import bench_of
from passtime.calibrate.log import Batch, Log, Point
from passtime.calibrate.plan import Candidate, Costs
from passtime.calibrate.points import batch_columns, columns, latencies, measured_points
from passtime.profiles.document import MeasuredPoint
from passtime.sched.timing import FloatArray

BATCHES = 3
BATCH_POINTS = 8
ENOUGH_MAPE_PERCENT = 3.0
ENOUGH_P95_PERCENT = 8.0
SURE_SHARE = 0.85  # of the time that is left: the rest is for reference passes and repeats


class Judgement(Struct, frozen=True, kw_only=True):
    """Errors of a fit at the held-out points, in percent."""

    points: int
    mape_percent: float
    p95_percent: float

    @property
    def enough(self) -> bool:
        """Whether more points would be a waste."""
        return self.mape_percent <= ENOUGH_MAPE_PERCENT and self.p95_percent <= ENOUGH_P95_PERCENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure next, and how good the fit is without it. No points: nothing more."""

    judgement: Judgement | None
    points: tuple[Point, ...]


class Refinement:
    """Chooses points from ``candidates``. ``kept_s`` is the time that the plan leaves for them."""

    def __init__(self, *, candidates: Sequence[Candidate], costs: Costs, kept_s: float) -> None:
        """``costs`` are expectations, as the plan's are."""
        self._candidates = candidates
        self._costs = costs
        self.kept_s = kept_s

    @property
    def policy(self) -> dict[str, Any]:
        """The rules, for a log's header."""
        return {
            "kept_s": self.kept_s,
            "batches": BATCHES,
            "batch_points": BATCH_POINTS,
            "enough_mape_percent": ENOUGH_MAPE_PERCENT,
            "enough_p95_percent": ENOUGH_P95_PERCENT,
        }

    def pass_s(self, point: Point) -> float:
        """Expected seconds of a pass."""
        return self._costs.pass_s(point.batch)

    def visit_s(self, point: Point) -> float:
        """Expected seconds of a visit."""
        return self._costs.visit_s(self.pass_s(point))

    def choose(self, log: Log, *, left_s: float, rounds: int, slower: float) -> Choice:
        """The next batch, from what a log holds: the same again from the same log and time.

        ``left_s`` seconds are to be enough for this batch and those after it, every point being
        visited ``rounds`` times; visits take ``slower`` times what was expected.
        """
        points = measured_points(log)
        fitted = [point for point in points if not point.held_out]
        left = BATCHES - len(log.additions)
        if left <= 0 or len(fitted) < MIN_RESIDUAL_POINTS:
            return Choice(judgement=None, points=())
        core = fit_core(bench_of(log), fitted)
        judgement = judged(core, [point for point in points if point.held_out])
        if judgement is not None and judgement.enough:
            return Choice(judgement=judgement, points=())
        known = {point.batch for point in log.points}
        candidates = [one for one in self._candidates if one.batch not in known]
        chosen = most_needed(
            core,
            candidates,
            cost_s=lambda batch: slower * rounds * self._costs.visit_s(self._costs.pass_s(batch)),
            allowance_s=SURE_SHARE * left_s / left,
        )
        first = max(point.id for point in log.points) + 1
        return Choice(
            judgement=judgement,
            points=tuple(
                Point(id=number, regime=one.regime, batch=one.batch)
                for number, one in enumerate(chosen, start=first)
            ),
        )


def judged(core: Core, held_out: Sequence[MeasuredPoint]) -> Judgement | None:
    """Errors at points that were not fitted; None without any."""
    if not held_out:
        return None
    predicted = core.predictor().pass_many_ms(columns(held_out, core.bench.engine.graph_sizes))
    error = 100.0 * np.abs(predicted / latencies(held_out) - 1.0)
    return Judgement(
        points=len(held_out),
        mape_percent=float(error.mean()),
        p95_percent=float(np.percentile(error, 95)),
    )


def most_needed(
    core: Core,
    candidates: Sequence[Candidate],
    *,
    cost_s: Callable[[Batch], float],
    allowance_s: float,
) -> list[Candidate]:
    """Up to ``BATCH_POINTS`` candidates, the most needed first, that cost ``allowance_s`` at most.

    Each choice lowers the spread around it, as if it had been measured: that keeps them apart.
    """
    if core.surface is None or not candidates:
        return []
    passes = batch_columns([one.batch for one in candidates], core.bench.engine.graph_sizes)
    covariance: FloatArray = core.surface.covariance(passes)
    weight = np.array([one.weight for one in candidates])
    noise = float(np.exp(2.0 * core.surface.theta[0]))
    cost = np.array([cost_s(one.batch) for one in candidates])
    chosen: list[int] = []
    while len(chosen) < BATCH_POINTS:
        variance = np.maximum(np.diag(covariance), 0.0)
        need = np.where(cost <= allowance_s, weight * np.sqrt(variance), 0.0)
        need[chosen] = 0.0
        best = int(np.argmax(need))
        if not need[best] > 0.0:
            break
        chosen.append(best)
        allowance_s -= float(cost[best])
        known = covariance[best]
        covariance = covariance - np.outer(known, known) / (known[best] + noise)
    return [candidates[index] for index in chosen]
