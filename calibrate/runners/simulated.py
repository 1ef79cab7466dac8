"""A simulated GPU: a runner whose truth is known, for trying rules of measuring and fitting.

It has what real ones have against them: event ticks, noise, clocks that ramp up after a rest and
sag under load, stalls, windows of throttling that it admits and of slowness that it does not,
and drivers that fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from passtime.calibrate.clock import HW_THERMAL, SW_POWER_CAP, Telemetry
from passtime.calibrate.log import Batch
from passtime.calibrate.runners import OutOfDeviceMemory, RunnerFailed
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape

TICK_S = 0.5e-6
LAUNCH_S = 5e-6
FALLS_ASLEEP_S = 0.5
BASE_MHZ = 1980.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From ``start_s`` to ``end_s`` the GPU runs at ``speed``; ``admitted`` by NVML or not."""

    start_s: float
    end_s: float
    speed: float
    admitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with the GPU.

    Noise is one-sided with that relative sigma; ``stall_share`` of samples take ``stall_s`` more;
    after rest the clock climbs from half to full in ``ramp_s`` of work; a cold board is faster by
    ``boost``, which fades over ``boost_s`` of work; at each of ``fails_at_s`` the driver fails.
    """

    noise: float = 0.005
    stall_share: float = 0.02
    stall_s: float = 3e-4
    ramp_s: float = 0.1
    boost: float = 0.0
    boost_s: float = 5.0
    windows: tuple[Window, ...] = ()
    fails_at_s: tuple[float, ...] = ()
    capped: bool = False


@dataclass(slots=True)
class SimulatedTime:
    """Time that only passes when somebody spends it; shared by runners opened one after another."""

    now_s: float = 0.0
    failures: list[float] = field(default_factory=list)


class SimulatedGpu:
    """A :class:`passtime.calibrate.runners.Runner` in simulated time.

    ``truth_s`` gives the undisturbed seconds of a pass on the warm device.
    """

    def __init__(
        self,
        *,
        facts: DeviceFacts,
        model: ModelShape,
        truth_s: Callable[[Batch], float],
        faults: Faults = Faults(),
        seed: int = 0,
        time: SimulatedTime | None = None,
    ) -> None:
        """A cold device. ``time`` continues that of a runner that failed."""
        self.facts = facts
        self.model = model
        self.software: Mapping[str, Any] = {"simulated": True}
        self.policy: Mapping[str, Any] = {
            "runner": "simulated GPU",
            "attention": "causal",
            "clock": "cuda_events",
            "dtype": model.dtype,
        }
        self.kernel_hash: str | None = None
        self._truth_s = truth_s
        self._faults = faults
        self._random = random.Random(seed)
        self._time = time or SimulatedTime(failures=sorted(faults.fails_at_s))
        self._awake = 0.0 if faults.ramp_s else 1.0
        self._worked_s = 0.0

    def memory_bytes(self, batch: Batch) -> int:
        """Weights and KV."""
        tokens = sum(new + prefix for new, prefix in batch.prefill) + sum(batch.decode)
        return self.model.weight_bytes + tokens * self.model.kv_bytes_per_token

    def prepare(self, batch: Batch) -> Batch:
        """Capturing takes a while."""
        self._pass(0.05)
        if self.memory_bytes(batch) > self.facts.memory_bytes:
            raise OutOfDeviceMemory("simulated memory is full")
        return batch

    def release(self, work: Batch) -> None:
        """Nothing was taken."""

    def facts_of(self, work: Batch) -> Mapping[str, Any]:
        """The truth."""
        return {"truth_ms": 1e3 * self._truth_s(work)} if work != Batch() else {}

    def checks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """One, which proves nothing."""
        yield "simulation", {"noise": self._faults.noise}

    def empty(self) -> Batch:
        """A batch of nothing."""
        return Batch()

    def replay(self, work: Batch, inner: int) -> float:
        """Event time: disturbed, and rounded to ticks."""
        if self._time.failures and self._time.now_s >= self._time.failures[0]:
            self._time.failures.pop(0)
            raise RunnerFailed("simulated driver failure")
        faults = self._faults
        one_s = self._truth_s(work) if work != Batch() else LAUNCH_S
        took_s = inner * one_s / self._speed() * (1 + abs(self._random.gauss(0, faults.noise)))
        if self._random.random() < faults.stall_share:
            took_s += faults.stall_s
        if faults.ramp_s:
            self._awake = min(1.0, self._awake + took_s / faults.ramp_s)
        self._worked_s += took_s
        self._time.now_s += took_s + LAUNCH_S
        return max(1, round(took_s / TICK_S)) * TICK_S

    def telemetry(self) -> Telemetry:
        """Clock and reasons of this moment."""
        admitted = any(window.admitted for window in self._windows())
        reasons = (HW_THERMAL if admitted else 0) | (SW_POWER_CAP if self._faults.capped else 0)
        return Telemetry(sm_mhz=BASE_MHZ * self._speed(), temperature_c=60.0, reasons=reasons)

    def now(self) -> float:
        """Simulated seconds."""
        return self._time.now_s

    def sleep(self, seconds: float) -> None:
        """Clocks fall while the device rests."""
        self._pass(seconds)

    def close(self) -> None:
        """Nothing is held."""

    def reopened(self) -> SimulatedGpu:
        """A fresh runner after a failure, later by the time that starting takes."""
        self._pass(1.0)
        return SimulatedGpu(
            facts=self.facts,
            model=self.model,
            truth_s=self._truth_s,
            faults=self._faults,
            seed=self._random.getrandbits(32),
            time=self._time,
        )

    def _pass(self, seconds: float) -> None:
        self._time.now_s += seconds
        if self._faults.ramp_s:
            self._awake = max(0.0, self._awake - seconds / FALLS_ASLEEP_S)

    def _windows(self) -> Sequence[Window]:
        now_s = self._time.now_s
        return [w for w in self._faults.windows if w.start_s <= now_s < w.end_s]

    def _speed(self) -> float:
        faults = self._faults
        speed = 0.5 + 0.5 * self._awake
        speed *= 1 + faults.boost * max(0.0, 1 - self._worked_s / faults.boost_s)
        for window in self._windows():
            speed *= window.speed
        return speed
