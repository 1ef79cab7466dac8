"""The clock: how one visit of a point is sampled, and when a sample may be believed.

Pure Python against an injected device, so that every rule is tested on a simulated one. The
rules: warm up; repeat a short pass until a sample is long against the event resolution; take
samples until a distribution-free interval of the median is narrow; drop nothing by its value;
drop what was sampled while the hardware throttled, wait, and try again; watch a reference pass
for drift; stop in time; always say why it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, comb, inf, isinf
from statistics import median
from typing import Any, Protocol

from msgspec import Struct

from passtime.calibrate.log import StopReason

# NVML clocks event reasons. These four mean that the hardware is not itself: discard. The
# software power cap is how the board always runs under load: keep, and flag.
SW_POWER_CAP = 0x4
HW_SLOWDOWN = 0x8
SW_THERMAL = 0x20
HW_THERMAL = 0x40
HW_POWER_BRAKE = 0x80
DISTURBED = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL | HW_POWER_BRAKE

BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 0.4


class Telemetry(Struct, frozen=True, kw_only=True):
    """What a device says about itself at one moment; None where it does not say."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    reasons: int = 0
    flags: tuple[str, ...] = ()


class ClockedDevice(Protocol):
    """What the clock needs of a device."""

    def replay(self, work: Any, inner: int) -> float:
        """Seconds, by the device's own clock, of ``inner`` passes back to back."""
        ...

    def telemetry(self) -> Telemetry:
        """Clocks, temperature, power and throttle reasons now."""
        ...

    def now(self) -> float:
        """Seconds of a monotonic clock: what budgets are counted in."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        ...


class ClockPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How samples are taken. The defaults are for CUDA events and graphs; see ``CPU_POLICY``.

    Of a visit: ``warm_s`` and ``warm_replays`` before the first sample; ``tick_s``, the clock's
    resolution, and ``ticks`` that a sample has to last; ``visit_samples`` in ``min_visit_s``
    at least, and as many more as bring the relative half-width of the median's interval to
    ``rel_ci``, capped by ``max_samples`` and ``max_visit_s``; ``throttle_retries`` disturbed
    samples end it.

    Of a session: ``rounds``, each point being visited in ``min_rounds`` of them at least;
    a reference pass every ``reference_every`` points, None for never; a reference that moved by
    ``drift_tol`` repeats the points since the last one, ``drift_retries`` times; one that moved
    by ``unsteady_tol`` flags them; an SM clock ``clock_tol`` under its regime's median flags a
    visit. Warming up lasts until three medians of ``settle_step_s`` agree to ``settle_tol``.
    """

    warm_s: float = 0.2
    warm_replays: int = 3
    tick_s: float = 0.5e-6
    ticks: int = 400
    visit_samples: int = 6
    min_visit_s: float = 0.0
    max_samples: int = 400
    max_visit_s: float = 1.0
    rel_ci: float | None = 0.01
    throttle_retries: int = 20
    rounds: int = 3
    min_rounds: int = 3
    reference_every: int | None = 8
    reference_rel_ci: float = 0.005
    drift_tol: float = 0.02
    unsteady_tol: float = 0.01
    drift_retries: int = 3
    clock_tol: float = 0.03
    idle_s: float = 5.0
    burst_s: float = 0.1
    settle_step_s: float = 1.0
    settle_tol: float = 0.01
    settle_min_s: float = 5.0
    settle_max_s: float = 30.0

    def visit_s(self, pass_s: float) -> float:
        """About how long a visit of a pass takes, without making it ready."""
        sample_s = max(pass_s, self.tick_s * self.ticks)
        replays = max(self.warm_replays, ceil(self.warm_s / pass_s) if pass_s < self.warm_s else 0)
        return replays * pass_s + max(self.visit_samples * sample_s, self.min_visit_s)


# Thread CPU time has no ticks, and there are no clocks to watch: many short visits, each in
# another round, are worth more than many samples in one. Only short passes need warm caches.
CPU_POLICY = ClockPolicy(
    warm_s=0.01,
    warm_replays=0,
    tick_s=0.0,
    ticks=0,
    visit_samples=1,
    min_visit_s=0.01,
    rel_ci=None,
    rounds=60,
    min_rounds=3,
    reference_every=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A visit's outcome: samples in ms per pass, why it stopped, and what is to be known of it."""

    samples_ms: tuple[float, ...]
    stop: StopReason
    flags: tuple[str, ...] = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)


