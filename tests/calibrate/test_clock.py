"""The clock tells the truth on devices that do their best to hide it."""

import random
from collections.abc import Callable
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.calibrate.clock import (
    CPU_POLICY,
    ClockPolicy,
    Sampled,
    median_interval,
    relative_half_width,
    sample_visit,
)
from passtime.calibrate.log import Batch
from passtime.calibrate.runners.simulated import (
    BASE_MHZ,
    Faults,
    SimulatedGpu,
    SimulatedTime,
    Window,
)
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import load_model

FACTS = DeviceFacts(kind="cuda", name="Simulated", memory_bytes=2**36)
WORK = Batch(decode=(100,))
POLICY = ClockPolicy()


def gpu(truth_s: float, *, seed: int = 0, **faults: object) -> SimulatedGpu:
    return SimulatedGpu(
        facts=FACTS,
        model=load_model("tiny"),
        truth_s=lambda batch: truth_s,
        faults=msgspec.convert(faults, Faults),
        seed=seed,
    )


def visit(device: SimulatedGpu, policy: ClockPolicy = POLICY, seconds: float = 60.0) -> Sampled:
    return sample_visit(device, WORK, policy, deadline=device.now() + seconds)


class Counting:
    """Remembers the numbers of repetitions that were asked of a device."""

    def __init__(self, device: SimulatedGpu) -> None:
        self.telemetry, self.now, self.sleep = device.telemetry, device.now, device.sleep
        self._replay = device.replay
        self.inners: set[int] = set()

    def replay(self, work: Batch, inner: int) -> float:
        self.inners.add(inner)
        return self._replay(work, inner)


def error(sampled: Sampled, truth_s: float) -> float:
    return median(sampled.samples_ms) / (1e3 * truth_s) - 1


# --- Statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["gauss", "lognormal", "spikes"])
@pytest.mark.parametrize("count", [6, 15, 40])
def test_the_interval_holds_the_median_as_often_as_it_says(distribution: str, count: int) -> None:
    rng = random.Random(count)
    draw: Callable[[], float] = {
        "gauss": lambda: rng.gauss(0, 1),
        "lognormal": lambda: rng.lognormvariate(0, 1) - 1,
        "spikes": lambda: rng.uniform(-1, 1) if rng.random() < 0.8 else rng.choice((-50, 50)),
    }[distribution]
    hits = 0
    for _ in range(2000):
        low, high = median_interval([draw() for _ in range(count)])
        hits += low <= 0 <= high
    assert hits / 2000 >= 0.94


def test_five_samples_are_too_few_for_any_interval() -> None:
    assert relative_half_width([1.0] * 5) == float("inf")
    assert relative_half_width([1.0] * 6) == 0.0


def test_equal_readings_of_a_coarse_clock_are_no_proof() -> None:
    assert relative_half_width([1.0] * 50, resolution=0.1) == pytest.approx(0.05)


