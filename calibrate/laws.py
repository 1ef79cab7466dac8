"""Fitting the law: maximum a posteriori in log space, robust, with physical priors.

Every coefficient is positive by construction (its logarithm is fitted; shares through a logit).
Rates have priors as efficiencies of the device's peaks, from what good kernels reach; where the
peaks are unknown (a CPU), a non-negative affine fit of the data itself sets their scale and the
priors are wide. Data decide wherever they say anything; priors fill what they leave open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import Coefficients, EngineFacts, ModelClass
from passtime.profiles.law import ARRAYS, Law, Work
from passtime.profiles.predict import PassColumns
from passtime.profiles.shapes import ModelShape
from passtime.sched.timing import FloatArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Scale: TypeAlias = Literal["log", "logit"]

MODEL_SIGMA = 0.025  # what the law itself cannot follow, relative: the floor of every point's σ
PHYSICAL_WALL = 0.02  # σ of the one-sided prior that keeps an efficiency below 1

_RATES = {
    "linear_flops_per_s": ("flops", 0.70, 0.25),
    "weight_bytes_per_s": ("bytes", 0.80, 0.20),
    "attention_flops_per_s": ("flops", 0.45, 0.50),
    "prefill_kv_bytes_per_s": ("bytes", 0.75, 1.50),
    "decode_kv_bytes_per_s": ("bytes", 0.75, 0.30),
}
_UNLIMITED = ("prefill_kv_bytes_per_s",)  # tiles read again what a cache still holds
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Where a coefficient lies before any data: a centre, and a width in log (logit) units."""

    centre: float
    width: float
    scale: Scale = "log"
    limit: float | None = None  # the device's peak: a rate above it is unphysical

    @property
    def mean(self) -> float:
        """The centre on the fitted scale."""
        if self.scale == "log":
            return math.log(self.centre)
        return math.log(self.centre / (1.0 - self.centre))


