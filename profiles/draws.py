"""Draws of a timing model: profiles as they might as well have come out of the calibration.

A profile's intervals say how far a prediction may be off at one shape. What that does to a
percentile of TTFT can only be seen by replaying models that are off: each draw multiplies every
regime's residual table by exp(σ·z), where σ is the interval's standard deviation at each node and
z a standard normal field. Errors of a fit are systematic, so z is smooth: one part is common to
the regime, the other varies over a few sizes per axis. A draw is an ordinary profile, but it need
not be monotone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import msgspec
import numpy as np

from passtime.errors import DocumentError
from passtime.profiles.document import (
    TABLE_AXES,
    Axis,
    Intervals,
    Profile,
    Regime,
    Residual,
)
from passtime.sched.timing import FloatArray

COMMON_SHARE = 0.5
"""Share of the variance that all shapes of a regime have in common."""

KNOTS_PER_AXIS = 4
"""Independent values of the varying part along each axis, evenly spaced in log(1 + size)."""


def draws(profile: Profile, count: int, *, seed: int) -> Iterator[Profile]:
    """``count`` draws; the same seed gives the same ones.

    Raises DocumentError if the profile carries no intervals.
    """
    if profile.intervals is None:
        raise DocumentError(
            f"profile {profile.name!r} carries no intervals: fit it anew, with points held out"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    for _ in range(count):
        yield _draw(profile, profile.intervals, generator)


def _draw(profile: Profile, intervals: Intervals, generator: np.random.Generator) -> Profile:
    residual: dict[Regime, Residual] = {}
    for regime in profile.box:
        table = profile.residual.get(regime) or _flat_table(profile, regime)
        sigma = _sigma(table, regime, intervals)
        shift = (sigma * _field(table.axes, generator)).tolist()
        log_factor = tuple(a + b for a, b in zip(table.log_factor, shift, strict=True))
        residual[regime] = msgspec.structs.replace(table, log_factor=log_factor)
    return msgspec.structs.replace(profile, residual=residual)


def _flat_table(profile: Profile, regime: Regime) -> Residual:
    """The table of a model class without a residual: factor 1 everywhere."""
    names = TABLE_AXES[profile.engine.timed_part][regime]
    axes = tuple(Axis(name=name, nodes=(1.0,)) for name in names)
    return Residual(axes=axes, log_factor=(0.0,), log_spread=(0.0,))


def _sigma(table: Residual, regime: Regime, intervals: Intervals) -> FloatArray:
    """Standard deviation of ln(truth / prediction) per node, from the interval's half width."""
    spread = np.maximum(np.array(table.log_spread), intervals.floor)
    width = intervals.width.get(regime, max(intervals.width.values(), default=1.0))
    deviations = NormalDist().inv_cdf(0.5 + intervals.level_percent / 200.0)
    sigma: FloatArray = spread * width / deviations
    return sigma


def _field(axes: tuple[Axis, ...], generator: np.random.Generator) -> FloatArray:
    """A smooth standard normal field on the table's grid, last axis fastest."""
    common = generator.standard_normal()
    varying: FloatArray = generator.standard_normal([KNOTS_PER_AXIS] * len(axes))
    variance = np.ones(())
    for number, axis in enumerate(axes):
        weights = _knot_weights(axis)
        across = np.asarray(np.tensordot(weights, varying, axes=(1, number)), dtype=np.float64)
        varying = np.moveaxis(across, 0, number)
        variance = np.multiply.outer(variance, (weights**2).sum(axis=1))
    unit = varying / np.sqrt(variance)
    field: FloatArray = math.sqrt(COMMON_SHARE) * common + math.sqrt(1 - COMMON_SHARE) * unit
    return field.ravel()


def _knot_weights(axis: Axis) -> FloatArray:
    """Linear interpolation from knots to nodes, shape (nodes, knots)."""
    sizes = np.log1p(np.array(axis.nodes))
    knots = np.linspace(sizes[0], max(sizes[-1], sizes[0] + 1e-9), KNOTS_PER_AXIS)
    columns = [np.interp(sizes, knots, np.eye(KNOTS_PER_AXIS)[k]) for k in range(KNOTS_PER_AXIS)]
    return np.stack(columns, axis=1)
