"""The one call: a workload, a configuration and a timing model become an outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from passtime.errors import ConfigError
from passtime.sched.config import LaunchConfig
from passtime.sched.lockstep.replay import replay_lockstep, supports
from passtime.sched.replay.arrivals import Arrivals, ClosedLoopArrivals, TraceArrivals
from passtime.sched.replay.driver import AggregatedReplay
from passtime.sched.replay.outcome import Outcome
from passtime.sched.replay.pools import PooledReplay
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to replay a workload.

    ``num_workers`` is of one pool of aggregated workers, the other two of a prefill and a decode
    pool. ``concurrency`` None is the open loop of R-20, else the closed loop of R-21. ``core``
    chooses between the literal core and the lock-step one; "auto" takes the latter where it is
    exact.
    """

    concurrency: int | None = None
    num_workers: int = 1
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    arrival_speedup_ratio: float = 1.0
    max_sim_time_ms: float | None = None
    capture_admissions: bool = False
    core: Literal["auto", "literal", "lockstep"] = "auto"

    def __post_init__(self) -> None:
        """Refuse what R-24 refuses."""
        for name in ("num_workers", "num_prefill_workers", "num_decode_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"replay concurrency must be at least 1, got {self.concurrency}")
        limit = self.max_sim_time_ms
        if limit is not None and not (math.isfinite(limit) and limit >= 0):
            raise ConfigError(f"max_sim_time_ms must be finite and non-negative, got {limit}")

    def arrivals(self, workload: Workload) -> Arrivals:
        """Where the replay's requests come from."""
        if self.concurrency is not None:
            return ClosedLoopArrivals(workload, concurrency=self.concurrency)
        return TraceArrivals(workload, speedup_ratio=self.arrival_speedup_ratio)


def replay(
    workload: Workload,
    launch: LaunchConfig,
    timing: TimingModel,
    options: ReplayOptions | None = None,
) -> Outcome:
    """Replay a workload through aggregated workers (R-1 … R-23).

    Raises ConfigError or TraceError for inputs that cannot be replayed, RunError if the run
    cannot finish.
    """
    options = options or ReplayOptions()
    worker_type = launch.engine.worker_type
    if worker_type != "aggregated":
        raise ConfigError(
            f"offline replay of one pool needs aggregated workers, got worker_type={worker_type}"
        )
    in_step = options.core != "literal" and supports(launch, workload, options)
    if options.core == "lockstep" and not in_step:
        raise ConfigError("the lock-step core is not exact for this configuration: use core auto")
    if in_step:
        return replay_lockstep(
            workload,
            launch,
            timing,
            concurrency=options.concurrency,
            arrival_speedup_ratio=options.arrival_speedup_ratio,
            max_sim_time_ms=options.max_sim_time_ms,
            capture_admissions=options.capture_admissions,
            num_workers=options.num_workers,
        )
    return AggregatedReplay(
        workload,
        launch,
        timing,
        arrivals=options.arrivals(workload),
        num_workers=options.num_workers,
        max_sim_time_ms=options.max_sim_time_ms,
        capture_admissions=options.capture_admissions,
    ).run()


def replay_pools(
    workload: Workload,
    prefill: tuple[LaunchConfig, TimingModel],
    decode: tuple[LaunchConfig, TimingModel],
    options: ReplayOptions | None = None,
) -> Outcome:
    """Replay a workload through a prefill pool and a decode pool (R-40 … R-45).

    Raises as :func:`replay` does.
    """
    options = options or ReplayOptions()
    for (launch, _), wanted in ((prefill, "prefill"), (decode, "decode")):
        if launch.engine.worker_type != wanted:
            raise ConfigError(
                f"the {wanted} pool of a replay needs worker_type={wanted}, "
                f"got {launch.engine.worker_type}"
            )
    backends = (prefill[0].engine.backend, decode[0].engine.backend)
    if backends[0] != backends[1]:
        raise ConfigError(f"both pools need the same backend, got {backends[0]} and {backends[1]}")
    return PooledReplay(
        workload,
        (*prefill, options.num_prefill_workers),
        (*decode, options.num_decode_workers),
        arrivals=options.arrivals(workload),
        max_sim_time_ms=options.max_sim_time_ms,
        capture_admissions=options.capture_admissions,
    ).run()
