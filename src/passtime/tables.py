"""Reports as tables for people: every number with its unit."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

from passtime.sched.replay.report import DEFAULT_PERCENTILES, Report, Value, percentile_key

ABSENT = "–"

# A pipe has no width: rich would fold tables at 80 columns.
_PIPE_WIDTH = 200

LATENCY_NAMES = {
    "ttft_ms": "TTFT: first token after arrival",
    "ttst_ms": "TTST: second token after first",
    "tpot_ms": "TPOT: mean gap within a request",
    "itl_ms": "ITL: every gap between tokens",
    "e2e_latency_ms": "E2E: last token after arrival",
}


class _DataConsole(Console):
    """Leaves a closed pipe to the command line, which ends in peace; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the BrokenPipeError."""
        raise BrokenPipeError


def stdout_console() -> Console:
    """A console for data; tables keep their width in a pipe, unless COLUMNS says how wide.

    Text stays as it is: a file may be called ``[b].json``.
    """
    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _DataConsole(
        file=sys.stdout,
        width=None if sized else _PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def number(value: Value) -> str:
    """A figure with four digits that count; a dash where there is none."""
    if value is None:
        return ABSENT
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:,.0f}"
    for limit, digits in ((100, 1), (10, 2), (1, 3)):
        if magnitude >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4g}"


def plain_table(*, show_header: bool = True) -> Table:
    """A table without an outer frame: 80 columns are few."""
    return Table(show_header=show_header, show_edge=False, pad_edge=False)


def latency_table(report: Report, percentiles: tuple[float, ...]) -> Table:
    """Latencies in ms: mean, the percentiles, and the largest."""
    table = plain_table()
    table.add_column("latency, ms")
    statistics = {"mean": "mean"}
    statistics |= {percentile_key(p): f"p{p:g}" for p in percentiles or DEFAULT_PERCENTILES}
    statistics |= {"max": "max"}
    for name in statistics.values():
        table.add_column(name, justify="right", no_wrap=True)
    for metric, name in LATENCY_NAMES.items():
        table.add_row(name, *(number(report.summary[f"{key}_{metric}"]) for key in statistics))
    return table


def interval_table(report: Report, percentiles: tuple[float, ...]) -> Table:
    """How sure the latencies are: the range of each over draws of the timing model."""
    assert report.intervals is not None
    statistics = {"mean": "mean"}
    statistics |= {percentile_key(p): f"p{p:g}" for p in percentiles or DEFAULT_PERCENTILES}
    table = plain_table()
    table.add_column(f"{report.intervals.level_percent:g} % interval, ms")
    for name in statistics.values():
        table.add_column(name, justify="right", no_wrap=True)
    for metric, name in LATENCY_NAMES.items():
        ranges = [report.intervals.figures.get(f"{key}_{metric}") for key in statistics]
        table.add_row(
            name.partition(":")[0],
            *(f"{number(r.low)} … {number(r.high)}" if r else number(None) for r in ranges),
        )
    return table


_THROUGHPUT_ROWS = (
    ("request_throughput_rps", "request throughput", "requests/s"),
    ("input_throughput_tok_s", "input throughput", "tokens/s"),
    ("output_throughput_tok_s", "output throughput", "tokens/s"),
    ("mean_output_token_throughput_per_user", "output throughput per user", "tokens/s"),
    ("goodput_completed_requests", "good requests", "requests"),
    ("goodput_request_throughput_rps", "goodput", "requests/s"),
    ("goodput_output_throughput_tok_s", "goodput", "tokens/s"),
)
_POOL_ROWS = (
    ("prefill_worker_seconds", "time of prefill workers", "s"),
    ("decode_worker_seconds", "time of decode workers", "s"),
)


def run_table(report: Report) -> Table:
    """Requests, throughput and what the ranks did."""
    table = plain_table(show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    table.add_column("unit")
    summary, counts = report.summary, report.counts
    for name in ("arrived", "completed", "rejected", "incomplete", "failed", "canceled"):
        ended = counts[f"{name}_requests"]
        if ended or name not in ("failed", "canceled"):
            table.add_row(f"{name} requests", number(ended), "requests")
    seconds = summary["duration_ms"]
    assert isinstance(seconds, float)
    table.add_row("duration", number(seconds / 1000.0), "s")
    pooled = summary["prefill_gpus_per_worker"] != 0
    for key, name, unit in (*_THROUGHPUT_ROWS, *(_POOL_ROWS if pooled else ())):
        if key in summary:
            table.add_row(name, number(summary[key]), unit)
    table.add_row("GPU time", number(summary["gpu_hours"]), "h")
    reused = summary["prefix_cache_reused_ratio"]
    assert isinstance(reused, float)
    table.add_row("prompt tokens reused", number(reused * 100.0), "%")
    table.add_row("passes", number(counts["passes"]), "passes")
    table.add_row("preemptions", number(counts["preemptions"]), "times")
    return table
