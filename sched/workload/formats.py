"""Trace files: find the format, read the rows, say what is odd about them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from passtime.errors import TraceError
from passtime.sched.workload.files import read_trace_file
from passtime.sched.workload.mooncake import DEFAULT_BLOCK_SIZE, parse_mooncake
from passtime.sched.workload.names import TRACE_FORMATS, TimeUnit
from passtime.sched.workload.rows import Workload
from passtime.sched.workload.tables import TABLE_FORMATS, TableFormat, parse_table
from passtime.sched.workload.units import UNIT_IN_MS

_TABLES = {layout.name: layout for layout in TABLE_FORMATS}

# No trace covers this: whoever finds such a span has mixed an epoch clock and a relative one.
_LONGEST_SPAN_MS = 10 * 365.25 * 24 * 3600 * 1000.0


# Faster than any service: a hundred requests and more at this pace are seconds read as ms.
_FASTEST_PER_S = 1000.0
_SEVERAL = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrace:
    """A workload, the format it was found in, and sentences that its user should see."""

    workload: Workload
    trace_format: str
    notes: list[str] = field(default_factory=list)


def load_trace(
    path: str | os.PathLike[str],
    *,
    trace_format: str | None = None,
    trace_block_size: int | None = None,
    time_unit: TimeUnit | None = None,
) -> LoadedTrace:
    """Read a trace file, gzipped or not; its format is found by its first line if not given.

    ``trace_block_size`` is the number of tokens per hash id of a mooncake trace (default 512);
    ``time_unit`` that of its times, where it is not the format's own (mooncake ms, others s).
    Timestamps are kept as they are, unordered or negative ones too: the replay sorts and rebases
    them (R-20). Raises TraceError.
    """
    source = os.fspath(path)
    data = read_trace_file(Path(path))
    chosen = trace_format or _guess(data, source)
    if chosen == "mooncake":
        size = DEFAULT_BLOCK_SIZE if trace_block_size is None else trace_block_size
        if size < 1:
            raise TraceError(f"{source}: trace_block_size must be > 0, found {size}")
        workload, notes = parse_mooncake(
            data, source=source, trace_block_size=size, unit_in_ms=UNIT_IN_MS[time_unit or "ms"]
        )
    else:
        layout = _layout(chosen, source)
        _refuse_idle_options(layout, source, trace_block_size, time_unit)
        workload, notes = parse_table(
            _text(data, source), layout, source=source, unit_in_ms=UNIT_IN_MS[time_unit or "s"]
        )
    notes += _clock_notes(workload)
    if chosen == "mooncake" and time_unit is None:
        notes += _unit_notes(workload)
    return LoadedTrace(workload=workload, trace_format=chosen, notes=notes)


def _layout(name: str, source: str) -> TableFormat:
    if name not in _TABLES:
        raise TraceError(f"{source}: no trace format {name!r}; known: {', '.join(TRACE_FORMATS)}")
    return _TABLES[name]


def _guess(data: bytes, source: str) -> str:
    """The format whose first line this is. Raises TraceError listing the known ones."""
    first = data.lstrip().split(b"\n", 1)[0].decode("utf-8", errors="replace").strip()
    if first.startswith("{"):
        return "mooncake"
    header = {name.strip().strip('"') for name in first.split(",")}
    for layout in TABLE_FORMATS:
        if header.issuperset(layout.required):
            return layout.name
    if not first:
        raise TraceError(f"{source}: the trace holds no requests")
    known = "".join(f"\n  {layout.name}: {layout.header}" for layout in TABLE_FORMATS)
    raise TraceError(
        f"{source}:1: no known trace format starts with {first[:80]!r}; known first lines:\n"
        f'  mooncake: {{"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}}'
        f"{known}"
    )


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{source}: line {line}: not UTF-8 text") from None


def _refuse_idle_options(
    layout: TableFormat, source: str, trace_block_size: int | None, time_unit: TimeUnit | None
) -> None:
    """An option that changes nothing was meant for another file."""
    if trace_block_size is not None:
        raise TraceError(
            f"{source}: trace_block_size is for mooncake traces, {layout.name} has no hash_ids"
        )
    if time_unit is not None and layout.arrival_is_date:
        raise TraceError(f"{source}: time_unit has no meaning for the dates of {layout.name}")


def _clock_notes(workload: Workload) -> list[str]:
    """What is odd about the arrival times. Raises TraceError if no clock can have made them."""
    given = [time for time in workload.timestamp_ms if time is not None]
    if not given:
        return [f"{workload.source}: no arrival times: only a fixed concurrency can replay it"]
    earliest, latest = min(given), max(given)
    if latest - earliest > _LONGEST_SPAN_MS:
        years = (latest - earliest) / (_LONGEST_SPAN_MS / 10)
        raise TraceError(
            f"{workload.source}: timestamps span {years:.3g} years, from {earliest:.15g} to "
            f"{latest:.15g} ms: they mix an epoch clock with a relative one"
        )
    notes = []
    if earliest < 0:
        notes.append(
            f"{workload.source}: the earliest timestamp is {earliest:.15g} ms; it becomes time 0"
        )
    if any(later < sooner for sooner, later in pairwise(given)):
        notes.append(
            f"{workload.source}: timestamps are not in order; requests arrive in order of time"
        )
    return notes


def _unit_notes(workload: Workload) -> list[str]:
    """Ask about the unit where milliseconds would make an absurd rate (Alibaba's are seconds)."""
    given = [time for time in workload.timestamp_ms if time is not None]
    span_s = (max(given) - min(given)) / 1000.0 if given else 0.0
    if len(given) < _SEVERAL or span_s == 0.0 or len(given) / span_s <= _FASTEST_PER_S:
        return []
    return [
        f"{workload.source}: {len(given)} requests within {span_s:.3g} s: are its times in "
        "seconds (--trace-time-unit s)?"
    ]
