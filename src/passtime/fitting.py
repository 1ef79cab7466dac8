"""What `passtime fit` does: a log, a table or a profile in, a profile and a report out."""

from __future__ import annotations

from pathlib import Path

import msgspec

from passtime import __version__
from passtime.calibrate.fit import fit_log, fit_profile
from passtime.calibrate.importers import read_table
from passtime.calibrate.importers.places import device_named
from passtime.calibrate.importers.textfile import header_of
from passtime.calibrate.laws import Bench
from passtime.errors import InputError
from passtime.profiles.document import (
    ModelClass,
    Profile,
    Provenance,
    is_profile,
    load_profile,
)
from passtime.profiles.shapes import load_model


def fit(
    source: str,
    *,
    model_class: ModelClass = "step",
    force: bool = False,
    model: str | None = None,
    device: str | None = None,
) -> Profile:
    """Fit the log or table at ``source``, or the points of a profile again.

    ``model`` and ``device`` are for tables only.
    """
    path = Path(source)
    if is_profile(source):
        if model is not None or device is not None:
            raise InputError(
                f"{source}: a profile says itself what was measured: drop --model, --device"
            )
        return _fit_again(load_profile(source), source, model_class=model_class, force=force)
    if "line" in header_of(path):
        if model is not None or device is not None:
            raise InputError(f"{path}: a log says itself what was measured: drop --model, --device")
        return fit_log(path, model_class=model_class, force=force)
    table = read_table(path)
    shape = table.model if model is None else load_model(model)
    facts = table.device if device is None else device_named(device)
    if shape is None:
        raise InputError(f"{path}: a table does not say its model: --model is missing")
    if facts is None:
        raise InputError(
            f"{path}: --device is missing" if device is None else f"--device {device}: unknown card"
        )
    bench = Bench(model=shape, engine=table.engine, device=facts, model_class=model_class)
    return fit_profile(
        bench,
        table.points,
        name=f"{facts.name} {shape.name}",
        provenance=Provenance(
            made_by=f"passtime {__version__}", timed=f"table {path.name}", notes=table.notes
        ),
        source=str(path),
        force=force,
    )


def _fit_again(profile: Profile, source: str, *, model_class: ModelClass, force: bool) -> Profile:
    """The points that a profile was fitted to, by this passtime; where they are from is kept."""
    made_by = f"passtime {__version__}"
    return fit_profile(
        Bench(
            model=profile.model,
            engine=profile.engine,
            device=profile.device,
            model_class=model_class,
        ),
        profile.points,
        name=profile.name,
        provenance=msgspec.structs.replace(profile.provenance, made_by=made_by),
        source=source,
        force=force,
    )


def fit_report(profile: Profile, output: str) -> str:
    """Errors, coefficients and intervals as JSON."""
    document = {
        "profile": output,
        "model_class": profile.model_class,
        "errors": profile.errors,
        "coefficients": profile.coefficients,
        "intervals": profile.intervals,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