@dataclass(frozen=True, slots=True, kw_only=True)
class LawFit:
    """A fitted law; ``theta`` starts the next fit of similar data."""

    coefficients: Coefficients
    theta: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything about the measured system that a fit needs besides the points."""

    model: ModelShape
    engine: EngineFacts
    device: DeviceFacts
    model_class: ModelClass = "step"

    @property
    def work(self) -> Work:
        """What the timed part of the model asks of the device."""
        return Work.of(self.model, timed_part=self.engine.timed_part)


def fit_law(
    bench: Bench,
    passes: PassColumns,
    latency_ms: FloatArray,
    sigma: FloatArray,
    *,
    start: FloatArray | None = None,
) -> LawFit:
    """The law's coefficients for measured passes.

    ``sigma`` is the relative standard error of each latency. Least squares on ln(time) with
    soft-L1 loss on the data and plain squares on the priors.
    """
    from scipy.optimize import least_squares

    priors = law_priors(bench, passes, latency_ms)
    names = list(priors)
    mean = np.array([priors[name].mean for name in names])
    width = np.array([priors[name].width for name in names])
    limited = [index for index, name in enumerate(names) if priors[name].limit]
    wall = np.array([math.log(priors[names[index]].limit or 1.0) for index in limited])
    target, weight = np.log(latency_ms), 1.0 / np.hypot(sigma, MODEL_SIGMA)
    law = _Evaluator(bench, passes, names, priors)

    def misfit(theta: FloatArray) -> FloatArray:
        data = (np.log(law(theta)) - target) * weight
        above = np.maximum(theta[limited] - wall, 0.0) / PHYSICAL_WALL
        return np.concatenate([data, (theta - mean) / width, above])

    count = len(latency_ms)

    def loss(squares: FloatArray) -> FloatArray:
        rho = np.empty((3, len(squares)))
        root = np.sqrt(1.0 + squares[:count])
        rho[0, :count], rho[1, :count], rho[2, :count] = 2 * (root - 1), 1 / root, -0.5 / root**3
        rho[0, count:], rho[1, count:], rho[2, count:] = squares[count:], 1.0, 0.0
        return rho

    first = mean if start is None or len(start) != len(mean) else start
    found = least_squares(misfit, first, loss=loss, max_nfev=60, x_scale=width)
    return LawFit(coefficients=law.coefficients(found.x), theta=found.x)


def law_priors(bench: Bench, passes: PassColumns, latency_ms: FloatArray) -> dict[str, Prior]:
    """The prior of every free coefficient, in the document's order."""
    work, scale = bench.work, float(latency_ms.min())
    flops, bytes_per_s, known = _peaks(bench, passes, latency_ms)
    kv_ms = work.kv_bytes_per_token * 1e3 / bytes_per_s
    token_ms = work.elementwise_bytes_per_token * 1e3 / bytes_per_s
    ramp_tokens = 0.5e-3 * bytes_per_s / work.kv_bytes_per_token
    affine = bench.model_class == "affine"
    priors: dict[str, Prior] = {}
    priors["launch_ms"] = Prior(centre=0.1 * scale, width=1.5)
    for name, (kind, efficiency, width) in _RATES.items():
        peak = flops if kind == "flops" else bytes_per_s
        priors[name] = Prior(
            centre=efficiency * peak,
            width=width if known else 2.0,
            limit=_limit(name, peak, bench.model) if known and name not in _UNLIMITED else None,
        )
    if not affine:
        priors["linear_overlap"] = Prior(centre=0.23, width=1.0, scale="logit")
        priors["attention_overlap"] = Prior(centre=0.23, width=1.0, scale="logit")
        priors["row_overlap"] = Prior(centre=0.33, width=2.0, scale="logit")
        priors["decode_ramp_ms"] = Prior(centre=0.04 * scale, width=1.5)
        priors["decode_ramp_tokens"] = Prior(centre=ramp_tokens, width=1.0)
        priors["row_ms_per_token"] = Prior(centre=kv_ms, width=2.5)
        if bench.engine.tile_tokens:
            priors["tile_share"] = Prior(centre=0.1, width=1.5, scale="logit")
    if token_ms > 0.0:
        priors["token_ms"] = Prior(centre=token_ms, width=1.0 if known else 2.0)
    equal = passes.decode_requests * passes.decode_kv_max - passes.decode_kv_tokens
    if (equal >= np.maximum(passes.decode_requests, 1.0)).any():  # lengths that really differ
        priors["decode_skew"] = Prior(centre=0.05, width=1.0, scale="logit")
    priors["prefill_request_ms"] = Prior(centre=1e-3 * scale, width=1.5)
    priors["decode_request_ms"] = Prior(centre=5e-4 * scale, width=1.5)
    if ((passes.prefill_new_tokens > 0) & (passes.decode_requests > 0)).any():
        priors["mixed_ms"] = Prior(centre=0.01 * scale, width=2.0)
        priors["mixed_request_ms"] = Prior(centre=1e-3 * scale, width=2.0)
        priors["mixed_kv_ms"] = Prior(centre=0.5 * kv_ms, width=2.0)
        if not affine:
            priors["mixed_request_kv_ms"] = Prior(centre=0.01 * kv_ms, width=2.0)
    return priors


def unphysical(coefficients: Coefficients, bench: Bench) -> list[str]:
    """Every rate above the device's peak, said in a sentence; empty where peaks are unknown."""
    faults = []
    for name, (kind, _, _) in _RATES.items():
        device = bench.device
        peak = device.peak_flops if kind == "flops" else device.peak_bytes_per_s
        rate = getattr(coefficients, name)
        if name in _UNLIMITED:
            continue
        if peak and rate > (limit := _limit(name, peak, bench.model)):
            faults.append(
                f"{name}: {rate:.4g} is {rate / limit:.2f} of the device's peak {limit:.4g}: "
                "an efficiency above 1"
            )
    return faults


