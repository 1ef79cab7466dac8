"""Honest errors: in-sample, pooled held-out folds, and extrapolation along each axis.

Every fold is a fit of its own that never saw the points it predicts, tabulated and made monotone
like the shipped one. A single small hold-out is a lottery; five folds are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passtime.calibrate.core import Core, fit_core
from passtime.calibrate.points import (
    axis_columns,
    columns,
    latencies,
    noise_floor_percent,
)
from passtime.profiles.document import REGIME_AXES, Accuracy, Errors, MeasuredPoint, Regime
from passtime.sched.timing import FloatArray

FOLDS = 5
MIN_FOLD_POINTS = 10  # fewer points cannot be split into folds that mean anything
MIN_TRAINED = 12
MIN_TESTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Predictions of points by fits that never saw them, in the points' order."""

    predicted_ms: FloatArray
    spread: FloatArray


def accuracy(predicted_ms: FloatArray, measured_ms: FloatArray) -> Accuracy:
    """Relative errors in percent."""
    error = 100.0 * (predicted_ms / measured_ms - 1.0)
    size = np.abs(error)
    return Accuracy(
        points=len(error),
        mape_percent=float(size.mean()),
        p90_percent=float(np.percentile(size, 90)),
        max_percent=float(size.max()),
        bias_percent=float(error.mean()),
    )


def held_out(core: Core, points: Sequence[MeasuredPoint], *, seed: int = 0) -> HeldOut | None:
    """Pooled predictions of five folds, stratified by regime; None below ten points."""
    if len(points) < MIN_FOLD_POINTS:
        return None
    fold = _folds(points, seed)
    predicted, spread = np.empty(len(points)), np.empty(len(points))
    for number in range(FOLDS):
        inside, outside = fold != number, fold == number
        refit = fit_core(core.bench, _chosen(points, inside), like=core)
        passes = columns(_chosen(points, outside), core.bench.engine.graph_sizes)
        predicted[outside] = refit.predictor().pass_many_ms(passes)
        spread[outside] = refit.spread(passes)
    return HeldOut(predicted_ms=predicted, spread=spread)


def extrapolation(core: Core, points: Sequence[MeasuredPoint]) -> dict[str, FloatArray]:
    """Per axis, ln(measured / predicted) beyond half its range, fitted on the rest."""
    passes = columns(points, core.bench.engine.graph_sizes)
    errors: dict[str, FloatArray] = {}
    for axis, values in axis_columns(passes).items():
        beyond = values > values.max() / 2.0
        short = (values > 0.0) & ~beyond  # the rest has nothing to do with this axis
        if beyond.sum() < MIN_TESTED or short.sum() < MIN_TRAINED:
            continue
        refit = fit_core(core.bench, _chosen(points, ~beyond), like=core)
        predicted = refit.predictor().pass_many_ms(passes.take(beyond))
        errors[axis] = np.log(latencies(_chosen(points, beyond)) / predicted)
    return errors


def errors_of(
    core: Core,
    points: Sequence[MeasuredPoint],
    planned: Sequence[MeasuredPoint],
    folds: HeldOut | None,
    beyond: dict[str, FloatArray],
) -> Errors:
    """The document's section: every figure that a reader needs to judge the profile."""
    graphs, measured = core.bench.engine.graph_sizes, latencies(points)
    predictor = core.predictor()
    regimes = np.array([point.regime for point in points])
    judged = (
        predictor.pass_many_ms(columns(points, graphs)) if folds is None else folds.predicted_ms
    )
    by_regime: dict[Regime, Accuracy] = {}
    for regime in REGIME_AXES:
        if (chosen := regimes == regime).any():
            by_regime[regime] = accuracy(judged[chosen], measured[chosen])
    return Errors(
        in_sample=accuracy(predictor.pass_many_ms(columns(points, graphs)), measured),
        held_out=None if folds is None else accuracy(folds.predicted_ms, measured),
        planned=accuracy(predictor.pass_many_ms(columns(planned, graphs)), latencies(planned))
        if planned
        else None,
        by_regime=by_regime,
        worst_regime=max(by_regime.items(), key=lambda item: item[1].mape_percent)[0],
        extrapolation={
            axis: accuracy(np.exp(-error), np.ones(len(error))) for axis, error in beyond.items()
        },
        noise_floor_percent=noise_floor_percent(points),
    )


def _folds(points: Sequence[MeasuredPoint], seed: int) -> FloatArray:
    """A fold number per point, every regime spread over all folds."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(points))
    regimes = np.array([point.regime for point in points])
    for regime in REGIME_AXES:
        chosen = rng.permutation(np.flatnonzero(regimes == regime))
        fold[chosen] = np.arange(len(chosen)) % FOLDS
    return fold


def _chosen(points: Sequence[MeasuredPoint], mask: FloatArray) -> list[MeasuredPoint]:
    return [point for point, wanted in zip(points, mask, strict=True) if wanted]
