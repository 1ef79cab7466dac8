"""CSV traces: Azure, BurstGPT, Vidur. One row per request, lengths only, no prompt content."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from passtime.errors import TraceError
from passtime.sched.workload.faults import Faults
from passtime.sched.workload.names import TraceFormat
from passtime.sched.workload.rows import Workload
from passtime.sched.workload.units import scaled

if TYPE_CHECKING:
    from _csv import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFormat:
    """Which columns of a CSV file mean what; others are ignored.

    ``arrival_is_date``   arrivals are wall-clock dates, counted from the first row's.
    ``arrival_required``  without the column the table says lengths only.
    ``zero_output_failed`` a row with no output tokens is a failed request, not one to replay.
    """

    name: TraceFormat
    arrival: str
    input_tokens: str
    output_tokens: str
    arrival_is_date: bool = False
    arrival_required: bool = True
    zero_output_failed: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that a header must have to be of this format."""
        lengths = (self.input_tokens, self.output_tokens)
        return (self.arrival, *lengths) if self.arrival_required else lengths

    @property
    def header(self) -> str:
        """How the format is told from others, for people."""
        return ",".join((self.arrival, self.input_tokens, self.output_tokens))


TABLE_FORMATS = (
    TableFormat(
        name="azure",
        arrival="TIMESTAMP",
        input_tokens="ContextTokens",
        output_tokens="GeneratedTokens",
        arrival_is_date=True,
    ),
    TableFormat(
        name="burstgpt",
        arrival="Timestamp(s)",
        input_tokens="Request tokens",
        output_tokens="Response tokens",
        zero_output_failed=True,
    ),
    TableFormat(
        name="vidur",
        arrival="arrived_at",
        input_tokens="num_prefill_tokens",
        output_tokens="num_decode_tokens",
        arrival_required=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """How a cell is read; ``wanted`` describes it in errors, ``read`` raises ValueError."""

    wanted: str
    read: Callable[[str], float]


def parse_table(
    text: str, layout: TableFormat, *, source: str, unit_in_ms: float
) -> tuple[Workload, list[str]]:
    """The workload in a CSV ``text``, and notes for the user.

    ``unit_in_ms`` is what one unit of a numeric arrival column is worth; dates do without.
    Raises TraceError naming line and column of every cell at fault.
    """
    reader = csv.reader(io.StringIO(text, newline=""))
    header = [name.strip() for name in next(reader, [])]
    for column in layout.required:
        if column not in header:
            raise TraceError(
                f"{source}:1: the {layout.name} format needs a column {column!r}, "
                f"found {','.join(header)}"
            )
    columns = [(layout.input_tokens, WHOLE), (layout.output_tokens, WHOLE)]
    if layout.arrival in header:
        columns.append((layout.arrival, _arrival_cell(layout, unit_in_ms)))
    faults = Faults(source)
    try:
        rows = list(_rows(reader, header, columns, faults))
    except csv.Error as error:
        raise TraceError(f"{source}: line {reader.line_num}: {error}") from None
    served = [row for row in rows if row.values[1] > 0] if layout.zero_output_failed else rows
    failed = len(rows) - len(served)
    notes = [f"{source}: {failed} of {len(rows)} requests failed, they are left out"]
    for row in served:
        if row.values[0] < 1:
            faults.add(f"line {row.line}, column {layout.input_tokens}: expected >= 1, found 0")
    faults.check()
    return (
        Workload(
            source=source,
            timestamp_ms=[row.values[2] if len(row.values) > 2 else None for row in served],
            input_tokens=[int(row.values[0]) for row in served],
            output_tokens=[int(row.values[1]) for row in served],
        ),
        notes if failed else [],
    )


class _Row(NamedTuple):
    line: int
    values: list[float]


def _rows(
    reader: Reader, header: list[str], columns: list[tuple[str, Cell]], faults: Faults
) -> Iterator[_Row]:
    """Every row whose cells can be read; the others become faults."""
    places = [(header.index(name), name, cell) for name, cell in columns]
    for cells in reader:
        if not cells:
            continue
        line = reader.line_num
        if len(cells) != len(header):
            faults.add(f"line {line}: expected {len(header)} cells, found {len(cells)}")
            continue
        values = []
        for place, name, cell in places:
            try:
                values.append(cell.read(cells[place]))
            except ValueError:
                faults.add(
                    f"line {line}, column {name}: expected {cell.wanted}, found {cells[place]!r}"
                )
        if len(values) == len(places):
            yield _Row(line, values)


def _arrival_cell(layout: TableFormat, unit_in_ms: float) -> Cell:
    if layout.arrival_is_date:
        return Cell("a date and time", _date_reader())
    return Cell("a finite number", lambda cell: _finite(cell, unit_in_ms))


def _whole(cell: str) -> int:
    """A whole number >= 0; ``374.0``, as some tools write it, is one too."""
    if cell.isdecimal() and cell.isascii():
        return int(cell)
    value = _finite(cell, 1.0)
    if value < 0 or value != int(value):
        raise ValueError(cell)
    return int(value)


def _finite(cell: str, unit_in_ms: float) -> float:
    if "_" in cell or not math.isfinite(float(cell)):
        raise ValueError(cell)
    return scaled(cell.strip(), unit_in_ms)


def _date_reader() -> Callable[[str], float]:
    """Reads dates as ms since the first one that it reads, to the microsecond."""
    origin: datetime | None = None

    def read(cell: str) -> float:
        nonlocal origin
        date = datetime.fromisoformat(cell.strip())
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        if origin is None:
            origin = date
        return (date - origin) / timedelta(milliseconds=1)

    return read


WHOLE = Cell("a whole number >= 0", _whole)
