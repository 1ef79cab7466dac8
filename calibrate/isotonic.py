"""Monotone projection: the values nearest to given ones that fall by no more than a slack.

Along one axis this is weighted isotonic regression; along several, Dykstra's alternating
projections over them. Slack is given per step along each axis, one array an axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passtime.sched.timing import FloatArray

_PROJECTIONS, _SETTLED = 15, 1e-3


def monotone(values: FloatArray, weight: FloatArray, slack: Sequence[FloatArray]) -> FloatArray:
    """The values nearest to ``values`` that fall by at most ``slack[i]`` per step along axis i.

    Nearest in squares weighted by ``weight`` (Dykstra's alternating projections, each axis an
    isotonic regression); the last bit of feasibility comes from the mean of the tightest majorant
    and minorant, which both keep the bounds.
    """
    current, kept = values, [np.zeros_like(values) for _ in slack]
    for _ in range(_PROJECTIONS):
        before = current
        for axis, bound in enumerate(slack):
            asked = current + kept[axis]
            current = _isotonic(asked, weight, bound, axis)
            kept[axis] = asked - current
        if np.abs(current - before).max() < _SETTLED:
            break
    upper = _majorant(current, slack, step=1)
    lower = -_majorant(-current, slack, step=-1)
    return 0.5 * (upper + lower)


def _isotonic(values: FloatArray, weight: FloatArray, slack: FloatArray, axis: int) -> FloatArray:
    """Weighted isotonic regression, up to ``slack``, of every line along ``axis`` at once.

    By the max-min formula: the value at j is max over i <= j of min over k >= j of the mean i … k.
    """
    count = values.shape[axis]
    if count == 1:
        return values
    lines = np.moveaxis(values, axis, -1).reshape(-1, count)
    heavy = np.moveaxis(weight, axis, -1).reshape(-1, count)
    falls = np.moveaxis(slack, axis, -1).reshape(-1, count - 1)
    allowed = np.concatenate([np.zeros((len(lines), 1)), np.cumsum(falls, axis=1)], axis=1)
    shape = np.moveaxis(values, axis, -1).shape
    lines = lines + allowed
    result = lines.copy()
    falling = (np.diff(lines, axis=1) < 0.0).any(axis=1)  # the others stay as they are
    lines, heavy = lines[falling], heavy[falling]
    edge = np.zeros((len(lines), 1))
    mass = np.concatenate([edge, np.cumsum(heavy, axis=1)], axis=1)
    moment = np.concatenate([edge, np.cumsum(heavy * lines, axis=1)], axis=1)
    span = mass[:, None, 1:] - mass[:, :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (moment[:, None, 1:] - moment[:, :-1, None]) / span
    valid = np.triu(np.ones((count, count), dtype=bool))
    means = np.where(valid, means, np.inf)
    least = np.minimum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    result[falling] = np.where(valid, least, -np.inf).max(axis=1)
    return np.moveaxis((result - allowed).reshape(shape), -1, axis)


def rounded(values: FloatArray, slack: Sequence[FloatArray], *, lattice: float) -> FloatArray:
    """``values`` as whole numbers of steps of 1 / ``lattice``, which still keep the bounds."""
    return _majorant(
        np.round(values * lattice), [np.floor(bound * lattice) for bound in slack], step=1
    )


def _majorant(values: FloatArray, slack: Sequence[FloatArray], *, step: int) -> FloatArray:
    """The smallest majorant that keeps the bounds, walking up (``step`` 1) or down (-1)."""
    current = values.copy()
    for _ in range(64):
        before = current.copy()
        for axis, bound in enumerate(slack):
            lines = np.moveaxis(current, axis, 0)[::step]
            for index, fall in enumerate(np.moveaxis(bound, axis, 0)[::step]):
                lines[index + 1] = np.maximum(lines[index + 1], lines[index] - fall)
        if np.array_equal(before, current):
            break
    return current
