"""How accurate the fit is, on public measurements: every figure held out.

    python benchmarks/accuracy.py [--json]

Mean absolute errors in percent. The rows fit the step law with the code of `passtime fit` on a few
spread-out points of a public table (times are never looked at in choosing them), averaged over the
stated seeds, and score all rows of the table that were not fitted. A row holds when
low <= value <= must; where the data are absent its value is null. Data: $PASSTIME_SHARED, default
../shared beside the repository. Two minutes on one core; exits with 1 if a row does not hold.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from falls import falls
from public_tables import CARDS, OPSUM, PublicTable, opsum, vidur_attention, whole_passes
from real_runs import real_run_errors

from passtime.calibrate.intervals import conformal
from passtime.calibrate.points import columns, latencies
from passtime.calibrate.validate import held_out
from passtime.errors import PasstimeError
from passtime.profiles.document import load_profile, shipped_profiles
from passtime.profiles.predict import Predictor

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One figure. ``worst`` is the worst table (or seed) behind a mean."""

    name: str
    unit: str
    value: float | None
    low: float
    must: float
    goal: float
    worst: float | None = None
    seeds: tuple[int, ...] = SEEDS

    @property
    def holds(self) -> bool:
        """Absent data break no promise."""
        return self.value is None or self.low <= self.value <= self.must


@dataclass(frozen=True)
class Wanted:
    """A row to compute: errors per table or seed, averaged."""

    name: str
    errors: Callable[[], list[float]]
    must: float
    goal: float
    low: float = 0.0
    unit: str = "% MAPE"
    seeds: tuple[int, ...] = SEEDS


def rows() -> Iterator[Row]:
    """Every row, in order, as it is computed."""
    wanted_rows = (*opsum_rows(), *table_rows(), *real_rows(), interval_row(), falls_row())
    for wanted in wanted_rows:
        errors: list[float] | None
        try:
            errors = wanted.errors()
        except (PasstimeError, FileNotFoundError):  # the data are not here
            errors = None
        yield Row(
            name=wanted.name,
            unit=wanted.unit,
            value=None if errors is None else round(float(np.mean(errors)), 3),
            low=wanted.low,
            must=wanted.must,
            goal=wanted.goal,
            worst=None if errors is None else round(max(errors), 3),
            seeds=wanted.seeds,
        )


def opsum_rows() -> Iterator[Wanted]:
    """Whole steps composed of measured operators, five model and GPU pairs."""
    for points, phase, must, goal in (
        (25, "prefill", 2.4, 2.0),
        (25, "decode", 2.1, 1.6),
        (100, "prefill", 1.6, 1.2),
        (100, "decode", 1.1, 0.8),
    ):
        yield Wanted(f"opsum, {points} points, {phase}", _interpolation(phase, points), must, goal)
    for name, phase, beyond, must, goal in (
        ("new tokens > 4096 withheld", "prefill", _new_tokens_over_4096, 2.6, 1.8),
        ("context > 8k withheld", "decode", _context_over_8k, 2.8, 2.0),
        ("decode batch > 64 withheld", "decode", _batch_over_64, 9.0, 5.0),
    ):
        yield Wanted(f"opsum, 100 points, {name}", _extrapolation(phase, beyond), must, goal)


def table_rows() -> Iterator[Wanted]:
    """Real vLLM batches as whole passes; an operator table."""
    for card, label in zip(CARDS, ("RTX PRO 6000", "RTX 4090"), strict=True):
        yield Wanted(f"llmservingsim whole passes, 200 points, {label} 8B", _passes(card), 4.2, 3.3)
    yield Wanted(
        "llmservingsim whole passes, trained below half of every axis, tested above",
        lambda: [_beyond_half(card, seed) for card in CARDS for seed in SEEDS],
        9.0,
        6.0,
    )
    for phase, must, goal in (("prefill", 3.3, 2.5), ("decode", 5.5, 4.5)):
        yield Wanted(f"vidur A100 70B attention, 200 points, {phase}", _vidur(phase), must, goal)


def real_rows() -> Iterator[Wanted]:
    """Real servers, per request; the front end's delay from the other run."""
    for figure, bounds in (
        ("e2e", ((3.5, 1.8), (2.5, 1.0))),
        ("ttft", ((19.0, 14.0), (7.5, 4.5))),
        ("tpot", ((3.6, 1.5), (7.0, 3.0))),
    ):
        for card, label, (must, goal) in zip(
            CARDS, ("RTX PRO 6000", "RTX 4090"), bounds, strict=True
        ):
            yield Wanted(
                f"real vLLM run, {label} 8B, {figure.upper()} per request",
                _real(card, figure),
                must,
                goal,
                seeds=(0,),
            )


def _real(card: str, figure: str) -> Callable[[], list[float]]:
    return lambda: [real_run_errors(card)[figure]]


def interval_row() -> Wanted:
    """Coverage of the 90 % intervals on points that were never fitted."""
    return Wanted(
        "90 % intervals, held-out points inside",
        lambda: list(_coverages()),
        must=96.0,
        goal=93.0,
        low=85.0,
        unit="% of points",
        seeds=(0,),
    )


