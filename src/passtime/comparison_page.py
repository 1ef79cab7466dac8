"""A comparison as one self-contained HTML page: the sentence, the latencies drawn, the table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from passtime.comparison import Comparison
from passtime.comparison_drawing import colours, drawing
from passtime.comparison_table import Line, table_lines
from passtime.errors import InputError

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>passtime compare</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; margin-bottom: 0; }
.subject, .note, footer, .away { color: #595959; }
.subject { margin-top: 0; }
.verdict { font-size: 1.15rem; font-weight: 600; }
.caveats { border-left: 3px solid #d55e00; padding-left: .8rem; list-style: none; }
.scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .15rem .8rem; text-align: right; vertical-align: bottom; }
thead th { white-space: normal; border-bottom: 2px solid; }
tbody { border-bottom: 1px solid #ccc; }
tbody th, thead th:first-child { text-align: left; font-weight: 400; }
.away { display: inline-block; min-width: 4.2rem; font-size: .85em; }
.line { display: inline-block; width: 2rem; border-top: 3px solid; vertical-align: middle; }
.dashed { border-top-style: dashed; }
th .line { display: block; width: auto; margin-bottom: .2rem; }
.key span { white-space: nowrap; margin-right: 1.5rem; }
.key .line { margin-right: .4rem; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85em; }
</style>
<h1>One workload under $models timing models</h1>
<p class="subject">$subject</p>
<p class="verdict">$verdict</p>
$caveats
<p class="key">$key</p>
$drawing
<p class="note">Over 99, a curve is as high as the latency that 99 % of the samples keep. Axes that
are not evenly spaced are logarithmic: equal distances are equal ratios.</p>
<div class="scroll">
<table>
$table
</table>
</div>
<footer>
<p>Percentages are differences to the first model. Constants spend the same total time as the model
they stand for, on this workload.</p>
$inputs
</footer>
</html>
""")


def require_matplotlib() -> None:
    """Raise InputError, before any work is done, if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError("--html draws with matplotlib: pip install 'passtime[report]'")


def page(comparison: Comparison, inputs: Mapping[str, Any] | None = None) -> str:
    """The page; it loads nothing from anywhere. Equal comparisons give equal pages.

    ``inputs`` is what the report repeats of what was asked for; the page shows it.
    """
    return _PAGE.substitute(
        models=len(comparison.columns),
        subject=escape(_subject(comparison, inputs or {})),
        verdict=escape(comparison.verdict()),
        caveats=_caveats(comparison.caveats()),
        key="".join(f"<span>{heading}</span>" for heading in _headings(comparison)),
        drawing=drawing(comparison),
        table=_table(comparison),
        inputs=_details(inputs),
    )


def _subject(comparison: Comparison, inputs: Mapping[str, Any]) -> str:
    """What was replayed, and on what."""
    requests = len(comparison.columns[0].outcome.status)
    parts = [f"{requests:,} request{'' if requests == 1 else 's'}"]
    if "trace" in inputs:
        parts.append(f"of {Path(inputs['trace']['path']).name}")
    concurrency = inputs.get("replay", {}).get("concurrency")
    if "workload" in inputs:
        load = inputs["workload"]
        rate = load["request_rate"]
        pace = "all at once" if rate == "inf" else f"{rate:g} per second"
        parts.append(f"({load['kind']}{'' if concurrency else f', {pace}'})")
    if concurrency:
        parts.append(f"with {concurrency} in flight")
    if "prefill_engine" in inputs:
        backend = inputs["prefill_engine"]["engine"]["backend"]
        parts.append(f"through a prefill and a decode pool, {backend} scheduling")
    elif "engine" in inputs:
        parts.append(f"through workers with {inputs['engine']['engine']['backend']} scheduling")
    return " ".join(parts)


def _caveats(sentences: list[str]) -> str:
    if not sentences:
        return ""
    return f'<ul class="caveats">{"".join(f"<li>{escape(text)}" for text in sentences)}</ul>'


def _headings(comparison: Comparison) -> list[str]:
    """The name of each model under a piece of its line."""
    columns = zip(comparison.columns, comparison.titles, colours(comparison), strict=True)
    return [
        f'<span class="line{" dashed" if column.is_constants else ""}" '
        f'style="border-color: {colour}"></span>{escape(title)}'
        for column, title, colour in columns
    ]


def _table(comparison: Comparison) -> str:
    headings = "".join(f"<th>{heading}</th>" for heading in _headings(comparison))
    parts = [f"<thead><tr><th>metric</th>{headings}</tr></thead>"]
    for _, rows in groupby(table_lines(comparison), key=lambda line: line.group):
        parts.append("\n<tbody>")
        parts += [_row(row) for row in rows]
    return "".join(parts)


def _row(line: Line) -> str:
    first, *others = line.cells
    cells = "".join(
        f'<td>{escape(cell.figure)} <span class="away">{escape(cell.difference)}</span></td>'
        for cell in others
    )
    return f"\n<tr><th>{escape(line.label)}</th><td>{escape(first.figure)}</td>{cells}</tr>"


def _details(inputs: Mapping[str, Any] | None) -> str:
    if inputs is None:
        return ""
    text = msgspec.json.format(msgspec.json.encode(inputs), indent=2).decode()
    summary = "<summary>Everything that was asked for</summary>"
    return f"<details>{summary}<pre>{escape(text)}</pre></details>"
