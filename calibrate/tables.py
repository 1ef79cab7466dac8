"""Devices, plans and calibrations as tables for people and documents for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from passtime.calibrate.calibration import Calibration, Preparation
from passtime.calibrate.devices import Devices
from passtime.calibrate.log import Batch
from passtime.profiles.document import Accuracy

MIB = 2**20
GIB = 2**30


def devices_table(devices: Devices) -> Table:
    """One device a row; peaks are the datasheet's."""
    table = Table()
    for column in ("device", "name"):
        table.add_column(column)
    for column in ("memory, GiB", "processors", "peak, TFLOP/s", "peak, GB/s"):
        table.add_column(column, justify="right")
    for key, facts in devices:
        table.add_row(
            key,
            facts.name or "(nameless)",
            f"{facts.memory_bytes / GIB:.1f}",
            "–" if facts.processors is None else str(facts.processors),
            "–" if facts.peak_flops is None else f"{facts.peak_flops / 1e12:.0f}",
            "–" if facts.peak_bytes_per_s is None else f"{facts.peak_bytes_per_s / 1e9:.0f}",
        )
    return table


def plan_table(preparation: Preparation) -> Table:
    """One point a row, with what it is expected to take."""
    plan, clock = preparation.plan, preparation.backend.CLOCK
    rounds = (
        f"{clock.min_rounds} to {clock.rounds}"
        if clock.rounds > clock.min_rounds
        else f"{clock.rounds}"
    )
    kept_s = _kept_s(preparation)
    table = Table(
        title=f"{len(plan.points)} points on {preparation.facts.name}, model "
        f"{preparation.model.name}",
        caption=f"a round is expected to take {plan.round_s:.1f} s; {rounds} rounds in "
        f"{preparation.budget_s - kept_s:g} s"
        + (f"; {kept_s:g} s are kept for points chosen by what these show" if kept_s else ""),
    )
    table.add_column("point", justify="right")
    table.add_column("regime")
    table.add_column("prefill, new+prefix tokens")
    table.add_column("decode, requests × KV tokens")
    table.add_column("expected, ms", justify="right")
    table.add_column("memory, MiB", justify="right")
    rows = zip(plan.points, plan.pass_s, plan.memory_bytes, strict=True)
    for point, pass_s, memory_bytes in rows:
        table.add_row(
            str(point.id),
            point.regime + (", held out" if point.held_out else ""),
            prefill_text(point.batch),
            decode_text(point.batch),
            f"{1e3 * pass_s:.3g}",
            f"{memory_bytes / MIB:.0f}",
        )
    return table


def _kept_s(preparation: Preparation) -> float:
    return preparation.refinement.kept_s if preparation.refinement else 0.0


def prefill_text(batch: Batch) -> str:
    """``3 × 128+1024``: equal chunks are counted."""
    return ", ".join(
        (f"{batch.prefill.count(chunk)} × " if batch.prefill.count(chunk) > 1 else "")
        + f"{chunk[0]}+{chunk[1]}"
        for chunk in dict.fromkeys(batch.prefill)
    )


def decode_text(batch: Batch) -> str:
    """``8 × 512`` or ``8 × 100…900``."""
    if not batch.decode:
        return ""
    low, high = min(batch.decode), max(batch.decode)
    return f"{len(batch.decode)} × {low}" + (f"…{high}" if high > low else "")


def plan_document(preparation: Preparation) -> str:
    """The plan as JSON."""
    plan = preparation.plan
    rows = zip(plan.points, plan.pass_s, plan.memory_bytes, strict=True)
    return _json(
        {
            "device": preparation.facts,
            "model": preparation.model,
            "budget_s": preparation.budget_s,
            "kept_for_added_points_s": _kept_s(preparation),
            "seed": preparation.seed,
            "box": plan.box,
            "expected_round_s": plan.round_s,
            "points": [
                {
                    **msgspec.to_builtins(point),
                    "expected_ms": 1e3 * pass_s,
                    "memory_bytes": memory_bytes,
                }
                for point, pass_s, memory_bytes in rows
            ],
        }
    )


def calibration_table(done: Calibration, output: Path) -> Table:
    """What was measured, how well the fit predicts, and where everything lies."""
    table = Table(show_header=False)
    errors = done.profile.errors
    rows = {
        "profile": str(output),
        "log": str(done.log),
        "device": f"{done.profile.device.name} ({done.profile.device_kind})",
        "model": done.profile.model.name,
        "measured": f"{len(done.profile.points)} points"
        + (f" ({done.summary.added} of them added to the plan)" if done.summary.added else "")
        + f", {done.summary.visits} visits, "
        f"{done.summary.fewest_samples} samples of a point at least, "
        f"{done.summary.elapsed_s:.1f} s",
        "held-out error": _accuracy(errors.held_out, "5 folds of the fitted points"),
        "error at points never fitted": _accuracy(
            errors.planned, "drawn from the expected workload"
        ),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def calibration_document(done: Calibration, output: Path) -> str:
    """The same as JSON."""
    return _json(
        {
            "profile": str(output),
            "log": str(done.log),
            "resumed": done.resumed,
            "visits": done.summary.visits,
            "fewest_samples": done.summary.fewest_samples,
            "elapsed_s": done.summary.elapsed_s,
            "added_points": done.summary.added,
            "unmeasured_points": [point.id for point in done.summary.unmeasured],
            "restarts": done.summary.restarts,
            "errors": done.profile.errors,
        }
    )


def _accuracy(accuracy: Accuracy | None, what: str) -> str:
    if accuracy is None:
        return "– (too few points)"
    return (
        f"mean {accuracy.mape_percent:.1f} %, p90 {accuracy.p90_percent:.1f} %, "
        f"largest {accuracy.max_percent:.1f} % ({accuracy.points} predictions, {what})"
    )


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
