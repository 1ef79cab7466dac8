"""The residual: a Gaussian process on ln(measured / law).

Two product kernels over log2(1 + size): a smooth one (Matérn 3/2) for what the law's terms miss, a
rough one (exponential) for kernel choices that switch. Its mean goes to zero away from the data, so
far from any measurement the law speaks alone. Product kernels separate by axis: a whole tensor grid
costs two small matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passtime.calibrate.points import AXES, axis_columns
from passtime.profiles.document import AxisName
from passtime.profiles.predict import PassColumns
from passtime.sched.timing import FloatArray

_OCTAVES = 3.0  # one unit of kernel distance
_GAP = 2.0
_ROOT3 = math.sqrt(3.0)
_TUNED_POINTS = 300  # more than these do not change the hyperparameters
_NOISE = (math.log(0.01), 0.7)
_AMPLITUDE = (math.log(0.05), math.log(0.03), 1.0)
_LENGTH = (math.log(2.0), math.log(0.7), 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """A conditioned process: where it was measured and what it learned there."""

    sizes: FloatArray  # all five axes of every point
    places: FloatArray
    axes: npt.NDArray[np.intp]  # the coordinates that vary
    theta: FloatArray
    weights: FloatArray
    inverse: FloatArray
    values: FloatArray

    def mean(self, passes: PassColumns) -> FloatArray:
        """ln(factor) of each pass."""
        return self._mean(self._kernel(passes))

    def spread(self, passes: PassColumns) -> FloatArray:
        """Predictive standard deviation of ln(time), measurement noise included."""
        return self._spread(self._kernel(passes))

    def on_product(
        self, prompts: Mapping[AxisName, FloatArray], decodes: Mapping[AxisName, FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        """Mean and spread of all ``prompts`` with all ``decodes``, decodes fastest.

        Each holds sizes by axis, as arrays of one length; an axis that is absent is 0.
        """
        total: FloatArray | float = 0.0
        for smooth, amplitude, lengths in _halves(self.theta):
            parts = []
            for sizes, names in ((prompts, AXES[:3]), (decodes, AXES[3:])):
                part: FloatArray = np.ones((1, len(self.places)))
                for column, (axis, length) in enumerate(zip(self.axes, lengths, strict=True)):
                    if AXES[axis] in names:
                        values = sizes.get(AXES[axis], np.zeros(1))
                        distinct, back = np.unique(values, return_inverse=True)
                        place = _place(AXES[axis], distinct)
                        distance = np.abs(place[:, None] - self.places[None, :, column])
                        part = part * _profiles(distance, float(length), smooth)[0][back]
                parts.append(part)
            product = parts[0][:, None, :] * parts[1][None, :, :] * math.exp(2.0 * amplitude)
            total = total + product.reshape(-1, len(self.places))
        kernel = np.asarray(total)
        return self._mean(kernel), self._spread(kernel)

    def uncertainty(self, spread: FloatArray) -> FloatArray:
        """What intervals go by: between ``spread`` and that of a typical point left out.

        At a measured point the process is too sure: repeats at another time differ more than
        repeats in a row. The geometric mean of the two is as good elsewhere.
        """
        typical = float(np.median(self.left_out()[1]))
        between: FloatArray = np.sqrt(spread * typical)
        return between

    def left_out(self) -> tuple[FloatArray, FloatArray]:
        """Error and spread at every point had it been left out, hyperparameters kept."""
        diagonal = np.diag(self.inverse)
        return self.weights / diagonal, 1.0 / np.sqrt(diagonal)

    def covariance(self, passes: PassColumns) -> FloatArray:
        """Covariance of ln(time) between passes given the points, measurement noise excluded."""
        places = coordinates(passes)[:, self.axes]
        across = _kernel(places, self.places, self.theta)
        joint: FloatArray = _kernel(places, places, self.theta)
        return joint - across @ self.inverse @ across.T

    def _kernel(self, passes: PassColumns) -> FloatArray:
        return _kernel(coordinates(passes)[:, self.axes], self.places, self.theta)

    def _mean(self, kernel: FloatArray) -> FloatArray:
        mean: FloatArray = kernel @ self.weights
        return mean

    def mixed_prompts(self) -> float:
        """The usual number of prompts in a measured mixed pass: its table has no axis for it."""
        mixed = (self.sizes[:, AXES.index("prompts")] > 0) & (
            self.sizes[:, AXES.index("decodes")] > 0
        )
        return float(np.median(self.sizes[mixed, AXES.index("prompts")])) if mixed.any() else 1.0

    def length(self, name: AxisName) -> float:
        """Over how many octaves of an axis the surface changes; long where it does not."""
        index = np.flatnonzero(self.axes == AXES.index(name))
        if not len(index):
            return _OCTAVES * 1e3
        rates = [
            (math.exp(2.0 * amplitude), math.exp(-lengths[index[0]]))
            for _, amplitude, lengths in _halves(self.theta)
        ]
        total = sum(power for power, _ in rates)
        return _OCTAVES * total / sum(power * rate for power, rate in rates)

    def _spread(self, kernel: FloatArray) -> FloatArray:
        rough, smooth = _amplitudes(self.theta)
        prior = rough + smooth + math.exp(2.0 * self.theta[0])
        explained = np.einsum("ij,ij->i", kernel @ self.inverse, kernel)
        spread: FloatArray = np.sqrt(np.maximum(prior - explained, 1e-10))
        return spread


def coordinates(passes: PassColumns) -> FloatArray:
    """Where passes lie for the kernels: the five axes of a profile, see :func:`_place`."""
    columns = [_place(name, sizes) for name, sizes in axis_columns(passes).items()]
    return np.stack(columns, axis=1)


def _place(name: AxisName, sizes: FloatArray) -> FloatArray:
    """log2 of 1 + size. A pass without prompts (or decodes) is of another kind: a gap parts it."""
    places: FloatArray = np.log2(1.0 + sizes) / _OCTAVES
    return places + _GAP * (sizes > 0.0) if name in ("new_tokens", "decodes") else places


def fit_surface(
    passes: PassColumns,
    log_ratio: FloatArray,
    sigma: FloatArray,
    *,
    theta: FloatArray | None = None,
) -> Surface:
    """Condition the process on ``log_ratio``; hyperparameters are tuned unless ``theta`` is given.

    ``sigma`` is each point's own relative noise, beside the noise that is tuned.
    """
    places = coordinates(passes)
    axes = np.flatnonzero(np.ptp(places, axis=0) > 0)
    places = places[:, axes]
    if theta is None or len(theta) != 3 + 2 * len(axes):
        chosen = np.arange(len(places))
        if len(places) > _TUNED_POINTS:
            chosen = np.random.default_rng(0).permutation(len(places))[:_TUNED_POINTS]
        theta = _tuned(places[chosen], log_ratio[chosen], sigma[chosen])
    kernel = _kernel(places, places, theta)
    kernel[np.diag_indices(len(places))] += math.exp(2.0 * theta[0]) + sigma**2
    inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
    return Surface(
        sizes=np.stack(list(axis_columns(passes).values()), axis=1),
        places=places,
        axes=axes,
        theta=theta,
        weights=inverse @ log_ratio,
        inverse=inverse,
        values=log_ratio,
    )


def _amplitudes(theta: FloatArray) -> tuple[float, float]:
    half = (len(theta) - 1) // 2
    return math.exp(2.0 * theta[1]), math.exp(2.0 * theta[1 + half])


def _profiles(distance: FloatArray, length: float, smooth: bool) -> tuple[FloatArray, FloatArray]:
    """One axis' correlation, and its logarithmic derivative by ln(length)."""
    scaled = distance * math.exp(-length)
    if not smooth:
        return np.exp(-scaled), scaled
    scaled = scaled * _ROOT3
    return (1.0 + scaled) * np.exp(-scaled), scaled * scaled / (1.0 + scaled)


