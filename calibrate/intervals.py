"""Prediction intervals: conformal, on held-out errors over the predictive spread.

The surface knows where it is unsure (far from data, at switches); the folds know how large errors
really are. The quantile of their ratio makes intervals of the stated coverage out of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from passtime.calibrate.validate import HeldOut
from passtime.profiles.document import REGIME_AXES, Intervals, MeasuredPoint, Regime
from passtime.sched.timing import FloatArray

LEVEL_PERCENT = 90.0
_MIN_POINTS = 20  # a regime with fewer shares the pooled width


def conformal(
    points: Sequence[MeasuredPoint],
    measured_ms: FloatArray,
    folds: HeldOut | None,
    beyond: Mapping[str, FloatArray],
) -> Intervals | None:
    """Interval widths per regime from the folds; None if there were none."""
    if folds is None:
        return None
    floor = float(np.quantile(folds.spread, 0.05))
    score = np.abs(np.log(measured_ms / folds.predicted_ms)) / np.maximum(folds.spread, floor)
    pooled = _quantile(score)
    regimes = np.array([point.regime for point in points])
    width: dict[Regime, float] = {}
    for regime in REGIME_AXES:
        chosen = regimes == regime
        if chosen.any():
            width[regime] = _quantile(score[chosen]) if chosen.sum() >= _MIN_POINTS else pooled
    inside = float(np.quantile(np.abs(np.log(measured_ms / folds.predicted_ms)), 0.9))
    outside = [float(np.quantile(np.abs(error), 0.9)) for error in beyond.values()]
    return Intervals(
        level_percent=LEVEL_PERCENT,
        width=width,
        floor=floor,
        beyond=max([1.0, *(edge / max(inside, 1e-9) for edge in outside)]),
    )


def _quantile(score: FloatArray) -> float:
    """The conformal quantile: the ceil((n + 1) · level)-th smallest score."""
    rank = min(math.ceil((len(score) + 1) * LEVEL_PERCENT / 100.0), len(score))
    return max(float(np.sort(score)[rank - 1]), 1e-6)