def falls_row() -> Wanted:
    """Steps that add work to a pass and lower its prediction, up to four times the box."""
    return Wanted(
        "falls in dense sweeps",
        lambda: list(_fallen()),
        must=0.0,
        goal=0.0,
        unit="steps",
        seeds=(0,),
    )


def _fallen() -> Iterator[float]:
    predictors = [Predictor.of(load_profile(name)) for name in shipped_profiles()]
    for card in CARDS:
        table = whole_passes(card)
        rows = table.spread_out(np.arange(len(table.points)), 200, 0)
        predictors.append(table.fit(rows).predictor())
    for predictor in predictors:
        swept = falls(predictor, steps=100_000, seed=0).values()
        yield float(sum(step.falls + step.unusable for step in swept))


def _pools(table: PublicTable, phase: str) -> np.ndarray:
    return np.flatnonzero(table.regime == phase)


def _interpolation(phase: str, points: int) -> Callable[[], list[float]]:
    def errors() -> list[float]:
        found = []
        for pair in OPSUM:
            table = opsum(pair)
            pool = _pools(table, phase)
            found.append(float(np.mean([_inside(table, pool, points, seed) for seed in SEEDS])))
        return found

    return errors


def _inside(table: PublicTable, pool: np.ndarray, points: int, seed: int) -> float:
    fitted = table.spread_out(pool, points, seed)
    return table.mape(table.fit(fitted), np.setdiff1d(pool, fitted))


def _extrapolation(
    phase: str, beyond: Callable[[PublicTable], np.ndarray]
) -> Callable[[], list[float]]:
    def errors() -> list[float]:
        found = []
        for pair in OPSUM:
            table = opsum(pair)
            pool, outside = _pools(table, phase), beyond(table)
            trained, tested = pool[~outside[pool]], pool[outside[pool]]
            found.append(
                float(
                    np.mean(
                        [
                            table.mape(table.fit(table.spread_out(trained, 100, seed)), tested)
                            for seed in SEEDS
                        ]
                    )
                )
            )
        return found

    return errors


def _new_tokens_over_4096(table: PublicTable) -> np.ndarray:
    """New tokens of the whole pass."""
    return table.sizes[:, 0] * table.sizes[:, 1] > 4096


def _context_over_8k(table: PublicTable) -> np.ndarray:
    return table.sizes[:, 4] > 8192 + 1  # the new token included


def _batch_over_64(table: PublicTable) -> np.ndarray:
    return table.sizes[:, 3] > 64


def _passes(card: str) -> Callable[[], list[float]]:
    def errors() -> list[float]:
        table = whole_passes(card)
        everything = np.arange(len(table.points))
        return [_inside(table, everything, 200, seed) for seed in SEEDS]

    return errors


def _beyond_half(card: str, seed: int) -> float:
    table = whole_passes(card)
    below = (table.sizes <= table.sizes.max(axis=0) / 2.0)[:, 1:].all(axis=1)
    fitted = table.spread_out(np.flatnonzero(below), 200, seed)
    return table.mape(table.fit(fitted), np.flatnonzero(~below))


def _vidur(phase: str) -> Callable[[], list[float]]:
    def errors() -> list[float]:
        table = vidur_attention()
        return [_inside(table, _pools(table, phase), 200, seed) for seed in SEEDS]

    return errors


def _coverages() -> Iterator[float]:
    for pair in OPSUM:
        for phase in ("prefill", "decode"):
            table = opsum(pair)
            yield _coverage(table, _pools(table, phase), 100)
    for card in CARDS:
        table = whole_passes(card)
        yield _coverage(table, np.arange(len(table.points)), 200)
    for phase in ("prefill", "decode"):
        table = vidur_attention()
        yield _coverage(table, _pools(table, phase), 200)


def _coverage(table: PublicTable, pool: np.ndarray, points: int) -> float:
    """Percent of the rest of ``pool`` inside the interval of a fit to ``points`` of it."""
    rows = table.spread_out(pool, points, 0)
    fitted, core = table.chosen(rows), table.fit(rows)
    intervals = conformal(fitted, latencies(fitted), held_out(core, fitted), {})
    assert intervals is not None
    tested = table.chosen(np.setdiff1d(pool, rows))
    passes = columns(tested)
    width = np.array([intervals.width[point.regime] for point in tested])
    half = width * np.maximum(core.spread(passes), intervals.floor)
    off = np.abs(np.log(latencies(tested) / core.predictor().pass_many_ms(passes)))
    return float(100.0 * (off <= half).mean())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    computed = []
    for row in rows():
        computed.append(row)
        print(_line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in computed]}, indent=2))
    return 0 if all(row.holds for row in computed) else 1


def _line(row: Row) -> str:
    if row.value is None:
        return f"{row.name}: no data"
    bounds = f"must {row.low:g} … {row.must:g}" if row.low else f"must {row.must:g}"
    met = "goal met" if row.value <= row.goal else "holds" if row.holds else "DOES NOT HOLD"
    return (
        f"{row.name}: {row.value:.2f} {row.unit} (worst {row.worst:.2f}; {bounds}, "
        f"goal {row.goal:g}; seeds {', '.join(map(str, row.seeds))}): {met}"
    )


if __name__ == "__main__":
    sys.exit(main())
