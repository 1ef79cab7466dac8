"""The workload that a plan expects: sizes log-normal around the middle of the box.

Nobody's trace is known when a device is measured. Engines spend most passes away from the edges of
what they allow, so what is to be judged, and where a fit has to be right, is weighted by a bell
over log(1 + x) of each axis, four of its deviations wide.
"""

from __future__ import annotations

import numpy as np

from passtime.sched.timing import FloatArray

DEVIATION = 0.25
"""Of an axis' length in log(1 + x)."""


def workload_density(places: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """How often each place (a row of log(1 + x)) is expected, relative to the box's middle."""
    span = np.where(high > low, high - low, 1.0)
    off = (places - (low + high) / 2.0) / (DEVIATION * span)
    density: FloatArray = np.exp(-0.5 * (off**2).sum(axis=1))
    return density


def workload_places(
    rng: np.random.Generator, low: FloatArray, high: FloatArray, count: int
) -> FloatArray:
    """``count`` places drawn from that density, those beyond the box moved to its edge."""
    drawn = rng.normal((low + high) / 2.0, DEVIATION * (high - low), size=(count, len(low)))
    places: FloatArray = np.clip(drawn, low, high)
    return places
