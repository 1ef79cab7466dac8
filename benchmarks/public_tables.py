"""The public tables that the accuracy rows are computed from, and designs of points to fit on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from passtime.calibrate.core import Core, fit_core
from passtime.calibrate.importers import ImportedTable, llmservingsim, read_table
from passtime.calibrate.laws import Bench
from passtime.calibrate.points import columns, latencies
from passtime.profiles.document import MeasuredPoint, ModelClass
from passtime.sched.timing import FloatArray

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("PASSTIME_SHARED") or ROOT.parent / "shared")

OPSUM = (
    "llama-3.1-70b__h200_sxm__vllm__tp4",
    "llama-3.1-8b__a100_sxm__vllm__tp1",
    "llama-3.1-8b__b200_sxm__vllm__tp1",
    "llama-3.1-8b__h100_sxm__vllm__tp1",
    "llama-3.1-8b__h200_sxm__vllm__tp1",
)
CARDS = ("RTXPRO6000", "RTX4090")


@dataclass(frozen=True)
class PublicTable:
    """A table and what a fit needs to know of it."""

    table: ImportedTable

    @property
    def points(self) -> Sequence[MeasuredPoint]:
        """All rows."""
        return self.table.points

    def bench(self, model_class: ModelClass = "step") -> Bench:
        """The measured system."""
        model, device = self.table.model, self.table.device
        assert model is not None
        assert device is not None
        return Bench(model=model, engine=self.table.engine, device=device, model_class=model_class)

    @cached_property
    def sizes(self) -> FloatArray:
        """Per row: prompts, new and prefix tokens per prompt, decodes, mean and longest KV."""
        n, new, prefix, _, decodes, kv_tokens, longest = columns(self.points)
        each = np.maximum(n, 1.0)
        mean = kv_tokens / np.maximum(decodes, 1.0)
        return np.stack([n, new / each, prefix / each, decodes, mean, longest], axis=1)

    @cached_property
    def regime(self) -> np.ndarray:
        """prefill, decode or mixed, per row."""
        return np.array([point.regime for point in self.points])

    def chosen(self, rows: Sequence[int] | np.ndarray) -> list[MeasuredPoint]:
        """The points of some rows."""
        return [self.points[row] for row in rows]

    def spread_out(self, pool: np.ndarray, count: int, seed: int) -> np.ndarray:
        """``count`` rows of ``pool``, each the farthest from those before it in log sizes.

        Seed 0 starts in the smallest corner, others at random. Times are never looked at.
        """
        places = np.log2(1.0 + self.sizes[pool])
        places = (places - places.min(axis=0)) / (np.ptp(places, axis=0) + 1e-12)
        start = int(np.argmin(places.sum(axis=1)))
        if seed:
            start = int(np.random.default_rng(seed).integers(len(pool)))
        taken = [start]
        distance = np.linalg.norm(places - places[start], axis=1)
        while len(taken) < min(count, len(pool)):
            taken.append(int(np.argmax(distance)))
            distance = np.minimum(distance, np.linalg.norm(places - places[taken[-1]], axis=1))
        return pool[taken]

    def fit(self, rows: np.ndarray) -> Core:
        """The product's fit of these rows."""
        return fit_core(self.bench(), self.chosen(rows))

    def mape(self, core: Core, rows: np.ndarray) -> float:
        """Mean absolute error of a fit on rows, in percent."""
        points = self.chosen(rows)
        predicted = core.predictor().pass_many_ms(columns(points))
        return float(100.0 * np.abs(predicted / latencies(points) - 1.0).mean())


@cache
def opsum(pair: str) -> PublicTable:
    """One model on one system, composed of measured operators."""
    return PublicTable(read_table(SHARED / f"data/aic/opsum/opsum__{pair}.csv.gz"))


@cache
def whole_passes(card: str) -> PublicTable:
    """vLLM's whole passes with mixed batches, Llama-3.1-8B."""
    folder = SHARED / f"data/llmservingsim/perf/{card}/Llama-3.1-8B/tp1"
    return PublicTable(llmservingsim.whole_passes(folder))


@cache
def vidur_attention() -> PublicTable:
    """Attention of a 70B geometry at TP 2 on an A100."""
    name = "data/vidur/compute/a100/Llama-2-70b-hf/attention_tp2_kineto_2024-05.csv.gz"
    return PublicTable(read_table(SHARED / name))
