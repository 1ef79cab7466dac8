"""The latencies of a comparison, drawn by percentile."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from passtime.comparison import LATENCIES, Comparison
from passtime.sched.replay.metrics import Distribution, distributions
from passtime.sched.timing import FloatArray
from passtime.timing_spec import BestConstants

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 400

# Okabe and Ito (2008): told apart by every kind of colour vision.
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")

# The tail is where waiting users are: each step to the right is a tenth of the samples before it.
_PERCENTILES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)

# Beyond this, one axis cannot show small and large without a logarithm.
_WIDE = 4.0


def colours(comparison: Comparison) -> list[str]:
    """One per column; constants take that of the model they stand for."""
    chosen: dict[str, str] = {}
    found = []
    for column in comparison.columns:
        spec = column.spec.source if isinstance(column.spec, BestConstants) else column.spec
        if spec.text not in chosen:
            chosen[spec.text] = _PALETTE[len(chosen) % len(_PALETTE)]
        found.append(chosen[spec.text])
    return found


def drawing(comparison: Comparison) -> str:
    """Latency by percentile, one panel per metric, as an SVG element.

    Every curve ends at the percentile that its number of samples can tell.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    found = [distributions(column.outcome) for column in comparison.columns]
    # Text stays text, and ids depend on nothing but the drawing.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "passtime"}):
        figure = Figure(figsize=(11, 7), layout=ConstrainedLayoutEngine(hspace=0.06, wspace=0.04))
        panels = figure.subplots(2, 2).flat
        for panel, (metric, name) in zip(panels, LATENCIES.items(), strict=True):
            _panel(panel, comparison, [of_column[metric] for of_column in found])
            panel.set_title(name, fontweight="bold")
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :].replace(
        "<svg", '<svg role="img" aria-label="Latency by percentile"', 1
    )


def _panel(panel: Axes, comparison: Comparison, found: list[Distribution]) -> None:
    curves = [_curve(distribution) for distribution in found]
    columns = zip(curves, comparison.columns, colours(comparison), strict=True)
    for index, ((places, latencies), column, colour) in enumerate(columns):
        panel.plot(
            places,
            latencies,
            color=colour,
            linestyle="--" if column.is_constants else "-",
            linewidth=max(1.2, 3.2 - 0.6 * index),  # equal curves: the first shows on both sides
        )
    drawn = np.concatenate([latencies for _, latencies in curves])
    drawn = drawn[drawn > 0]
    if not drawn.size:
        panel.text(0.5, 0.5, "no samples", ha="center", transform=panel.transAxes)
    elif drawn.max() / drawn.min() > _WIDE:
        _logarithmic(panel, wide=drawn.max() / drawn.min() > 100.0)
    else:
        panel.set_ylim(0.0, drawn.max() * 1.08)
    last = max((places[-1] for places, _ in curves if len(places)), default=1.0)
    shown = [percent for percent in _PERCENTILES if _place(percent) <= last]
    panel.set_xticks([_place(percent) for percent in shown], [f"{p:g}" for p in shown])
    panel.set_xlabel("percentile")
    panel.set_ylabel("ms")
    panel.grid(alpha=0.3)


def _logarithmic(panel: Axes, *, wide: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log", nonpositive="mask")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _place(percent: float) -> float:
    """Where a percentile stands on the axis: the number of nines."""
    return -math.log10(1.0 - percent / 100.0)


def _curve(distribution: Distribution) -> tuple[FloatArray, FloatArray]:
    """Places and latencies of evenly placed percentiles; nothing for no samples.

    The largest of n samples stands where 1/n of them are left.
    """
    size = distribution.size
    if not size:
        return np.empty(0), np.empty(0)
    last = min(math.log10(size), _place(_PERCENTILES[-1]))
    places = np.linspace(0.0, last, _POINTS)
    latencies = []
    for place in places.tolist():
        below = 1.0 - 10.0**-place
        # of n samples, n - 1 can have one above
        percent = min(100.0, below * size / max(size - 1, 1) * 100.0)
        value = distribution.percentile(percent)
        assert value is not None
        latencies.append(value)
    return places, np.array(latencies)
