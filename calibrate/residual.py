"""The residual: a Gaussian process on ln(measured / law), tabulated and made monotone.

Two product kernels over log2(1 + size): a smooth one (Matérn 3/2) for what the law's terms miss, a
rough one (exponential) for kernel choices that switch. Its mean goes to zero away from the data, so
far from any measurement the law speaks alone. Product kernels separate by axis: a whole tensor grid
costs two small matrix products.

The tabulated factor is then moved, as little as possible, to where law · factor rises with every
size: the law's own slope bounds how fast the factor may fall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passtime.calibrate.points import AXES, axis_columns
from passtime.profiles.document import REGIME_AXES, Axis, AxisName, Range, Regime, Residual
from passtime.profiles.law import ARRAYS, Law
from passtime.profiles.predict import PassColumns
from passtime.sched.timing import FloatArray

_OCTAVES = 3.0  # one unit of kernel distance
_GAP = 2.0
_ROOT3 = math.sqrt(3.0)
_TUNED_POINTS = 300  # more than these do not change the hyperparameters
_NODES = {2: 2500, 3: 4000, 4: 8000}  # of a table with so many axes
_FINEST, _COARSEST = 1.0 / 8.0, 2.0  # octaves between neighbouring nodes
_PROJECTIONS, _SETTLED = 30, 3e-4
_SLOPE_MARGIN = 0.9
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

    def on_grid(self, lines: Mapping[AxisName, Sequence[float]]) -> tuple[FloatArray, FloatArray]:
        """Mean and spread at every node of a tensor grid, last axis fastest; absent axes are 0."""
        places = [_place(name, np.array(lines.get(name, [0.0]), dtype=float)) for name in AXES]
        total: FloatArray | float = 0.0
        for smooth, amplitude, lengths in _halves(self.theta):
            part = np.full((1, len(self.places)), math.exp(2.0 * amplitude))
            for column, (axis, length) in enumerate(zip(self.axes, lengths, strict=True)):
                distance = np.abs(places[axis][:, None] - self.places[None, :, column])
                along = _profiles(distance, float(length), smooth)[0]
                part = (part[:, None, :] * along[None, :, :]).reshape(-1, len(self.places))
            total = total + part
        kernel = np.asarray(total)
        return self._mean(kernel), self._spread(kernel)

    def left_out(self) -> tuple[FloatArray, FloatArray]:
        """Error and spread at every point had it been left out, hyperparameters kept."""
        diagonal = np.diag(self.inverse)
        return self.weights / diagonal, 1.0 / np.sqrt(diagonal)

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
    return places


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


# --- The table ----------------------------------------------------------------------------------


def tabulate(surface: Surface, regime: Regime, box: Mapping[AxisName, Range], law: Law) -> Residual:
    """The residual of one regime on a grid over its box, monotone together with ``law``."""
    names = REGIME_AXES[regime]
    nodes = _nodes([box[name] for name in names], [surface.length(name) for name in names])
    shape = tuple(len(axis) for axis in nodes)
    lines: dict[AxisName, Sequence[float]] = dict(zip(names, nodes, strict=True))
    if regime == "mixed":
        lines["prompts"] = [surface.mixed_prompts()]
    mean, spread = surface.on_grid(lines)
    slack = [_slack(law, regime, nodes, axis) for axis in range(len(nodes))]
    factor = monotone(np.clip(mean, -2.5, 2.5).reshape(shape), spread.reshape(shape) ** -2, slack)
    return Residual(
        axes=tuple(
            Axis(name=name, nodes=tuple(axis)) for name, axis in zip(names, nodes, strict=True)
        ),
        log_factor=tuple(round(value, 5) for value in factor.ravel().tolist()),
        log_spread=tuple(round(value, 4) for value in spread.tolist()),
    )


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
    lines = lines + allowed
    edge = np.zeros((len(lines), 1))
    mass = np.concatenate([edge, np.cumsum(heavy, axis=1)], axis=1)
    moment = np.concatenate([edge, np.cumsum(heavy * lines, axis=1)], axis=1)
    span = mass[:, None, 1:] - mass[:, :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (moment[:, None, 1:] - moment[:, :-1, None]) / span
    valid = np.triu(np.ones((count, count), dtype=bool))
    means = np.where(valid, means, np.inf)
    least = np.minimum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    fitted = np.where(valid, least, -np.inf).max(axis=1) - allowed
    shape = np.moveaxis(values, axis, -1).shape
    return np.moveaxis(fitted.reshape(shape), -1, axis)


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


def _nodes(edges: Sequence[Range], lengths: Sequence[float]) -> list[list[float]]:
    """Nodes in geometric steps from edge to edge, as fine as the budget allows.

    An axis along which the surface changes fast (a short length, in octaves) gets finer steps.
    """
    scale = _FINEST / max(lengths)
    while True:
        nodes = [
            _line(edge, min(max(scale * length, _FINEST), _COARSEST))
            for edge, length in zip(edges, lengths, strict=True)
        ]
        count = math.prod(len(line) for line in nodes)
        if count <= _NODES[len(edges)] or scale > 1e6:
            return nodes
        scale *= 1.05


def _line(edge: Range, octaves: float) -> list[float]:
    low, high = max(edge.low, 1.0), max(edge.high, 1.0)
    if high <= low:
        return [low]
    steps = max(1, math.ceil(math.log2(high / low) / octaves))
    inner = {float(round(low * (high / low) ** (step / steps))) for step in range(1, steps)}
    return sorted({low, high} | {node for node in inner if low < node < high})


def _grid_passes(
    regime: Regime, nodes: Sequence[Sequence[float]], *, crowd: float = 1.0
) -> PassColumns:
    """One pass per node, of equal prompts and decodes; ``crowd`` lengthens the longest decode."""
    grids = [grid.ravel() for grid in np.meshgrid(*nodes, indexing="ij")]
    zero = np.zeros(len(grids[0]))
    sizes = dict(zip(REGIME_AXES[regime], grids, strict=True))
    new, context = sizes.get("new_tokens", zero), sizes.get("prompt_context", zero)
    prompts = sizes.get("prompts", np.minimum(new, 1.0))
    decodes, mean = sizes.get("decodes", zero), sizes.get("decode_context", zero)
    each = new / np.maximum(prompts, 1.0)
    prefix = np.maximum(0.0, context - (each + 1.0) / 2.0) * prompts
    return PassColumns(prompts, new, prefix, new * context, decodes, decodes * mean, mean * crowd)


def _slack(law: Law, regime: Regime, nodes: Sequence[Sequence[float]], axis: int) -> FloatArray:
    """How far ln(factor) may fall from node to node along ``axis``, given the law's own rise."""
    shape = tuple(len(line) for line in nodes)
    if shape[axis] == 1:
        return np.zeros((*shape[:axis], 0, *shape[axis + 1 :]))
    slope = np.minimum(
        _relative_slope(law, regime, nodes, axis, 1.0),
        _relative_slope(law, regime, nodes, axis, 4.0),
    ).reshape(shape)
    for other in range(len(shape)):
        if other != axis and shape[other] > 1:
            slope = _smallest_neighbour(slope, other)
    lines = np.moveaxis(slope, axis, 0)
    smallest = np.moveaxis(np.minimum(lines[1:], lines[:-1]), 0, axis)
    width = np.diff(np.array(nodes[axis])).reshape(
        [-1 if a == axis else 1 for a in range(len(shape))]
    )
    share = _SLOPE_MARGIN * (1.0 - law.tile_share if law.tile else 1.0)
    slack: FloatArray = np.log1p(share * width * np.maximum(smallest, 0.0))
    return slack


