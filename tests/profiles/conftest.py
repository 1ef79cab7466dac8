"""A profile fitted to an imaginary GPU: curved, with a switch of kernels, and 1 % noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from passtime.calibrate.core import fit_core
from passtime.calibrate.fit import fit_profile
from passtime.calibrate.laws import Bench
from passtime.calibrate.log import Batch
from passtime.calibrate.points import measured_point
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import EngineFacts, MeasuredPoint, Profile, Provenance
from passtime.profiles.predict import Predictor
from passtime.profiles.provider import ProfileTiming
from passtime.profiles.shapes import load_model

GPU = DeviceFacts(
    kind="cuda",
    name="imaginary GPU",
    memory_bytes=80 * 2**30,
    peak_flops=9e14,
    peak_bytes_per_s=3e12,
    processors=132,
    l2_bytes=50 * 2**20,
)


def imaginary_ms(batch: Batch) -> float:
    """What a pass of an 8B model takes there."""
    new = sum(chunk for chunk, _ in batch.prefill)
    pairs = sum(chunk * prefix + chunk * (chunk + 1) / 2 for chunk, prefix in batch.prefill)
    decodes, kv_tokens = len(batch.decode), sum(batch.decode)
    compute, weights = (new + decodes) * 0.026, 6.2
    time = 0.4 + (compute**3 + weights**3) ** (1 / 3) + pairs * 1.1e-6 + kv_tokens * 5.2e-5
    time *= 1.08 if 128 < new < 512 else 1.0
    return (
        time * (1.15 if new and decodes > 16 else 1.0) + 0.01 * decodes + 0.03 * len(batch.prefill)
    )


def imaginary_points(seed: int = 1, count: int = 120) -> list[MeasuredPoint]:
    """Measurements of it: prompts, decodes, both."""
    rng = random.Random(seed)

    def log_uniform(low: float, high: float) -> int:
        return round(low * (high / low) ** rng.random())

    points = []
    for number in range(count):
        prompts = number % 3 != 1
        decodes = number % 3 != 0
        batch = Batch(
            prefill=tuple(
                (log_uniform(16, 2048), rng.choice([0, log_uniform(16, 8192)]))
                for _ in range(rng.randint(1, 3))
            )
            if prompts
            else (),
            decode=(log_uniform(16, 8192),) * log_uniform(1, 128) if decodes else (),
        )
        samples = [imaginary_ms(batch) * rng.lognormvariate(0.0, 0.01) for _ in range(7)]
        points.append(
            measured_point(batch, sorted(samples)[3], samples, held_out=number % 15 == 14)
        )
    return points


@pytest.fixture(scope="session")
def fit_to() -> Callable[[str, EngineFacts], Predictor]:
    """``fit_to(model, engine)``: the same measurements taken for those of another stack."""

    def fit(model: str, engine: EngineFacts) -> Predictor:
        bench = Bench(model=load_model(model), engine=engine, device=GPU)
        return fit_core(bench, imaginary_points()).predictor()

    return fit


@pytest.fixture(scope="session")
def fitted() -> Profile:
    """A profile with residual, errors, intervals."""
    bench = Bench(model=load_model("llama-3.1-8b"), engine=EngineFacts(), device=GPU)
    return fit_profile(
        bench,
        imaginary_points(),
        name="imaginary",
        provenance=Provenance(made_by="a test", timed="nothing"),
        source="test",
    )


@pytest.fixture(scope="session")
def timing(fitted: Profile) -> ProfileTiming:
    """The fitted profile as a timing model."""
    return ProfileTiming(fitted)
