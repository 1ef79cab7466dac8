"""What serves a workload: one pool of workers that do all, or a prefill and a decode pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from passtime.sched.config import LaunchConfig
from passtime.sched.replay.outcome import Outcome
from passtime.sched.simulate import ReplayOptions, replay, replay_pools
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Disaggregated serving: prefill workers hand every request over to decode workers (R-40)."""

    prefill: LaunchConfig
    decode: LaunchConfig


Deployment: TypeAlias = LaunchConfig | Pools

# A timing model is built for the pool that asks it: "config" says something else in each file.
Timing: TypeAlias = Callable[[LaunchConfig], TimingModel]


def launches(deployment: Deployment) -> tuple[LaunchConfig, ...]:
    """The configuration of every pool, prefill before decode."""
    if isinstance(deployment, Pools):
        return (deployment.prefill, deployment.decode)
    return (deployment,)


def replay_on(
    deployment: Deployment,
    workload: Workload,
    timing: Timing,
    options: ReplayOptions | None = None,
) -> Outcome:
    """Replay ``workload``, every pool under the model that ``timing`` builds for it.

    Raises as :func:`passtime.sched.simulate.replay` does.
    """
    if isinstance(deployment, Pools):
        prefill, decode = deployment.prefill, deployment.decode
        return replay_pools(workload, (prefill, timing(prefill)), (decode, timing(decode)), options)
    return replay(workload, deployment, timing(deployment), options)
