"""The whole way from a device to a profile: facts, plan, measurement, fit, document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from passtime.calibrate.backends import Backend, backend
from passtime.calibrate.devices import device
from passtime.calibrate.fit import fit_log
from passtime.calibrate.log import SCHEMA, Header, LogWriter, require_same_run
from passtime.calibrate.measure import Measurement, Progress, Summary
from passtime.calibrate.plan import (
    SIZINGS,
    Costs,
    Plan,
    guessed_pass_s,
    guessed_rates,
    make_plan,
)
from passtime.calibrate.refine import Refinement
from passtime.calibrate.runners import Runner
from passtime.errors import DeviceError, InputError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import Profile, load_profile, save_profile
from passtime.profiles.shapes import ModelShape, load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for; None leaves it to the device's defaults."""

    device: str = "cpu"
    model: str | None = None
    budget_s: float | None = None
    seed: int = 0
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Everything that is decided before the first sample."""

    facts: DeviceFacts
    model: ModelShape
    plan: Plan
    refinement: Refinement | None
    budget_s: float
    seed: int
    backend: Backend

    @property
    def memory_bytes(self) -> int:
        """How much of the device's memory may be used."""
        return int(SIZINGS[self.facts.kind].memory_share * self.facts.memory_bytes)

    def open_runner(self) -> Runner:
        """A runner for the plan. Raises DeviceError."""
        return self.backend.open_runner(
            facts=self.facts, model=self.model, plan=self.plan, seed=self.seed
        )

    def header(self, runner: Runner) -> Header:
        """The log's first line."""
        refinement = {} if self.refinement is None else {"refinement": self.refinement.policy}
        return Header(
            schema=SCHEMA,
            device=runner.facts,
            model=runner.model,
            software=dict(runner.software),
            policy={
                **runner.policy,
                "budget_s": self.budget_s,
                "box": msgspec.to_builtins(self.plan.box),
                "sampling": msgspec.to_builtins(self.backend.CLOCK),
                **refinement,
            },
            plan=self.plan.points,
            seed=self.seed,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            kernel_hash=runner.kernel_hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A finished calibration."""

    profile: Profile
    summary: Summary
    log: Path
    resumed: bool


def prepare(wish: Wish) -> Preparation:
    """Find the device and plan for it. InputError for a bad wish, DeviceError for no device."""
    facts = device(wish.device, label=wish.label)
    chosen = backend(facts.kind)
    budget_s = chosen.DEFAULT_BUDGET_S if wish.budget_s is None else wish.budget_s
    if not 0 < budget_s < float("inf"):
        raise InputError(f"--budget: wanted seconds > 0, found {budget_s:g}")
    if not 0 <= wish.seed < 2**63:
        raise InputError(f"--seed: wanted 0 … 2**63 - 1, found {wish.seed}")
    model = chosen.computed_model(load_model(wish.model or chosen.DEFAULT_MODEL))
    costs = Costs(
        pass_s=partial(guessed_pass_s, model, rates=guessed_rates(facts)),
        visit_s=partial(chosen.visit_s, model),
        memory_bytes=partial(chosen.memory_bytes, model),
    )
    sizing = SIZINGS[facts.kind]
    kept_s = sizing.refine_s(budget_s)
    plan = make_plan(
        sizing,
        costs,
        budget_s=budget_s - kept_s,
        memory_bytes=facts.memory_bytes,
        min_rounds=chosen.CLOCK.min_rounds,
        seed=wish.seed,
    )
    refinement = Refinement(candidates=plan.spare, costs=costs, kept_s=kept_s) if kept_s else None
    return Preparation(
        facts=facts,
        model=model,
        plan=plan if refinement else replace(plan, spare=()),
        refinement=refinement,
        budget_s=budget_s,
        seed=wish.seed,
        backend=chosen,
    )


def calibrate(
    preparation: Preparation,
    *,
    output: Path,
    log: Path,
    progress: Progress,
    say: Callable[[str], None],
) -> Calibration:
    """Measure (or go on measuring) into ``log``, fit, and write the profile to ``output``.

    ``say`` gets sentences for the user. KeyboardInterrupt leaves a log to go on from.
    """
    if output.resolve() == log.resolve():
        raise InputError(f"--log {log}: is the profile's own name: give another")
    if not output.absolute().parent.is_dir():
        raise InputError(f"-o {output}: there is no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise InputError(f"-o {output}: is no regular file")
    _keep_other_profiles(preparation, output, log)
    summary, resumed = _measure(preparation, log, progress, say)
    if not summary.fewest_samples:
        raise DeviceError(
            f"no point could be measured in {preparation.budget_s:g} s: give a larger --budget"
        )
    if summary.unmeasured:
        say(
            f"{len(summary.unmeasured)} of {summary.points} points have no sample: "
            "out of time or memory"
        )
    profile = fit_log(log)
    save_profile(profile, output)
    return Calibration(profile=profile, summary=summary, log=log, resumed=resumed)


def _measure(
    preparation: Preparation, path: Path, progress: Progress, say: Callable[[str], None]
) -> tuple[Summary, bool]:
    runner = preparation.open_runner()
    try:
        header = preparation.header(runner)
        resumption = LogWriter.resume(path)
        if resumption is None:
            writer, earlier = LogWriter.create(path, header), None
        else:
            writer, earlier = resumption
    except BaseException:
        runner.close()
        raise
    with writer:
        try:
            if earlier is not None:
                require_same_run(earlier.header, header, str(path))
                say(f"going on with {path}: {len(earlier.visits)} visits are there")
            for flag in runner.telemetry().flags:
                say(FLAG_SENTENCES.get(flag, f"the device is flagged: {flag}"))
        except BaseException:
            runner.close()
            raise
        summary = Measurement(
            runner=runner,
            reopen=preparation.open_runner,
            writer=writer,
            header=header,
            earlier=earlier,
            clock=preparation.backend.CLOCK,
            pass_s=preparation.plan.pass_s,
            visit_s=preparation.plan.visit_s,
            budget_s=preparation.budget_s,
            memory_bytes=preparation.memory_bytes,
            progress=progress,
            say=say,
            refinement=preparation.refinement,
        ).run()
    return summary, earlier is not None


FLAG_SENTENCES = {
    "threads": "BLAS uses more than one thread although it was told not to: CPU times are too low "
    "and the profile is marked",
    "no_nvml": "NVML does not answer: clocks, power and throttling are unknown, and the profile is "
    "marked",
}


def _keep_other_profiles(preparation: Preparation, output: Path, log: Path) -> None:
    """Refuse to write over a profile that this measurement does not replace (P32)."""
    if not output.exists() or log.exists():
        return
    there = load_profile(output)
    if (there.device.name, there.model) != (preparation.facts.name, preparation.model):
        raise InputError(
            f"{output}: holds the profile of {there.device.name!r} for {there.model.name!r}: "
            "give another -o, or delete it first"
        )