# --- Statistics -----------------------------------------------------------------------------------


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval that holds the median of any distribution with at least ``confidence``.

    The k-th smallest and k-th largest sample, k as large as the binomial distribution allows.
    (-inf, inf) if there are too few samples for any such pair (below 6 at 95 %).
    """
    n = len(samples)
    tail, k = 0.0, 0
    while k < n:
        tail += comb(n, k) / 2**n
        if tail > (1 - confidence) / 2:
            break
        k += 1
    if k == 0:
        return -inf, inf
    ordered = sorted(samples)
    return ordered[k - 1], ordered[n - k]


def relative_half_width(samples: Sequence[float], resolution: float = 0.0) -> float:
    """Half the median's 95 % interval over the median; inf if there are too few samples.

    ``resolution``, in units of the samples, is the clock's: equal readings of a coarse clock do
    not make a sure median, so half of it is the least that is claimed.
    """
    low, high = median_interval(samples)
    if isinf(high):
        return inf
    return max((high - low) / 2, resolution / 2) / median(samples)


# --- One visit ------------------------------------------------------------------------------------


def sample_visit(
    device: ClockedDevice,
    work: Any,
    policy: ClockPolicy,
    *,
    deadline: float,
    expected_s: float | None = None,
) -> Sampled:
    """Sample one visit of ``work``, to end at ``deadline`` (of ``device.now()``) at the latest.

    ``expected_s`` is what a pass took before. Stops as ``converged`` once there are enough samples
    and they agree. ``max_samples``, ``max_time`` and ``throttled`` say that they do not, or did
    not get the time, and such a visit is flagged; one that got no time at all has no samples.
    """
    inner = _warm_up(device, work, policy, deadline, expected_s)
    resolution_ms = 1e3 * policy.tick_s / inner
    samples: list[float] = []
    seen = [device.telemetry()]
    discarded = 0
    started = device.now()
    stop: StopReason | None = None
    while stop is None:
        if device.now() >= deadline:
            stop = "max_time"
            break
        sample_ms = 1e3 * device.replay(work, inner) / inner
        seen.append(device.telemetry())
        if (seen[-2].reasons | seen[-1].reasons) & DISTURBED:
            discarded += 1
            if discarded > policy.throttle_retries:
                stop = "throttled"
            else:
                rest_s = min(BACK_OFF_S * discarded, MAX_BACK_OFF_S, deadline - device.now())
                device.sleep(max(0.0, rest_s))
                _warm_up(device, work, policy, deadline, None)
            continue
        samples.append(sample_ms)
        half_width = relative_half_width(samples, resolution_ms)
        stop = _why_stop(len(samples), half_width, device.now() - started, policy)
    return Sampled(
        samples_ms=tuple(samples),
        stop=stop,
        flags=_visit_flags(samples, seen, policy, stop),
        clocks=_summary(samples, seen, inner, discarded, resolution_ms),
    )


def _why_stop(
    samples: int, half_width: float, spent_s: float, policy: ClockPolicy
) -> StopReason | None:
    """Why to stop sampling now; None to go on."""
    enough = samples >= policy.visit_samples and spent_s >= policy.min_visit_s
    if enough and (policy.rel_ci is None or half_width <= policy.rel_ci):
        return "converged"
    if samples >= policy.max_samples:
        return "max_samples"
    if samples >= policy.visit_samples and spent_s >= policy.max_visit_s:
        return "max_time"
    return None


def _warm_up(
    device: ClockedDevice,
    work: Any,
    policy: ClockPolicy,
    deadline: float,
    expected_s: float | None,
) -> int:
    """Replay until warm; how many passes make a sample that is long against a tick.

    A pass that is known to last longer than warming up warms itself.
    """
    pass_s = inf if expected_s is None else expected_s
    inner = _inner(pass_s, policy, 1)
    if policy.warm_replays or not policy.warm_s <= pass_s < inf:
        started, replays = device.now(), 0
        while replays < policy.warm_replays or device.now() - started < policy.warm_s:
            if replays and device.now() >= deadline:
                break
            pass_s = min(pass_s, device.replay(work, inner) / inner)
            inner = _inner(pass_s, policy, inner)
            replays += 1
    return inner


def _inner(pass_s: float, policy: ClockPolicy, so_far: int) -> int:
    """How many passes make a sample that is long against a tick.

    Each number may be another graph to capture: what is only a quarter short is left as it is.
    """
    sample_s = policy.tick_s * policy.ticks
    if isinf(pass_s) or so_far * pass_s >= 0.75 * sample_s:
        return so_far
    return ceil(sample_s / max(pass_s, policy.tick_s))


def _visit_flags(
    samples: Sequence[float], seen: Sequence[Telemetry], policy: ClockPolicy, stop: StopReason
) -> tuple[str, ...]:
    flags = list(dict.fromkeys(flag for one in seen for flag in one.flags))
    if any(one.reasons & SW_POWER_CAP for one in seen):
        flags.append("power_cap")
    clocks = [one.sm_mhz for one in seen if one.sm_mhz is not None]
    if clocks and min(clocks) < (1 - policy.clock_tol) * max(clocks):
        flags.append("clock_moved")
    if stop == "throttled":
        flags.append("throttled")
    elif len(samples) < policy.visit_samples:
        flags.append("cut_short")
    elif stop != "converged":
        flags.append("noisy")
    return tuple(flags)


def _summary(
    samples: Sequence[float],
    seen: Sequence[Telemetry],
    inner: int,
    discarded: int,
    resolution_ms: float,
) -> dict[str, Any]:
    """Numbers of the visit that are no samples; unknown ones are left out."""
    facts: dict[str, Any] = {"inner": inner}
    if discarded:
        facts["discarded"] = discarded
    half_width = relative_half_width(samples, resolution_ms)
    if not isinf(half_width):
        facts["rel_ci"] = round(half_width, 5)
    for name in ("sm_mhz", "memory_mhz", "temperature_c", "power_w"):
        values = [value for one in seen if (value := getattr(one, name)) is not None]
        if values:
            facts[name] = median(values)
    reasons = 0
    for one in seen:
        reasons |= one.reasons
    if reasons:
        facts["reasons"] = reasons
    return facts
