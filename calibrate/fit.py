"""From a measurement log to a profile: reduce the samples, fit, count the errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from passtime import __version__
from passtime.calibrate.check import check_points
from passtime.calibrate.core import fit_core
from passtime.calibrate.intervals import conformal
from passtime.calibrate.laws import Bench, unphysical
from passtime.calibrate.log import Log, log_hash, read_log
from passtime.calibrate.points import latencies, measured_points
from passtime.calibrate.validate import errors_of, extrapolation, held_out
from passtime.errors import DocumentError
from passtime.profiles.document import (
    SCHEMA,
    EngineFacts,
    MeasuredPoint,
    ModelClass,
    Parallelism,
    Profile,
    Provenance,
)

MIN_POINTS = 3


def fit_log(path: str | Path, *, model_class: ModelClass = "step", force: bool = False) -> Profile:
    """Fit a profile to the measurement log at ``path``.

    DocumentError if the log cannot be used, or if a coefficient is unphysical and ``force`` is not
    set.
    """
    log = read_log(Path(path))
    header, bench = log.header, bench_of(log, model_class=model_class)
    provenance = Provenance(
        made_by=f"passtime {__version__}",
        timed=str(header.policy.get("timed", header.policy.get("runner", header.device.kind))),
        measured_at=header.started_at,
        log_sha256=log_hash(Path(path)).removeprefix("sha256:"),
        kernel_hash=header.kernel_hash,
        software=header.software,
        policy=header.policy,
    )
    return fit_profile(
        bench,
        measured_points(log),
        name=f"{header.device.name} {header.model.name}",
        provenance=provenance,
        source=log.source,
        force=force,
    )


def bench_of(log: Log, *, model_class: ModelClass = "step") -> Bench:
    """What the log was measured on."""
    return Bench(
        model=log.header.model,
        engine=_engine_facts(log),
        device=log.header.device,
        model_class=model_class,
    )


def fit_profile(
    bench: Bench,
    points: Sequence[MeasuredPoint],
    *,
    name: str,
    provenance: Provenance,
    source: str,
    force: bool = False,
) -> Profile:
    """Fit a profile to measured points; ``source`` is named in errors. Raises DocumentError."""
    fitted = [point for point in points if not point.held_out]
    planned = [point for point in points if point.held_out]
    if len(fitted) < MIN_POINTS:
        raise DocumentError(
            f"{source}: {len(fitted)} measured points to fit, at least {MIN_POINTS} are needed"
        )
    findings = check_points(points, bench)
    _refuse([f.message for f in findings if f.severity == "fault"], source, force)
    core = fit_core(bench, fitted)
    _refuse(unphysical(core.law.coefficients, bench), source, force)
    folds = held_out(core, fitted)
    beyond = extrapolation(core, fitted)
    return Profile(
        schema=SCHEMA,
        name=name,
        device_kind=bench.device.kind,
        device=bench.device,
        model=bench.model,
        parallelism=Parallelism(tensor_parallel=bench.model.tensor_parallel, pipeline_parallel=1),
        provenance=provenance,
        engine=bench.engine,
        model_class=bench.model_class,
        coefficients=core.law.coefficients,
        box={regime: dict(axes) for regime, axes in core.box.items()},
        residual=dict(core.residual),
        errors=errors_of(core, fitted, planned, folds, beyond),
        intervals=conformal(fitted, latencies(fitted), folds, beyond),
        points=tuple(points),
    )


def _refuse(faults: Sequence[str], source: str, force: bool) -> None:
    if faults and not force:
        raise DocumentError(
            "\n".join(f"{source}: {fault}" for fault in faults)
            + "\nthe data or the device's peaks are wrong; --force fits all the same"
        )


def _engine_facts(log: Log) -> EngineFacts:
    policy = log.header.policy
    overhead = [float(note.values["ms"]) for note in log.notes if note.topic == "launch_overhead"]
    return EngineFacts(
        attention=policy.get("attention", "causal"),
        graph_sizes=tuple(policy.get("graph_sizes", ())),
        tile_tokens=policy.get("tile_tokens"),
        launch_overhead_ms=overhead[-1] if overhead else None,
    )
