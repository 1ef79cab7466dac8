"""What `passtime check` looks at: a measurement log, a profile, or somebody's table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from passtime.calibrate.check import Finding, check_points, check_profile
from passtime.calibrate.fit import bench_of
from passtime.calibrate.importers import read_table
from passtime.calibrate.importers.places import device_named, fastest_card
from passtime.calibrate.importers.textfile import header_of
from passtime.calibrate.laws import Bench
from passtime.calibrate.log import read_log
from passtime.calibrate.points import measured_points
from passtime.errors import InputError
from passtime.profiles.document import is_profile, load_profile
from passtime.profiles.shapes import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was looked at and what was found; ``ok`` unless there is a fault."""

    source: str
    kind: str
    points: int
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """No fault; warnings may be there."""
        return all(finding.severity != "fault" for finding in self.findings)


def check(target: str, *, device: str | None = None, model: str | None = None) -> Checked:
    """Check the log, profile or table at ``target`` (a path, or a shipped profile's name).

    ``device`` and ``model`` say what a table was measured on where it does not say so itself.
    """
    path = Path(target)
    if is_profile(target):
        profile = load_profile(target)
        findings = check_profile(profile)
        return Checked(source=target, kind="profile", points=len(profile.points), findings=findings)
    if "line" in header_of(path):
        log = read_log(path)
        points = measured_points(log)
        return Checked(
            source=target,
            kind="log",
            points=len(points),
            findings=check_points(points, bench_of(log)),
        )
    table = read_table(path)
    shape = table.model if model is None else load_model(model)
    facts = table.device if device is None else device_named(device)
    if device is not None and facts is None:
        raise InputError(f"--device {device}: no such card in the list of datasheets")
    bench = None
    if shape is not None:
        bench = Bench(model=shape, engine=table.engine, device=facts or fastest_card())
    reference = () if table.reference is None else read_table(table.reference).points
    return Checked(
        source=target,
        kind="table",
        points=len(table.points),
        findings=check_points(table.points, bench, lines=table.lines, reference=reference),
    )


def findings_lines(checked: Checked) -> list[str]:
    """One line per finding, and a verdict."""
    lines = [f"{f.severity} ({f.rule}): {f.message}" for f in checked.findings]
    verdict = "nothing impossible was found" if checked.ok else "not physically possible"
    return [*lines, f"{checked.source}: {checked.kind} of {checked.points} points: {verdict}"]


def findings_document(checked: Checked) -> str:
    """The findings as JSON."""
    document = msgspec.json.encode(
        {
            "source": checked.source,
            "kind": checked.kind,
            "points": checked.points,
            "ok": checked.ok,
            "findings": checked.findings,
        }
    )
    return msgspec.json.format(document, indent=2).decode() + "\n"
