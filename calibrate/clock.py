"""The clock: how one visit of a point is sampled, and when a sample may be believed.

Pure Python against an injected device, so that every rule is tested on a simulated one. The
rules: warm up; repeat a short pass until a sample is long against the event resolution; take
samples until a distribution-free interval of the median is narrow; drop nothing by its value;
drop what was sampled while the hardware throttled, wait, and try again; watch a reference pass
for drift; stop in time; always say why it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    resolution, and ``ticks`` that a sample has to last; ``visit_samples`` per visit, and in the
    last round as many more as bring the point to ``min_samples`` and the relative half-width of
    the median's interval to ``rel_ci``, capped by ``max_samples`` and ``max_visit_s``;
    ``throttle_retries`` disturbed samples end it.

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
    visit_samples: int = 5
    min_samples: int = 15
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
        warm_s = max(self.warm_s, self.warm_replays * pass_s)
        return warm_s + self.visit_samples * sample_s


# Thread CPU time has no ticks, no clocks to watch and no graph to warm: many single samples, each
# in another round, are worth more than many in one visit.
CPU_POLICY = ClockPolicy(
    warm_s=0.0,
    warm_replays=0,
    tick_s=0.0,
    ticks=0,
    visit_samples=1,
    min_samples=1,
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
        tail += math.comb(n, k) / 2**n
        if tail > (1 - confidence) / 2:
            break
        k += 1
    if k == 0:
        return -math.inf, math.inf
    ordered = sorted(samples)
    return ordered[k - 1], ordered[n - k]


def relative_half_width(samples: Sequence[float], resolution: float = 0.0) -> float:
    """Half the median's 95 % interval over the median; inf if there are too few samples.

    ``resolution``, in units of the samples, is the clock's: equal readings of a coarse clock do
    not make a sure median, so half of it is the least that is claimed.
    """
    low, high = median_interval(samples)
    if math.isinf(high):
        return math.inf
    return max((high - low) / 2, resolution / 2) / median(samples)


# --- One visit ------------------------------------------------------------------------------------


def sample_visit(
    device: ClockedDevice,
    work: Any,
    policy: ClockPolicy,
    *,
    deadline: float,
    earlier_ms: Sequence[float] = (),
    last_round: bool = False,
) -> Sampled:
    """Sample one visit of ``work``, to end at ``deadline`` (of ``device.now()``) at the latest.

    ``earlier_ms`` are the point's samples of earlier visits. Stops as ``converged`` once this
    visit has ``visit_samples``; in the last round only when all samples together are enough and
    agree. ``max_samples``, ``max_time`` and ``throttled`` say that they do not, or did not get
    the time; a visit that got no time at all has no samples.
    """
    inner = _warm_up(device, work, policy, deadline)
    resolution_ms = 1e3 * policy.tick_s / inner
    goal = policy.visit_samples
    if last_round:
        goal = max(goal, policy.min_samples - len(earlier_ms))
    samples: list[float] = []
    seen = [device.telemetry()]
    discarded = 0
    stop: StopReason | None = None
    started = device.now()
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
                _back_off(device, work, inner, discarded, deadline)
            continue
        samples.append(sample_ms)
        pooled = [*earlier_ms, *samples]
        sure = (
            not last_round
            or policy.rel_ci is None
            or relative_half_width(pooled, resolution_ms) <= policy.rel_ci
        )
        if len(samples) >= goal and sure:
            stop = "converged"
        elif len(samples) >= policy.max_samples:
            stop = "max_samples"
        elif len(samples) >= goal and device.now() - started >= policy.max_visit_s:
            stop = "max_time"
    return Sampled(
        samples_ms=tuple(samples),
        stop=stop,
        flags=_visit_flags(samples, seen, policy),
        clocks=_summary(samples, seen, inner, discarded),
    )


def _warm_up(device: ClockedDevice, work: Any, policy: ClockPolicy, deadline: float) -> int:
    """Replay until warm; how many passes make a sample that is long against a tick."""
    started = device.now()
    replays, pass_s = 0, math.inf
    while replays < policy.warm_replays or device.now() - started < policy.warm_s:
        if replays and device.now() >= deadline:
            break
        pass_s = min(pass_s, device.replay(work, 1))
        replays += 1
    if math.isinf(pass_s):
        return 1
    return max(1, math.ceil(policy.tick_s * policy.ticks / max(pass_s, policy.tick_s)))


def _back_off(
    device: ClockedDevice, work: Any, inner: int, discarded: int, deadline: float
) -> None:
    """Give a throttled device a rest, then wake it up again."""
    rest_s = min(BACK_OFF_S * discarded, MAX_BACK_OFF_S)
    device.sleep(max(0.0, min(rest_s, deadline - device.now())))
    if device.now() < deadline:
        device.replay(work, inner)


def _visit_flags(
    samples: Sequence[float], seen: Sequence[Telemetry], policy: ClockPolicy
) -> tuple[str, ...]:
    flags = [flag for flag in dict.fromkeys(f for one in seen for f in one.flags)]
    if any(one.reasons & SW_POWER_CAP for one in seen):
        flags.append("power_cap")
    clocks = [one.sm_mhz for one in seen if one.sm_mhz is not None]
    if clocks and min(clocks) < (1 - policy.clock_tol) * max(clocks):
        flags.append("clock_moved")
    half = len(samples) // 2
    if half >= 2 and abs(median(samples[half:]) / median(samples[:half]) - 1) > policy.drift_tol:
        flags.append("trend")
    return tuple(flags)


def _summary(
    samples: Sequence[float], seen: Sequence[Telemetry], inner: int, discarded: int
) -> dict[str, Any]:
    """Numbers of the visit that are no samples; unknown ones are left out."""
    facts: dict[str, Any] = {"inner": inner, "discarded": discarded}
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
