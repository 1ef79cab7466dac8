"""The core of a fit: law, then residual; what a profile predicts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passtime.calibrate.laws import Bench, LawFit, fit_law
from passtime.calibrate.points import columns, latencies, measured_box, sigmas
from passtime.calibrate.residual import Surface, fit_surface
from passtime.calibrate.slack import slack
from passtime.calibrate.tabulate import grid_lines, tabulate
from passtime.profiles.document import AxisName, MeasuredPoint, Range, Regime, Residual
from passtime.profiles.law import Law
from passtime.profiles.predict import PassColumns, Predictor
from passtime.sched.timing import FloatArray

MIN_RESIDUAL_POINTS = 8  # fewer say nothing about what the law misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A fitted law and its residual tables. ``surface`` is None for classes without a residual."""

    bench: Bench
    law: LawFit
    surface: Surface | None
    box: Mapping[Regime, Mapping[AxisName, Range]]
    residual: Mapping[Regime, Residual]

    def predictor(self) -> Predictor:
        """What answers with this fit."""
        return Predictor(
            model=self.bench.model,
            engine=self.bench.engine,
            coefficients=self.law.coefficients,
            box=self.box,
            residual=self.residual,
        )

    def spread(self, passes: PassColumns) -> FloatArray:
        """Uncertainty of ln(time) up to the intervals' width; 1 where no surface can say."""
        if self.surface is None:
            return np.ones(len(passes.prefill_pairs))
        law = Law(self.bench.work, self.law.coefficients, self.bench.engine)
        return self.surface.uncertainty(self.surface.spread(_effective(law, passes)))


def fit_core(bench: Bench, points: Sequence[MeasuredPoint], *, like: Core | None = None) -> Core:
    """Fit law and residual to ``points``.

    ``like``: an earlier fit of similar points; its law is where the search starts and its kernels
    are kept, which makes the refits of a validation cheap.
    """
    graphs = bench.engine.graph_sizes
    passes, latency, sigma = columns(points, graphs), latencies(points), sigmas(points)
    fitted = fit_law(bench, passes, latency, sigma, start=None if like is None else like.law.theta)
    box = measured_box(points, graphs)
    if bench.model_class != "step" or len(points) < MIN_RESIDUAL_POINTS:
        return Core(bench=bench, law=fitted, surface=None, box=box, residual={})
    law = Law(bench.work, fitted.coefficients, bench.engine)
    bare = Predictor(
        model=bench.model,
        engine=bench.engine,
        coefficients=fitted.coefficients,
        box=box,
        residual={},
    )
    surface = fit_surface(
        _effective(law, passes),
        np.log(latency / bare.pass_many_ms(passes)),
        sigma,
        theta=None if like is None or like.surface is None else like.surface.theta,
    )
    residual = dict[Regime, Residual]()
    for regime, edges in box.items():
        lines = grid_lines(surface, regime, box, bench.engine.timed_part)
        residual[regime] = tabulate(surface, lines, edges, slack(law, regime, lines, box))
    return Core(bench=bench, law=fitted, surface=surface, box=box, residual=residual)


def _effective(law: Law, passes: PassColumns) -> PassColumns:
    """The passes with KV tokens as they cost, which is where tables are looked up."""
    _, _, _, _, decodes, kv_tokens, longest = passes
    return passes._replace(decode_kv_tokens=law.effective_kv(decodes, kv_tokens, longest))
