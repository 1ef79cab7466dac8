"""Whole steps composed of measured operators: ``opsum__MODEL__SYSTEM__BACKEND__tpN.csv``.

Columns phase (0 prefill, 1 decode), batch, new_tokens and past_kv per request, latency_ms. These
are sums of operators, smoother than a GPU: good for judging a method, not for claiming a device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from passtime.calibrate.importers.places import device_named, model_named
from passtime.calibrate.importers.table import ImportedTable, point_of
from passtime.calibrate.importers.textfile import Faults, rows
from passtime.errors import DocumentError

_COLUMNS = {"phase", "batch", "new_tokens", "past_kv", "latency_ms"}


def recognises(header: Sequence[str]) -> bool:
    """Exactly the five columns."""
    return set(header) == _COLUMNS


def read(path: Path) -> ImportedTable:
    """All steps of the file; model, system and parallelism are read off its name."""
    named = re.match(r"opsum__(.+?)__(.+?)__(.+?)__tp(\d+)\.", path.name)
    model = model_named(named[1]) if named else None
    if named is None or model is None:
        raise DocumentError(f"{path}: expected a name like opsum__MODEL__SYSTEM__BACKEND__tpN.csv")
    ranks = int(named[4])
    faults, points, lines = Faults(str(path)), [], []
    for row in rows(path, faults):
        batch, past = row.count("batch"), row.count("past_kv")
        latency = row.duration("latency_ms")
        if row.count("phase"):
            point = point_of(decodes=batch, kv_tokens=batch * (past + 1), latency_ms=latency)
        else:
            point = point_of(
                prompts=batch,
                new_tokens=row.count("new_tokens"),
                prefix_tokens=past,
                latency_ms=latency,
            )
        points.append(point)
        lines.append(row.line)
    faults.refuse()
    return ImportedTable(
        source=str(path),
        points=tuple(points),
        lines=tuple(lines),
        model=model.with_tensor_parallel(ranks) if ranks > 1 else model,
        device=device_named(named[2]),
        notes=("composed of measured operators, never measured as a whole",),
    )
