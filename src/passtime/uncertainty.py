"""What a profile's intervals mean for a report: the workload replayed under draws of the model."""

from __future__ import annotations

import numpy as np

from passtime.deployment import Timing, replay_on
from passtime.errors import InputError
from passtime.profiles.document import load_profile
from passtime.profiles.draws import draws
from passtime.profiles.provider import Composition, ProfileTiming
from passtime.replay_inputs import ReplayInputs
from passtime.sched.config import ExternalConfig, LaunchConfig
from passtime.sched.replay.report import FigureIntervals, FigureRange, Value, summary
from passtime.sched.timing import TimingModel
from passtime.timing_spec import EngineTiming, ProfileSpec, parse_timing


def uncertainty(
    inputs: ReplayInputs,
    timing: str,
    *,
    count: int,
    seed: int,
) -> FigureIntervals:
    """Replay ``inputs`` under ``count`` draws of the profile that ``timing`` names.

    Every latency and throughput of the summary that is defined in all replays gets its range.
    Raises InputError if ``timing`` is no profile with intervals, or ``count`` below 2.
    """
    if count < 2:
        raise InputError(f"intervals take at least 2 replays, got {count}")
    name, composition = _profile_of(timing, inputs)
    profile = load_profile(name)
    samples: list[dict[str, Value]] = []
    for draw in draws(profile, count, seed=seed):
        model = _always(ProfileTiming(draw, composition=composition))
        outcome = replay_on(inputs.deployment, inputs.workload, model, inputs.options)
        samples.append(summary(outcome, inputs.workload, percentiles=inputs.percentiles))
    assert profile.intervals is not None  # draws() would have refused it
    level = profile.intervals.level_percent
    return FigureIntervals(
        level_percent=level, draws=count, seed=seed, figures=_ranges(samples, level)
    )


def _profile_of(timing: str, inputs: ReplayInputs) -> tuple[str, Composition]:
    """The profile that a timing spec names, also through the engine file."""
    spec = parse_timing(timing)
    if isinstance(spec, ProfileSpec) and not spec.is_table:
        return spec.profile, spec.composition
    deployment = inputs.deployment
    if isinstance(spec, EngineTiming) and isinstance(deployment, LaunchConfig):
        match deployment.engine.timing_model:
            case ExternalConfig(provider="passtime", config={"profile": str(name), **rest}):
                return name, "pass" if rest.get("composition") == "pass" else "calls"
    raise InputError(
        f"timing {timing!r}: intervals come from a profile, give one: --timing PROFILE"
    )


def _always(model: TimingModel) -> Timing:
    return lambda launch: model


def _ranges(samples: list[dict[str, Value]], level_percent: float) -> dict[str, FigureRange]:
    tail = (100.0 - level_percent) / 2.0
    ranges = {}
    for key in samples[0]:
        if not key.endswith(("_ms", "_tok_s", "_rps")):
            continue
        values = [sample[key] for sample in samples]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            low, high = np.percentile(numbers, [tail, 100.0 - tail]).tolist()
            ranges[key] = FigureRange(low=low, high=high)
    return ranges
