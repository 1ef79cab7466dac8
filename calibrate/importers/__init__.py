"""Importers: other people's measurements as measured points.

Every importer answers with an :class:`ImportedTable`; :func:`read_table` picks the importer by the
file's header. A further format is a module with ``recognises(header)`` and ``read(path)``, named in
``_FORMATS``.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from passtime.calibrate.importers.table import ImportedTable
from passtime.calibrate.importers.textfile import header_of
from passtime.errors import DocumentError

_FORMATS = ("vidur", "llmservingsim", "opsum", "passes")

__all__ = ["ImportedTable", "read_table"]


def read_table(path: Path) -> ImportedTable:
    """The table at ``path`` (CSV or JSON lines, gzip or plain); DocumentError names every fault."""
    header = header_of(path)
    for name in _FORMATS:
        module = importlib.import_module(f"passtime.calibrate.importers.{name}")
        if module.recognises(header):
            table: ImportedTable = module.read(path)
            return table
    raise DocumentError(
        f"{path}: no importer knows these columns: {', '.join(header[:12])}; a pass log has "
        "new_tokens, prefix_tokens, decodes, kv_tokens, latency_ms"
    )