def _halves(theta: FloatArray) -> list[tuple[bool, float, FloatArray]]:
    """(smooth?, ln amplitude, ln lengths) of the two kernels."""
    half = (len(theta) - 1) // 2
    smooth, rough = theta[1 : 1 + half], theta[1 + half :]
    return [(True, float(smooth[0]), smooth[1:]), (False, float(rough[0]), rough[1:])]


def _kernel(left: FloatArray, right: FloatArray, theta: FloatArray) -> FloatArray:
    total = np.zeros((len(left), len(right)))
    for smooth, amplitude, lengths in _halves(theta):
        part = np.full(total.shape, math.exp(2.0 * amplitude))
        for axis, length in enumerate(lengths):
            distance = np.abs(left[:, axis, None] - right[None, :, axis])
            part *= _profiles(distance, float(length), smooth)[0]
        total += part
    return total


def _tuned(places: FloatArray, values: FloatArray, sigma: FloatArray) -> FloatArray:
    """Hyperparameters of largest posterior: [ln noise, (ln amplitude, ln lengths…) twice]."""
    from scipy.optimize import minimize

    count, axes = places.shape
    distances = [np.abs(places[:, axis, None] - places[None, :, axis]) for axis in range(axes)]
    mean, width = [_NOISE[0]], [_NOISE[1]]
    for amplitude, length in zip(_AMPLITUDE[:2], _LENGTH[:2], strict=True):
        mean += [amplitude] + [length] * axes
        width += [_AMPLITUDE[2]] + [_LENGTH[2]] * axes
    centre, spread = np.array(mean), np.array(width)
    diagonal = np.diag_indices(count)

    def objective(theta: FloatArray) -> tuple[float, FloatArray]:
        kernel, slopes = np.zeros((count, count)), []
        for smooth, amplitude, lengths in _halves(theta):
            part = np.full(kernel.shape, math.exp(2.0 * amplitude))
            changes = []
            for distance, length in zip(distances, lengths, strict=True):
                correlation, change = _profiles(distance, float(length), smooth)
                part *= correlation
                changes.append(change)
            kernel += part
            slopes += [2.0 * part] + [part * change for change in changes]
        noise = math.exp(2.0 * theta[0])
        kernel[diagonal] += noise + sigma**2
        try:
            lower = np.linalg.cholesky(kernel)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(theta)
        inverse = np.linalg.inv(kernel)
        weights = inverse @ values
        outer = 0.5 * (inverse - np.outer(weights, weights))
        gradient = [np.trace(outer) * 2.0 * noise] + [np.vdot(outer, slope) for slope in slopes]
        offset = (theta - centre) / spread
        value = 0.5 * values @ weights + np.log(np.diag(lower)).sum() + 0.5 * offset @ offset
        return float(value), np.array(gradient) + offset / spread

    found = minimize(objective, centre, jac=True, method="L-BFGS-B", options={"maxiter": 40})
    tuned: FloatArray = found.x
    return tuned
