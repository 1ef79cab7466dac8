"""The "mooncake" trace format: JSON lines whose prompts are lists of block hashes (R-30, R-31)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from passtime.errors import TraceError
from passtime.sched.workload.faults import Faults
from passtime.sched.workload.files import replace_file
from passtime.sched.workload.rows import Workload
from passtime.sched.workload.units import scaled

DEFAULT_BLOCK_SIZE = 512

Count: TypeAlias = Annotated[int, Meta(ge=0)]


class Row(Struct, frozen=True, kw_only=True, gc=False):
    """One line as it stands in the file; unknown keys are ignored (R-30)."""

    timestamp: float | UnsetType = UNSET
    created_time: float | UnsetType = UNSET
    input_length: int | UnsetType | None = UNSET
    input_tokens: int | UnsetType | None = UNSET
    output_length: Count | UnsetType | None = UNSET
    output_tokens: Count | UnsetType | None = UNSET
    hash_ids: list[Count] | UnsetType | None = UNSET
    output_token_ids: list[Count] | UnsetType | None = UNSET
    session_id: str | UnsetType | None = UNSET
    delay: float | UnsetType | None = UNSET
    delay_ms: float | UnsetType | None = UNSET


ALIASES = (
    ("timestamp", "created_time"),
    ("input_length", "input_tokens"),
    ("output_length", "output_tokens"),
    ("delay", "delay_ms"),
)


def parse_mooncake(
    data: bytes, *, source: str, trace_block_size: int, unit_in_ms: float = 1.0
) -> tuple[Workload, list[str]]:
    """The workload in ``data``, and notes for the user.

    ``unit_in_ms`` is what one unit of ``timestamp`` and ``delay`` is worth (``delay_ms`` is always
    in ms). Raises TraceError naming the lines at fault, counted from 1, blank ones included.
    """
    faults = Faults(source)
    numbered = list(_rows(data, faults))
    columns = _Columns(trace_block_size, unit_in_ms, faults)
    for line, row in numbered:
        columns.append(line, row)
    rows = [row for _, row in numbered]
    faults.check(advice=lambda: _size_advice(rows, trace_block_size))
    workload = columns.workload(source)
    return workload, _notes(rows, workload, source)


def _rows(data: bytes, faults: Faults) -> Iterator[tuple[int, Row]]:
    """(line number, row) of every line that is one; the others become faults."""
    decode = msgspec.json.Decoder(Row).decode
    for line, text in enumerate(data.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            yield line, decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            faults.add(f"trace line {line}: {error}")


class _Columns:
    """The workload's columns while lines are read."""

    def __init__(self, trace_block_size: int, unit_in_ms: float, faults: Faults) -> None:
        self.block_size = trace_block_size
        self.unit = unit_in_ms
        self.faults = faults
        self.timestamp_ms: list[float | None] = []
        self.input_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.block_ids: list[list[int]] = []
        self.session_ids: list[str] = []
        self.delay_ms: list[float] = []
        self.named = False  # a line gave a session_id, or line numbers are no row numbers
        self._turns: dict[str, int] = {}
        self._last_given_ms: dict[str, float] = {}

    def append(self, line: int, row: Row) -> None:
        """Take one line; what is wrong with it becomes a fault."""
        for name, alias in ALIASES:
            if getattr(row, name) is not UNSET and getattr(row, alias) is not UNSET:
                self.faults.add(f"trace line {line} gives both {name} and {alias}")
        session = row.session_id or f"request_{line}"
        if row.session_id or line != len(self.session_ids) + 1:
            self.named = True
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        timestamp = _first(row.timestamp, row.created_time)
        arrival_ms = None if timestamp is None else scaled(timestamp, self.unit)
        self._append_lengths(line, row, session, turn)
        self.timestamp_ms.append(arrival_ms)
        self.session_ids.append(session)
        self.delay_ms.append(self._delay_ms(line, row, session, turn, arrival_ms))
        if arrival_ms is not None:
            self._last_given_ms[session] = arrival_ms

    def _append_lengths(self, line: int, row: Row, session: str, turn: int) -> None:
        add = self.faults.add
        blocks = _first(row.hash_ids)
        if blocks is None:
            add(f"trace line {line} is missing hash_ids")
            blocks = []
        capacity = len(blocks) * self.block_size
        given = _first(row.input_length, row.input_tokens)
        tokens = capacity if given is None else given
        if tokens < 1:
            add(
                f"trace line {line}: session {session} turn {turn} must have a positive "
                f"input_length, found {tokens}"
            )
        elif tokens > capacity and _first(row.hash_ids) is not None:
            add(f"trace line {line} input_length {tokens} exceeds hash_ids capacity {capacity}")
        output = _first(row.output_length, row.output_tokens)
        planned = _first(row.output_token_ids)
        if output is None:
            add(f"trace line {line} is missing output_length")
        elif planned is not None and len(planned) != output:
            add(
                f"trace line {line} output_length {output} does not match output_token_ids "
                f"length {len(planned)}"
            )
        self.input_tokens.append(tokens)
        self.output_tokens.append(output or 0)
        needed = -(-tokens // self.block_size)
        self.block_ids.append(blocks if len(blocks) <= needed else blocks[:needed])

    def _delay_ms(
        self, line: int, row: Row, session: str, turn: int, arrival_ms: float | None
    ) -> float:
        """The wait before this turn: as given, else the distance of the timestamps (R-30)."""
        delay = _first(row.delay)
        given_ms = _first(row.delay_ms) if delay is None else scaled(delay, self.unit)
        if turn == 0:
            if given_ms:
                self.faults.add(
                    f"trace line {line} sets delay on the first turn of session {session}"
                )
            return 0.0
        if given_ms is None:
            last_ms = self._last_given_ms.get(session)
            if arrival_ms is None or last_ms is None:
                return 0.0
            given_ms = arrival_ms - last_ms
        if given_ms < 0:
            self.faults.add(f"trace line {line} has invalid delay {given_ms:g}")
        return given_ms

    def workload(self, source: str) -> Workload:
        """What was read; sessions are kept only where they say something."""
        several = any(turns > 1 for turns in self._turns.values())
        return Workload(
            source=source,
            timestamp_ms=self.timestamp_ms,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            block_ids=self.block_ids,
            trace_block_size=self.block_size,
            session_ids=self.session_ids if self.named else None,
            delay_ms=self.delay_ms if several else None,
        )


def _first(*values: Any) -> Any:
    """The first value that is given and not null."""
    for value in values:
        if value is not UNSET and value is not None:
            return value
    return None


# --- Does the block size fit? -------------------------------------------------------------------


def fitting_block_size(lengths: Iterable[tuple[int, int]]) -> int | None:
    """The block size that (prompt tokens, number of hash ids) pairs ask for; None if none does.

    Of the sizes with ceil(tokens / size) == ids for every pair the smallest power of two is
    taken, else the smallest.
    """
    smallest, largest = 1, None
    for tokens, ids in lengths:
        if ids < 1 or tokens < 1:
            continue
        smallest = max(smallest, -(-tokens // ids))
        if ids > 1:
            below = (tokens - 1) // (ids - 1)
            largest = below if largest is None else min(largest, below)
    if largest is None or smallest > largest:
        return None
    power: int = 1 << (smallest - 1).bit_length()
    return power if power <= largest else smallest


def _lengths(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [
        (_first(row.input_length, row.input_tokens) or 0, len(_first(row.hash_ids) or ()))
        for row in rows
    ]


def _size_advice(rows: Sequence[Row], trace_block_size: int) -> str | None:
    """One more line for an error message if another block size would fit."""
    fitting = fitting_block_size(_lengths(rows))
    if fitting is None or fitting == trace_block_size:
        return None
    return f"hint: these hash_ids fit trace blocks of {fitting} tokens (--trace-block-size)"


def _notes(rows: Sequence[Row], workload: Workload, source: str) -> list[str]:
    """Warn where the ids are so many that the file was made with another block size (T10)."""
    size = workload.trace_block_size
    notes = []
    surplus = sum(
        len(row.hash_ids or ()) > len(kept)
        for row, kept in zip(rows, workload.block_ids or (), strict=True)
    )
    if surplus > len(rows) // 2:
        fitting = fitting_block_size(_lengths(rows))
        hint = f"; they fit {fitting} (--trace-block-size {fitting})" if fitting else ""
        notes.append(
            f"{source}: {surplus} of {len(rows)} rows hold more hash_ids than trace blocks of "
            f"{size} tokens need, the surplus is ignored{hint}"
        )
    return notes


# --- Writing ------------------------------------------------------------------------------------


def write_mooncake(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write ``workload`` so that loading it with its trace_block_size replays the same (R-30).

    Prompts without content get ids of their own. The file appears whole or not at all.
    """
    encode = msgspec.json.Encoder().encode
    lines = [encode(row) for row in _written_rows(workload)]
    replace_file(Path(path), b"\n".join(lines) + b"\n", error=TraceError)


def _written_rows(workload: Workload) -> Iterator[dict[str, Any]]:
    size = workload.trace_block_size
    fresh = 0
    seen: set[str] = set()
    for index, tokens in enumerate(workload.input_tokens):
        row: dict[str, Any] = {}
        timestamp_ms = workload.timestamp_ms[index]
        if timestamp_ms is not None:
            row["timestamp"] = timestamp_ms
        row["input_length"] = tokens
        row["output_length"] = workload.output_tokens[index]
        if workload.block_ids is None:
            blocks = -(-tokens // size)
            row["hash_ids"] = list(range(fresh, fresh + blocks))
            fresh += blocks
        else:
            row["hash_ids"] = workload.block_ids[index]
        if workload.session_ids is not None:
            session = workload.session_ids[index]
            row["session_id"] = session
            if session in seen:
                row["delay"] = 0.0 if workload.delay_ms is None else workload.delay_ms[index]
            seen.add(session)
        yield row
