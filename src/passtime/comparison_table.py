"""A comparison as a table: lines of text, and for a terminal as many tables as fit it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from passtime.comparison import Comparison, Row
from passtime.recording import coverage_percent
from passtime.tables import ABSENT, number, plain_table

# The name says what is counted.
_COUNTING_UNITS = ("requests", "times")

# Groups that say something of a few models only.
_OPTIONAL = ("coverage", "constants")

# Longer words of a heading are broken: a column is as wide as its figures need.
_LONGEST_WORD = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure, and how far it is from that of the first model."""

    figure: str
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: what it is, with its unit, and a cell per model."""

    group: str
    label: str
    cells: tuple[Cell, ...]


def table_lines(comparison: Comparison) -> list[Line]:
    """Every metric, the share of queries inside the measured range, and the constants found."""
    lines = [_metric_line(row) for row in comparison.rows()]
    return lines + _coverage_lines(comparison) + _constant_lines(comparison)


def _metric_line(row: Row) -> Line:
    label = row.name if row.unit in _COUNTING_UNITS else f"{row.name}, {row.unit}"
    cells = [Cell(number(row.values[0]))]
    for index in range(1, len(row.values)):
        percent = row.difference_percent(index)
        cells.append(Cell(number(row.values[index]), "" if percent is None else _signed(percent)))
    return Line(row.group, label, tuple(cells))


def _signed(percent: float) -> str:
    """Three digits that count are enough of a difference."""
    if abs(percent) >= 99.95:
        return f"{percent:+,.0f} %"
    return f"{round(percent, 1) + 0.0:+.1f} %"  # + 0.0: a tiny loss is no "-0.0 %"


def _coverage_lines(comparison: Comparison) -> list[Line]:
    shares = [coverage_percent(column.coverage) for column in comparison.columns]
    tags = next((list(known) for known in shares if known is not None), [])
    return [
        Line(
            "coverage",
            f"queries {tag}, %",
            tuple(Cell(number(None if known is None else known[tag])) for known in shares),
        )
        for tag in tags
    ]


def _constant_lines(comparison: Comparison) -> list[Line]:
    if not any(column.facts for column in comparison.columns):
        return []
    names = {"prefill_ms": "best prefill constant, ms", "decode_ms": "best decode constant, ms"}
    return [
        Line(
            "constants",
            name,
            tuple(Cell(number(column.facts.get(key))) for column in comparison.columns),
        )
        for key, name in names.items()
    ]


# --- In a terminal ------------------------------------------------------------------------------

_BETWEEN = 3  # a bar with a space on either side


def comparison_tables(comparison: Comparison, *, width: int) -> Iterator[Table]:
    """Tables of at most ``width`` characters, as far as one model at a time fits.

    No figure is folded; models that do not fit beside the others go below them.
    """
    lines = table_lines(comparison)
    columns = [
        _column(title, [line.cells[index] for line in lines])
        for index, title in enumerate(comparison.titles)
    ]
    room = width - max(len(line.label) for line in lines)
    for models in _side_by_side([len(column[-1]) for column in columns], room):
        yield _table(lines, columns, models)


def _column(title: str, cells: list[Cell]) -> list[str]:
    """Heading and cells of one model, figures and differences one under the other."""
    away = max(len(cell.difference) for cell in cells)
    texts = [cell.figure + (f"  {cell.difference:>{away}}" if away else "") for cell in cells]
    width = max(
        *(len(text) for text in texts),
        *(min(len(word), _LONGEST_WORD) for word in title.split()),
    )
    heading = [f"{part:>{width}}" for part in textwrap.wrap(title, width)]
    return ["\n".join(heading), *(f"{text:>{width}}" for text in texts)]


def _side_by_side(widths: list[int], room: int) -> Iterator[list[int]]:
    """Indices of the columns that fit in one table, at least one at a time."""
    fitting: list[int] = []
    taken = 0
    for index, width in enumerate(widths):
        if fitting and taken + width + _BETWEEN > room:
            yield fitting
            fitting, taken = [], 0
        fitting.append(index)
        taken += width + _BETWEEN
    yield fitting


def _table(lines: list[Line], columns: list[list[str]], models: list[int]) -> Table:
    table = plain_table()
    table.add_column("metric", no_wrap=True)
    for index in models:
        table.add_column(columns[index][0], no_wrap=True)
    shown = [
        (place, line)
        for place, line in enumerate(lines, start=1)
        if line.group not in _OPTIONAL or any(line.cells[i].figure != ABSENT for i in models)
    ]
    # The last line's "following" is itself: nothing ends there.
    for (place, line), (_, following) in zip(shown, [*shown[1:], shown[-1]], strict=True):
        cells = (columns[index][place] for index in models)
        table.add_row(line.label, *cells, end_section=line.group != following.group)
    return table
