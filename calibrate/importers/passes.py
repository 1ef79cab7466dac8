"""A log of passes, one row each, as CSV or JSON lines: the smallest format that can be fitted.

Columns: ``new_tokens`` and ``prefix_tokens`` (sums over the prompts of the pass), ``decodes``,
``kv_tokens`` (sum over the decoding requests), ``latency_ms``; optional ``prompts`` (default 1
where there are new tokens), ``kv_max``, ``spread_percent``, ``samples``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from passtime.calibrate.importers.table import ImportedTable, point_of
from passtime.calibrate.importers.textfile import Faults, Row, rows
from passtime.profiles.document import MeasuredPoint

_LATENCY = ("latency_ms", "ms", "time_ms")


def recognises(header: Sequence[str]) -> bool:
    """A latency in ms, and at least one of the two kinds of work."""
    return bool(set(header) & set(_LATENCY)) and bool({"new_tokens", "decodes"} & set(header))


def read(path: Path) -> ImportedTable:
    """The passes of the file; DocumentError names every bad cell."""
    faults, points, lines = Faults(str(path)), [], []
    for row in rows(path, faults):
        if point := _point(row):
            points.append(point)
            lines.append(row.line)
    faults.refuse()
    return ImportedTable(source=str(path), points=tuple(points), lines=tuple(lines))


def _point(row: Row) -> MeasuredPoint | None:
    new = row.count("new_tokens", default=0)
    prompts = row.count("prompts", default=1 if new else 0)
    decodes = row.count("decodes", default=0)
    kv_tokens = row.count("kv_tokens", default=0)
    latency = row.duration(*_LATENCY)
    if not new and not decodes:
        row.faults.add(row.line, "an empty pass: new_tokens and decodes are both 0")
        return None
    if new and not 1 <= prompts <= new:
        row.faults.add(row.line, f"prompts: expected 1 … new_tokens {new}, found {prompts}")
        return None
    if decodes and kv_tokens < decodes:
        row.faults.add(row.line, f"kv_tokens: expected at least decodes {decodes}")
        return None
    prefix = row.count("prefix_tokens", default=0)
    point = point_of(
        decodes=decodes,
        kv_tokens=kv_tokens if decodes else 0,
        kv_max=row.count("kv_max") if "kv_max" in row.cells and decodes else None,
        prompts=prompts if new else 0,
        latency_ms=latency,
        spread_percent=row.number("spread_percent") if row.cells.get("spread_percent") else None,
        samples=max(1, row.count("samples", default=1)),
    )
    if not new:
        return point
    pairs = round((new * prefix + new * (new + prompts) / 2) / prompts)  # equal prompts
    return msgspec.structs.replace(
        point, prefill_new_tokens=new, prefill_prefix_tokens=prefix, prefill_pairs=pairs
    )