@given(st.lists(st.floats(0.1, 10.0), min_size=6, max_size=60))
def test_the_interval_consists_of_samples_around_the_median(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert low in samples
    assert high in samples
    assert low <= median(samples) <= high


# --- One visit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth_s", [2.2e-6, 9e-4, 3e-2])
@pytest.mark.parametrize("seed", range(3))
def test_short_and_long_passes_are_recovered_from_cold_clocks_and_stalls(
    truth_s: float, seed: int
) -> None:
    sampled = visit(gpu(truth_s, seed=seed))
    assert sampled.stop == "converged"
    assert abs(error(sampled, truth_s)) < 0.012
    assert len(sampled.samples_ms) >= POLICY.visit_samples


def test_a_pass_shorter_than_a_tick_is_repeated_within_a_sample() -> None:
    sampled = visit(gpu(2e-7, noise=0.0, stall_share=0.0))
    assert sampled.clocks["inner"] >= POLICY.ticks
    assert abs(error(sampled, 2e-7)) < 0.005


def test_few_numbers_of_repetitions_are_tried_for_each_may_cost_a_capture() -> None:
    device = Counting(gpu(1.1e-5, noise=0.01))
    sampled = sample_visit(device, WORK, POLICY, deadline=60.0)
    assert sampled.stop == "converged"
    assert len(device.inners) <= 3


def test_samples_taken_while_throttling_are_dropped_for_that_cause() -> None:
    window = Window(start_s=0.201, end_s=0.5, speed=0.6, admitted=True)
    sampled = visit(gpu(9e-4, windows=[window]))
    assert sampled.clocks["discarded"] > 0
    assert abs(error(sampled, 9e-4)) < 0.012
    assert sampled.stop == "converged"


def test_a_device_that_never_stops_throttling_ends_the_visit_and_says_so() -> None:
    window = Window(start_s=0.0, end_s=1e9, speed=0.6, admitted=True)
    sampled = visit(gpu(9e-4, windows=[window]), seconds=1000.0)
    assert sampled.stop == "throttled"
    assert sampled.samples_ms == ()
    assert sampled.flags[-1] == "throttled"


def test_a_power_cap_is_how_the_board_runs_kept_and_flagged() -> None:
    sampled = visit(gpu(9e-4, capped=True))
    assert sampled.stop == "converged"
    assert "power_cap" in sampled.flags
    assert "discarded" not in sampled.clocks


def test_nothing_is_dropped_by_its_value() -> None:
    """P30: [1, 1, 1, 1, 50] has the median 1, and 50 stays in the log."""
    sampled = visit(gpu(1e-3, noise=0.0, stall_share=0.2, stall_s=0.049))
    assert max(sampled.samples_ms) > 40
    assert abs(error(sampled, 1e-3)) < 0.01


def test_noise_that_never_settles_ends_in_time_and_is_recorded() -> None:
    """P17: 30 % noise on 5 µs."""
    device = gpu(5e-6, noise=0.3)
    sampled = visit(device, msgspec.structs.replace(POLICY, rel_ci=0.0001))
    assert sampled.stop in ("max_samples", "max_time")
    assert "noisy" in sampled.flags
    assert sampled.clocks["rel_ci"] > 0.0001
    assert device.now() < 3.0


def test_a_visit_ends_at_its_deadline() -> None:
    device = gpu(3e-2)
    sampled = visit(device, seconds=0.3)
    assert device.now() < 0.3 + 2 * 0.06
    assert sampled.stop == "max_time"
    assert "cut_short" in sampled.flags


def test_a_visit_without_any_time_has_no_samples() -> None:
    sampled = visit(gpu(1e-3), seconds=0.0)
    assert sampled.samples_ms == ()
    assert sampled.stop == "max_time"


def test_a_clock_that_moves_within_a_visit_is_flagged() -> None:
    window = Window(start_s=0.3, end_s=9.0, speed=0.9, admitted=False)
    sampled = visit(gpu(2e-2, windows=[window]))
    assert "clock_moved" in sampled.flags
    assert 0.9 * BASE_MHZ <= sampled.clocks["sm_mhz"] <= BASE_MHZ


def test_the_cpu_policy_takes_one_sample_of_a_long_pass_and_more_of_a_short_one() -> None:
    long = sample_visit(gpu(0.1), WORK, CPU_POLICY, deadline=60.0, expected_s=0.1)
    short = sample_visit(gpu(1e-3, ramp_s=0.0), WORK, CPU_POLICY, deadline=60.0)
    assert len(long.samples_ms) == 1
    assert 5 <= len(short.samples_ms) <= 12


def test_a_long_pass_that_was_seen_before_is_not_warmed_up_again() -> None:
    device = gpu(0.1, ramp_s=0.0)
    before = device.now()
    sample_visit(device, WORK, CPU_POLICY, deadline=60.0, expected_s=0.1)
    assert device.now() - before < 0.15


@settings(deadline=None, max_examples=60)
@given(
    truth_s=st.floats(1e-6, 2e-2),
    noise=st.floats(0, 0.02),
    stall_share=st.floats(0, 0.2),
    ramp_s=st.floats(0, 0.15),
    start_s=st.floats(0, 0.5),
    length_s=st.floats(0, 0.5),
    speed=st.floats(0.3, 0.95),
    seed=st.integers(0, 2**16),
)
def test_admitted_disturbances_never_reach_the_median(
    truth_s: float,
    noise: float,
    stall_share: float,
    ramp_s: float,
    start_s: float,
    length_s: float,
    speed: float,
    seed: int,
) -> None:
    window = Window(start_s=start_s, end_s=start_s + length_s, speed=speed, admitted=True)
    device = gpu(
        truth_s,
        seed=seed,
        noise=noise,
        stall_share=stall_share,
        ramp_s=ramp_s,
        windows=[window],
    )
    sampled = visit(device, seconds=20.0)
    assert device.now() < 20.1
    stalls = stall_share * 3e-4 / max(truth_s, POLICY.tick_s * POLICY.ticks)
    assert POLICY.rel_ci is not None
    if sampled.stop == "converged":
        assert -0.005 < error(sampled, truth_s) < POLICY.rel_ci + 1.5 * noise + stalls


def test_a_fresh_runner_goes_on_in_the_same_time() -> None:
    time = SimulatedTime(now_s=5.0)
    device = SimulatedGpu(
        facts=FACTS, model=load_model("tiny"), truth_s=lambda batch: 1e-3, time=time
    )
    assert device.reopened().now() == 6.0