def _relative_slope(
    law: Law, regime: Regime, nodes: Sequence[Sequence[float]], axis: int, crowd: float
) -> FloatArray:
    """∂law/∂size over law at every node, per token or request of ``axis``."""
    step, smooth = 1e-4, copy(law)
    smooth.tile = None
    times = []
    for factor in (1.0 - step, 1.0, 1.0 + step):
        moved = [
            [at * factor for at in line] if a == axis else line for a, line in enumerate(nodes)
        ]
        times.append(_regime_times(smooth, regime, _grid_passes(regime, moved, crowd=crowd)))
    sizes = np.meshgrid(*nodes, indexing="ij")[axis].ravel()
    slope: FloatArray = (times[2] - times[0]) / (2.0 * step * sizes * times[1])
    return slope


def _regime_times(law: Law, regime: Regime, passes: PassColumns) -> FloatArray:
    if regime == "prefill":
        return law.prefill_ms(*passes[:4], ARRAYS)
    if regime == "decode":
        return law.decode_ms(passes[4], passes[5], ARRAYS)
    return law.mixed_ms(*passes, ARRAYS)


def _smallest_neighbour(values: FloatArray, axis: int) -> FloatArray:
    """Every node's minimum with its two neighbours along ``axis``."""
    lines = np.moveaxis(values, axis, 0)
    result = lines.copy()
    result[1:] = np.minimum(result[1:], lines[:-1])
    result[:-1] = np.minimum(result[:-1], lines[1:])
    return np.moveaxis(result, 0, axis)
