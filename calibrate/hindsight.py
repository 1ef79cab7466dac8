"""What only shows once all rounds are there: visits that do not belong with the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from passtime.calibrate.clock import ClockPolicy
from passtime.calibrate.log import Point, Visit, VisitKey


def hindsight(
    points: Sequence[Point], visits: Sequence[Visit], clock: ClockPolicy
) -> dict[str, list[VisitKey]]:
    """Visits to flag, by flag; flags that nothing deserves are left out."""
    found = {
        "slow_clock": list(_slow_clocks(points, visits, clock.clock_tol)),
        "rounds_disagree": list(_disagreeing(visits, clock.drift_tol)),
    }
    return {flag: keys for flag, keys in found.items() if keys}


def _slow_clocks(
    points: Sequence[Point], visits: Sequence[Visit], tolerance: float
) -> Iterator[VisitKey]:
    """Visits whose SM clock lay under the median of their regime's."""
    regimes = {point.id: point.regime for point in points}
    by_regime: dict[str, list[tuple[float, VisitKey]]] = {}
    for visit in visits:
        if "sm_mhz" in visit.clocks:
            clock = float(visit.clocks["sm_mhz"]), visit.key
            by_regime.setdefault(regimes[visit.point], []).append(clock)
    for clocks in by_regime.values():
        floor_mhz = (1 - tolerance) * median(mhz for mhz, _ in clocks)
        yield from (key for mhz, key in clocks if mhz < floor_mhz)


def _disagreeing(visits: Sequence[Visit], tolerance: float) -> Iterator[VisitKey]:
    """Visits of points whose rounds differ by more than a reference may move."""
    by_point: dict[int, list[tuple[float, VisitKey]]] = {}
    for visit in visits:
        if visit.samples_ms:
            found = median(visit.samples_ms), visit.key
            by_point.setdefault(visit.point, []).append(found)
    for rounds in by_point.values():
        medians = [ms for ms, _ in rounds]
        if max(medians) - min(medians) > tolerance * median(medians):
            yield from (key for _, key in rounds)
