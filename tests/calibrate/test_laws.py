"""Fitting the law: what it finds, what it refuses, and how it does without a datasheet."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from passtime.calibrate.laws import Bench, fit_law, law_times, unphysical
from passtime.calibrate.log import Batch
from passtime.calibrate.points import columns, latencies, measured_point, sigmas
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import Coefficients, EngineFacts, MeasuredPoint, ModelClass
from passtime.profiles.law import Law
from passtime.profiles.shapes import load_model
from passtime.sched.timing import FloatArray

GPU = DeviceFacts(
    kind="cuda", name="imaginary", memory_bytes=2**36, peak_flops=9e14, peak_bytes_per_s=3e12
)
CPU = DeviceFacts(kind="cpu", name="imaginary", memory_bytes=2**34)
MODEL = load_model("llama-3.1-8b")

TRUTH = Coefficients(
    launch_ms=0.8,
    linear_flops_per_s=6e14,
    weight_bytes_per_s=2.4e12,
    linear_overlap=0.2,
    token_ms=0.002,
    tile_share=0.0,
    attention_flops_per_s=4e14,
    prefill_kv_bytes_per_s=2e12,
    attention_overlap=0.1,
    decode_kv_bytes_per_s=2.5e12,
    decode_ramp_ms=0.1,
    decode_ramp_tokens=5000.0,
    prefill_request_ms=0.02,
    decode_request_ms=0.01,
    row_ms_per_token=1e-5,
    row_overlap=0.3,
    mixed_ms=0.3,
    mixed_request_ms=0.02,
    mixed_kv_ms=2e-5,
    mixed_request_kv_ms=1e-7,
)


def bench(device: DeviceFacts = GPU, model_class: ModelClass = "step") -> Bench:
    return Bench(model=MODEL, engine=EngineFacts(), device=device, model_class=model_class)


def batches(count: int = 150, seed: int = 3) -> list[Batch]:
    rng = random.Random(seed)

    def size(low: float, high: float) -> int:
        return round(low * (high / low) ** rng.random())

    found = []
    for number in range(count):
        prompts = ((size(16, 4096), rng.choice([0, size(16, 8192)])),) * rng.randint(1, 3)
        decodes = (size(16, 8192),) * size(1, 200)
        found.append(
            Batch(
                prefill=prompts if number % 3 != 1 else (),
                decode=decodes if number % 3 != 0 else (),
            )
        )
    return found


def true_times(points: list[MeasuredPoint], truth: Coefficients = TRUTH) -> FloatArray:
    passes = columns(points)
    prompts, decodes = passes.prefill_new_tokens > 0, passes.decode_requests > 0
    groups = [prompts & ~decodes, decodes & ~prompts, prompts & decodes]
    law = Law(bench().work, truth, EngineFacts())
    return law_times(law, groups, [passes.take(group) for group in groups])


def measured(noise: float = 0.0, truth: Coefficients = TRUTH) -> list[MeasuredPoint]:
    points = [measured_point(batch, 1.0, [1.0]) for batch in batches()]
    times = true_times(points, truth) * np.random.default_rng(0).lognormal(0, noise, len(points))
    return [
        msgspec.structs.replace(point, latency_ms=float(time))
        for point, time in zip(points, times, strict=True)
    ]


def fitted(points: list[MeasuredPoint], which: Bench | None = None) -> Coefficients:
    which = which or bench()
    return fit_law(which, columns(points), latencies(points), sigmas(points)).coefficients


def error(points: list[MeasuredPoint], coefficients: Coefficients) -> float:
    return float(np.abs(true_times(points, coefficients) / latencies(points) - 1).mean())


def test_known_coefficients_are_found_again() -> None:
    found = fitted(measured())
    for name in (
        "linear_flops_per_s",
        "weight_bytes_per_s",
        "attention_flops_per_s",
        "decode_kv_bytes_per_s",
    ):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.1)
    assert error(measured(), found) < 0.005


def test_noise_and_outliers_hardly_move_the_law() -> None:
    points = measured(noise=0.01)
    spoilt = [
        msgspec.structs.replace(point, latency_ms=point.latency_ms * (3.0 if n % 25 == 0 else 1.0))
        for n, point in enumerate(points)
    ]
    assert error(measured(), fitted(spoilt)) < 0.02


def test_a_constant_gap_between_passes_is_found_as_overhead() -> None:
    gap = msgspec.structs.replace(TRUTH, launch_ms=TRUTH.launch_ms + 3.0)
    without, with_gap = fitted(measured()), fitted(measured(truth=gap))
    assert with_gap.launch_ms - without.launch_ms == pytest.approx(3.0, rel=0.1)
    assert with_gap.linear_flops_per_s == pytest.approx(without.linear_flops_per_s, rel=0.05)


def test_efficiencies_stay_below_one_where_the_data_allow_it() -> None:
    assert unphysical(fitted(measured(noise=0.02)), bench()) == []


def test_times_faster_than_the_device_are_told_by_name() -> None:
    points = [
        msgspec.structs.replace(point, latency_ms=point.latency_ms / 4) for point in measured()
    ]
    faults = unphysical(fitted(points), bench())
    assert any(fault.startswith("linear_flops_per_s") for fault in faults)
    assert all("an efficiency above 1" in fault for fault in faults)


def test_fp8_linear_layers_may_run_at_twice_the_peak() -> None:
    fp8 = msgspec.structs.replace(MODEL, linear_dtype="float8_e4m3")
    fast = msgspec.structs.replace(TRUTH, linear_flops_per_s=1.5e15)
    assert unphysical(fast, bench()) != []
    assert unphysical(fast, Bench(model=fp8, engine=EngineFacts(), device=GPU)) == []


def test_without_known_peaks_the_data_set_the_scale() -> None:
    slow = msgspec.structs.replace(
        TRUTH,
        linear_flops_per_s=5e10,
        weight_bytes_per_s=2e10,
        attention_flops_per_s=3e10,
        prefill_kv_bytes_per_s=1e10,
        decode_kv_bytes_per_s=1e10,
    )
    points = measured(truth=slow)
    found = fitted(points, bench(CPU))
    assert unphysical(found, bench(CPU)) == []
    assert error(points, found) < 0.02
    assert found.linear_flops_per_s == pytest.approx(5e10, rel=0.3)


def test_the_affine_law_only_adds() -> None:
    found = fitted(measured(), bench(model_class="affine"))
    assert found.linear_overlap == found.attention_overlap == 1.0
    assert found.decode_ramp_ms == found.row_ms_per_token == found.mixed_request_kv_ms == 0.0


def test_every_coefficient_is_positive_and_finite() -> None:
    for device in (GPU, CPU):
        values = msgspec.structs.astuple(fitted(measured(noise=0.3), bench(device)))
        assert all(math.isfinite(value) and value >= 0.0 for value in values)


def test_unequal_lengths_are_fitted_only_where_they_were_measured() -> None:
    assert fitted(measured()).decode_skew == 0.0
    uneven = [Batch(decode=(100,) * n + (9000,)) for n in range(3, 60)] + batches()
    points = [measured_point(batch, 1.0, [1.0]) for batch in uneven]
    truth = msgspec.structs.replace(TRUTH, decode_skew=0.2)
    times = true_times(points, truth)
    points = [
        msgspec.structs.replace(point, latency_ms=float(time))
        for point, time in zip(points, times, strict=True)
    ]
    assert fitted(points).decode_skew == pytest.approx(0.2, abs=0.05)
