"""A comparison as one self-contained HTML page: the table, and the latencies drawn."""

from __future__ import annotations

import io
from html import escape
from importlib.util import find_spec
from string import Template

import numpy as np

from passtime.comparison import LATENCIES, Comparison
from passtime.errors import InputError
from passtime.sched.replay.metrics import Distribution, distributions
from passtime.sched.timing import FloatArray
from passtime.tables import comparison_cells

_POINTS = 400

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>passtime compare</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.verdict { font-size: 1.15rem; font-weight: 600; }
svg { max-width: 100%; height: auto; }
</style>
<h1>One workload under $models timing models</h1>
<p class="verdict">$verdict</p>
$drawing
<table>
$rows
</table>
<p>$requests requests. Differences are to the first model.</p>
</html>
""")


def require_matplotlib() -> None:
    """Raise InputError, before any work is done, if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError("--html draws with matplotlib: pip install 'passtime[report]'")


def page(comparison: Comparison) -> str:
    """The page; it loads nothing from anywhere. Equal comparisons give equal pages."""
    header, *rows = comparison_cells(comparison)
    lines = [_line("th", header), *(_line("td", row) for row in rows)]
    return _PAGE.substitute(
        models=len(comparison.columns),
        verdict=escape(comparison.verdict()),
        drawing=_drawing(comparison),
        rows="\n".join(lines),
        requests=len(comparison.columns[0].outcome.status),
    )


def _line(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _drawing(comparison: Comparison) -> str:
    """Share of the samples below each latency, one panel per metric, as an SVG element."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and ids depend on nothing but the drawing.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "passtime"}):
        figure = Figure(figsize=(12, 3.2), layout="constrained")
        panels = figure.subplots(1, len(LATENCIES), sharey=True)
        found = [distributions(column.outcome) for column in comparison.columns]
        for panel, (metric, name) in zip(panels, LATENCIES.items(), strict=True):
            drawn = zip(comparison.columns, comparison.titles, found, strict=True)
            for column, title, of_column in drawn:
                panel.plot(
                    _curve(of_column[metric]),
                    np.linspace(0.0, 100.0, _POINTS),
                    label=title,
                    linestyle="--" if column.is_constants else "-",
                )
            panel.set_title(name)
            panel.set_xlabel("ms")
            panel.locator_params(axis="x", nbins=4)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("% of samples below")
        panels[-1].legend(fontsize="small")
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def _curve(distribution: Distribution) -> FloatArray:
    """Latencies at evenly spaced percentiles; empty panels draw nothing."""
    percents = np.linspace(0.0, 100.0, _POINTS)
    values = [distribution.percentile(percent) for percent in percents.tolist()]
    return np.array([np.nan if value is None else value for value in values])