def _limit(name: str, peak: float, model: ModelShape) -> float:
    """The peak of a rate: fp8 linear layers run at twice the bf16 peak."""
    doubled = name == "linear_flops_per_s" and model.linear_dtype == "float8_e4m3"
    return 2.0 * peak if doubled else peak


def _peaks(bench: Bench, passes: PassColumns, latency_ms: FloatArray) -> tuple[float, float, bool]:
    """Peak FLOP/s and bytes/s: the device's own, else what an affine fit of the data implies."""
    flops, bytes_per_s = bench.device.peak_flops, bench.device.peak_bytes_per_s
    if flops and bytes_per_s:
        return flops, bytes_per_s, True
    from scipy.optimize import nnls

    work = bench.work
    compute = (
        (passes.prefill_new_tokens + passes.decode_requests) * work.flops_per_token
        + (passes.prefill_requests + passes.decode_requests) * work.flops_per_row
        + passes.prefill_pairs * work.flops_per_pair
    )
    moved = (
        passes.decode_kv_tokens + passes.prefill_new_tokens + passes.prefill_prefix_tokens
    ) * work.kv_bytes_per_token
    features = np.stack([np.ones(len(compute)), compute, moved], axis=1)
    scale = np.maximum(features.max(axis=0), _NEGLIGIBLE)
    relative = features / scale / latency_ms[:, None]
    slopes = nnls(relative, np.ones(len(latency_ms)))[0] / scale
    guess = 1e3 / max(float(slopes[1]), _NEGLIGIBLE)
    streaming = 1e3 / float(slopes[2]) if slopes[2] > 0.0 else guess / 4.0
    return flops or guess, bytes_per_s or streaming, False


class _Evaluator:
    """From the fitted vector to coefficients, and to the law's times of the passes."""

    def __init__(
        self, bench: Bench, passes: PassColumns, names: list[str], priors: dict[str, Prior]
    ) -> None:
        self.work, self.engine, self.names = bench.work, bench.engine, names
        self.logit = np.array([priors[name].scale == "logit" for name in names])
        prompts, decodes = passes.prefill_new_tokens > 0, passes.decode_requests > 0
        self.groups = [prompts & ~decodes, decodes & ~prompts, prompts & decodes]
        self.parts = [passes.take(group) for group in self.groups]
        visible = 1.0 if bench.model_class == "affine" else 0.0
        self.rest = dict.fromkeys(Coefficients.__struct_fields__, 0.0) | {
            "decode_ramp_tokens": 1.0,
            "linear_overlap": visible,
            "attention_overlap": visible,
        }

    def coefficients(self, theta: FloatArray) -> Coefficients:
        """The document's coefficients of a fitted vector."""
        bounded = np.clip(theta, -700.0, 700.0)
        values = np.where(self.logit, 1.0 / (1.0 + np.exp(-bounded)), np.exp(bounded))
        return Coefficients(**self.rest | dict(zip(self.names, values.tolist(), strict=True)))

    def __call__(self, theta: FloatArray) -> FloatArray:
        """The law's time of every pass."""
        law = Law(self.work, self.coefficients(theta), self.engine)
        return law_times(law, self.groups, self.parts)


def law_times(law: Law, groups: list[BoolArray], parts: list[PassColumns]) -> FloatArray:
    """The bare law of passes split into prompts only, decodes only, both."""
    times = np.empty(len(groups[0]))
    prompts, decodes, mixed = parts
    if len(prompts.prefill_pairs):
        times[groups[0]] = law.prefill_ms(*prompts[:4], ARRAYS)
    if len(decodes.prefill_pairs):
        effective = law.effective_kv(*decodes[4:])
        times[groups[1]] = law.decode_ms(decodes[4], effective, ARRAYS)
    if len(mixed.prefill_pairs):
        effective = law.effective_kv(*mixed[4:])
        times[groups[2]] = law.mixed_ms(*mixed[:5], effective, mixed[6], ARRAYS)
    return times
