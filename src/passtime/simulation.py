"""One simulation: inputs and a timing model become a report."""

from __future__ import annotations

from dataclasses import dataclass

from passtime.deployment import Timing
from passtime.profiles.predict import HELD
from passtime.recording import ENOUGH_INSIDE_PERCENT, coverage_percent, record, replay_covered
from passtime.replay_inputs import ReplayInputs
from passtime.sched.replay.outcome import Outcome
from passtime.sched.replay.report import Report, report
from passtime.timing_spec import BestConstants, TimingSpec, parse_timing


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a replay left, and the report of it."""

    outcome: Outcome
    report: Report


def simulate(inputs: ReplayInputs, timing: str) -> Simulation:
    """Replay ``inputs`` under the model that ``timing`` stands for.

    Raises InputError for a model that does not exist, RunError if the run cannot finish.
    """
    model, facts = _resolve(parse_timing(timing), inputs)
    outcome, coverage = replay_covered(model, inputs.workload, inputs.deployment, inputs.options)
    document = report(
        outcome,
        inputs.workload,
        inputs={**inputs.echo, "timing": {"spec": timing, **facts}},
        percentiles=inputs.percentiles,
        slo=inputs.slo,
        coverage=coverage,
    )
    return Simulation(outcome, document)


def _resolve(spec: TimingSpec, inputs: ReplayInputs) -> tuple[Timing, dict[str, float]]:
    """The model for each pool, and what had to be found for it."""
    if not isinstance(spec, BestConstants):
        return spec.model, {}
    _, recording = record(spec.source.model, inputs.workload, inputs.deployment, inputs.options)
    constants = recording.constants()
    return lambda launch: constants, recording.facts()


_BOUND_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_BOUND_METRICS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2e_ms": "e2e_latency_ms"}


def goodput_sentence(inputs: ReplayInputs, document: Report) -> str | None:
    """Why not a single request is good, in plain words; None if one is or none was asked for."""
    if inputs.slo is None or document.summary["goodput_completed_requests"]:
        return None
    bounds = inputs.slo.bounds()
    asked = " and ".join(f"{_BOUND_NAMES[name]} <= {bound:g} ms" for name, bound in bounds.items())
    if not document.summary["completed_requests"]:
        return f"No request completed, so none keeps {asked}."
    missed = []
    for name, bound in bounds.items():
        smallest = document.summary[f"min_{_BOUND_METRICS[name]}"]
        if isinstance(smallest, float) and smallest > bound:
            missed.append(f"the smallest {_BOUND_NAMES[name]} is {smallest:.4g} ms")
    reason = " and ".join(missed) or "no request keeps all of it at once"
    return f"No request keeps {asked}: {reason}."


def coverage_sentence(document: Report) -> str | None:
    """How much of the timing was extrapolated; None if little, or if the model cannot tell."""
    shares = coverage_percent(document.coverage)
    if shares is None or shares["inside"] >= ENOUGH_INSIDE_PERCENT:
        return None
    return (
        f"{100.0 - shares['inside']:.1f} % of the queries to the timing model lay outside its "
        f"measured range, {shares['extrapolated']:.1f} % by a factor of more than {HELD:g}."
    )
