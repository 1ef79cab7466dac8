"""Reading CSV and JSON lines, plain or gzip, with every fault named by line and column."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from passtime.errors import DocumentError

FAULTS_SHOWN = 20
_GZIP = b"\x1f\x8b"


@dataclass(slots=True)
class Faults:
    """Bad cells of one file, gathered; :meth:`refuse` raises if there were any."""

    source: str
    found: list[str] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        """Note one fault."""
        self.found.append(f"{self.source}:{line}: {message}")

    def refuse(self) -> None:
        """Raise DocumentError with the first faults, if there are any."""
        if self.found:
            more = len(self.found) - FAULTS_SHOWN
            shown = self.found[:FAULTS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise DocumentError("\n".join(shown))


@dataclass(slots=True)
class Row:
    """One row: its line, its cells by column, and where its faults go."""

    line: int
    cells: dict[str, Any]
    faults: Faults

    def number(self, *names: str, default: float | None = None) -> float:
        """The number in the first of ``names`` that the row has."""
        for name in names:
            if (value := self.cells.get(name)) not in (None, ""):
                try:
                    return float(value)
                except (TypeError, ValueError):
                    self.faults.add(self.line, f"{name}: expected a number, found {value!r}")
                    return 0.0
        if default is None:
            self.faults.add(self.line, f"{names[0]}: expected a number, found nothing")
        return default or 0.0

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number >= 0."""
        value = self.number(*names, default=default)
        if value < 0 or value != int(value):
            self.faults.add(self.line, f"{names[0]}: expected a whole number >= 0, found {value}")
            return 0
        return int(value)

    def duration(self, *names: str) -> float:
        """A time > 0, in the column's own unit."""
        value = self.number(*names)
        if not 0.0 < value < float("inf"):
            self.faults.add(self.line, f"{names[0]}: expected a time > 0, found {value}")
            return 1.0
        return value


def header_of(path: Path) -> list[str]:
    """Column names of a CSV file, or the keys of the first JSON line."""
    text = _text(path)
    if not text.strip():
        raise DocumentError(f"{path}: the file is empty")
    first = text.partition("\n")[0].strip()
    if first.startswith("{"):
        try:
            return list(json.loads(first))
        except ValueError as fault:
            raise DocumentError(f"{path}:1: not JSON: {fault}") from None
    return next(csv.reader([first]), [])


def rows(path: Path, faults: Faults) -> Iterator[Row]:
    """All rows of a CSV file with a header, or of JSON lines."""
    text = _text(path)
    if text.lstrip().startswith("{"):
        for line, raw in enumerate(text.splitlines(), start=1):
            if not raw.strip():
                continue
            try:
                cells = json.loads(raw)
            except ValueError as fault:
                faults.add(line, f"not JSON: {fault}")
                continue
            if isinstance(cells, dict):
                yield Row(line, cells, faults)
            else:
                faults.add(line, "expected a JSON object")
        return
    reader = csv.DictReader(io.StringIO(text))
    for cells in reader:
        if None in cells or None in cells.values():
            faults.add(reader.line_num, f"expected {len(reader.fieldnames or ())} columns")
            continue
        yield Row(reader.line_num, cells, faults)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except OSError as fault:
        raise DocumentError(f"{path}: {fault.strerror or fault}") from None
    except (EOFError, zlib.error, UnicodeDecodeError) as fault:
        raise DocumentError(f"{path}: cannot be read as text: {fault}") from None
