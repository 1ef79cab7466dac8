"""One workload under several timing models, side by side, and where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from passtime.deployment import Deployment, Timing, launches, replay_on
from passtime.errors import InputError
from passtime.profiles.document import load_profile
from passtime.profiles.predict import HELD
from passtime.recording import (
    ENOUGH_INSIDE_PERCENT,
    CoveredModel,
    Recording,
    coverage_percent,
    record,
)
from passtime.sched.replay.metrics import Slo
from passtime.sched.replay.outcome import Outcome
from passtime.sched.replay.report import (
    DEFAULT_PERCENTILES,
    Value,
    counts,
    percentile_key,
    summary,
)
from passtime.sched.simulate import ReplayOptions
from passtime.sched.workload.rows import Workload
from passtime.timing_spec import (
    AskedTiming,
    BestConstants,
    EngineTiming,
    ProfileSpec,
    TimingSpec,
    parse_timing,
)

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_latency_ms": "E2E"}
THROUGHPUTS = {
    "request_throughput_rps": ("throughput", "requests/s"),
    "output_throughput_tok_s": ("output throughput", "tokens/s"),
}
GOODPUTS = {
    "goodput_completed_requests": ("good requests", "requests"),
    "goodput_request_throughput_rps": ("goodput", "requests/s"),
    "goodput_output_throughput_tok_s": ("goodput", "tokens/s"),
}

# Below this the last digits differ, not the models.
SAME_PERCENT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One model's replay.

    ``facts``     what was resolved on the way, such as constants.
    ``coverage``  queries inside, held at the edge of and beyond the measured range; None where the
                  model cannot tell.
    """

    spec: TimingSpec
    summary: dict[str, Value]
    counts: dict[str, int]
    outcome: Outcome
    facts: dict[str, float] = field(default_factory=dict)
    coverage: dict[str, int] | None = None

    @property
    def label(self) -> str:
        """How the model is typed."""
        return self.spec.text

    @property
    def is_constants(self) -> bool:
        """Whether two constants stand for another model."""
        return isinstance(self.spec, BestConstants)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric, one value per column; rows of one ``group`` stand together.

    ``judged`` rows may decide where the models part.
    """

    key: str
    name: str
    unit: str
    group: str
    values: tuple[float | None, ...]
    judged: bool = True

    def difference_percent(self, index: int, base: int = 0) -> float | None:
        """How far column ``index`` is from ``base``; None where that is not defined."""
        value, reference = self.values[index], self.values[base]
        if value is None or not reference:
            return None
        return (value / reference - 1.0) * 100.0


@dataclass(frozen=True, slots=True)
class Parting:
    """The metric in which two columns differ most."""

    row: Row
    base: int
    other: int
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Columns in the order of the command line; differences are to the first."""

    columns: tuple[Column, ...]
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    slo: Slo | None = None

    @property
    def titles(self) -> list[str]:
        """Short names of the columns; as typed where short ones would not tell them apart."""
        titles = [column.spec.title for column in self.columns]
        labels = [column.label for column in self.columns]
        return titles if len(set(titles)) == len(titles) else labels

    def rows(self) -> list[Row]:
        """Every metric that is compared."""
        statistics = {"mean": "mean", **{percentile_key(p): f"p{p:g}" for p in self.percentiles}}
        rows = [
            self._row(f"{key}_{metric}", f"{statistic} {name}", "ms", name)
            for metric, name in LATENCIES.items()
            for key, statistic in statistics.items()
        ]
        rows += [self._row(key, *described, "throughput") for key, described in THROUGHPUTS.items()]
        if self.slo is not None:
            rows += [self._row(key, *described, "goodput") for key, described in GOODPUTS.items()]
        rows.append(self._count("completed_requests", "completed requests", "requests"))
        rows.append(self._count("preemptions", "preemptions", "times"))
        return rows

    def _row(self, key: str, name: str, unit: str, group: str) -> Row:
        values = [column.summary[key] for column in self.columns]
        numbers = tuple(v if isinstance(v, (int, float)) else None for v in values)
        return Row(key, name, unit, group, numbers)

    def _count(self, key: str, name: str, unit: str) -> Row:
        values = tuple(column.counts[key] for column in self.columns)
        return Row(key, name, unit, "counts", values, judged=False)

    def parting(self) -> Parting | None:
        """Where the models differ most; None if they agree.

        Constants are held against the model that they stand for. Only without constants of a
        model that is shown is everything held against the first column.
        """
        labels = [column.label for column in self.columns]
        pairs = [
            (labels.index(column.spec.source.text), index)
            for index, column in enumerate(self.columns)
            if isinstance(column.spec, BestConstants) and column.spec.source.text in labels
        ] or [(0, index) for index in range(1, len(self.columns))]
        found = [
            Parting(row, base, other, percent)
            for row in self.rows()
            if row.judged
            for base, other in pairs
            if (percent := row.difference_percent(other, base)) is not None
        ]
        widest = max(found, key=_width, default=None)
        return widest if widest and abs(widest.percent) >= SAME_PERCENT else None

    def verdict(self) -> str:
        """One sentence: where the models part, and in which direction."""
        if not any(column.counts["completed_requests"] for column in self.columns):
            return "No request completed under any model: there is nothing to compare."
        parting = self.parting()
        if parting is None:
            return "The models agree on every metric."
        row, percent = parting.row, parting.percent
        found = ", ".join(
            f"{row.values[index]:,.4g} {row.unit} under {self.titles[index]}"
            for index in (parting.base, parting.other)
        )
        if not self.columns[parting.other].is_constants:
            return f"The models part most at {row.name} ({percent:+.1f} %): {found}."
        if row.unit == "ms" and percent < 0:
            return f"Constants hide {-percent:.1f} % of {row.name}: {found}."
        verb = "overstate" if percent > 0 else "understate"
        return f"Constants {verb} {row.name} by {abs(percent):.1f} %: {found}."

    def caveats(self) -> list[str]:
        """What to bear in mind: requests that are missing, answers from beyond the measurements."""
        missing, outside = [], []
        for title, column in zip(self.titles, self.columns, strict=True):
            arrived, completed = (column.counts[f"{n}_requests"] for n in ("arrived", "completed"))
            if completed < arrived:
                missing.append(f"{arrived - completed:,} of {arrived:,} under {title}")
            shares = coverage_percent(column.coverage)
            if shares is not None and shares["inside"] < ENOUGH_INSIDE_PERCENT:
                outside.append(
                    f"{100.0 - shares['inside']:.1f} % of those to {title} "
                    f"({shares['extrapolated']:.1f} % by a factor of more than {HELD:g})"
                )
        sentences = []
        if missing:
            sentences.append(f"Requests that did not complete are in no figure: {_list(missing)}.")
        if outside:
            sentences.append(f"Queries outside the measured range: {_list(outside)}.")
        return sentences

    def document(self, inputs: dict[str, Any]) -> ComparisonDocument:
        """What ``--json`` prints; ``inputs`` is kept as it is."""
        return ComparisonDocument(
            inputs=inputs,
            verdict=self.verdict(),
            caveats=self.caveats(),
            columns=[
                ColumnDocument(
                    timing=column.label,
                    facts=column.facts,
                    summary=column.summary,
                    counts=column.counts,
                    coverage=column.coverage,
                )
                for column in self.columns
            ],
            rows=[
                RowDocument(
                    key=row.key,
                    unit=row.unit,
                    values=list(row.values),
                    difference_percent=[row.difference_percent(i) for i in range(len(row.values))],
                )
                for row in self.rows()
            ],
        )


def _list(parts: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _width(parting: Parting) -> float:
    """How wide a gap is, the same for half as for double."""
    ratio = 1.0 + parting.percent / 100.0
    return abs(math.log(ratio)) if ratio > 0 else math.inf


class ColumnDocument(Struct, frozen=True, kw_only=True):
    """One model: the report's summary and counts, and where its queries lay."""

    timing: str
    facts: dict[str, float]
    summary: dict[str, Value]
    counts: dict[str, int]
    coverage: dict[str, int] | None


class RowDocument(Struct, frozen=True, kw_only=True):
    """One metric: a value per column, and how far each is from the first."""

    key: str
    unit: str
    values: list[float | None]
    difference_percent: list[float | None]


class ComparisonDocument(Struct, frozen=True, kw_only=True):
    """The document of a comparison; equal inputs and seed give equal bytes."""

    schema: int = SCHEMA
    inputs: dict[str, Any]
    verdict: str
    caveats: list[str]
    columns: list[ColumnDocument]
    rows: list[RowDocument]

    def to_json(self) -> bytes:
        """The document as indented JSON, ending in a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


# --- Running it ---------------------------------------------------------------------------------


def compare(
    workload: Workload,
    deployment: Deployment,
    specs: Sequence[str],
    options: ReplayOptions | None = None,
    *,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    slo: Slo | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Replay ``workload`` under every model of ``specs``, and under what belongs to them.

    A profile brings its best constants along, and its ``@pass`` column if it was fitted on mixed
    passes too. ``progress`` gets the name of each model before it is replayed. Raises InputError
    if fewer than two models come together.
    """
    asked = with_companions([parse_timing(text) for text in specs], deployment)
    if len(asked) < 2:
        raise InputError(
            f"nothing to compare {asked[0].text!r} with: give --timing at least twice, or a profile"
            if asked
            else "nothing to compare: give --timing"
        )
    runs = _Runs(workload, deployment, options or ReplayOptions())
    columns = []
    for spec in asked:
        if progress is not None:
            progress(spec.title)
        outcome, facts, coverage = runs.run(spec)
        columns.append(
            Column(
                spec=spec,
                summary=summary(outcome, workload, percentiles=percentiles, slo=slo),
                counts=counts(outcome),
                outcome=outcome,
                facts=facts,
                coverage=coverage,
            )
        )
    return Comparison(columns=tuple(columns), percentiles=tuple(percentiles), slo=slo)


def with_companions(specs: Sequence[TimingSpec], deployment: Deployment) -> list[TimingSpec]:
    """``specs``, each once, every profile followed by its ``@pass`` and its best constants."""
    asked: list[TimingSpec] = []
    for spec in specs:
        asked.append(spec)
        if isinstance(spec, ProfileSpec):
            calls = ProfileSpec(spec.profile)
            if not spec.is_table and "mixed" in load_profile(spec.profile).box:
                asked.append(ProfileSpec(spec.profile, "pass"))
            asked.append(BestConstants(calls))
        elif isinstance(spec, EngineTiming) and any(
            isinstance(spec.model(launch), CoveredModel) for launch in launches(deployment)
        ):
            asked.append(BestConstants(spec))
    return list(dict.fromkeys(asked))


class _Runs:
    """Replays of one workload; a recording serves the model's column and its constants."""

    def __init__(self, workload: Workload, deployment: Deployment, options: ReplayOptions) -> None:
        self._workload = workload
        self._deployment = deployment
        self._options = options
        self._recorded: dict[AskedTiming, tuple[Outcome, Recording]] = {}

    def run(self, spec: TimingSpec) -> tuple[Outcome, dict[str, float], dict[str, int] | None]:
        """(outcome, facts, coverage) of one column."""
        if isinstance(spec, BestConstants):
            _, recording = self._record(spec.source)
            constants = recording.constants()
            return self._replay(lambda launch: constants), recording.facts(), None
        outcome, recording = self._record(spec)
        return outcome, {}, recording.coverage()

    def _record(self, spec: AskedTiming) -> tuple[Outcome, Recording]:
        if spec not in self._recorded:
            self._recorded[spec] = record(
                spec.model, self._workload, self._deployment, self._options
            )
        return self._recorded[spec]

    def _replay(self, timing: Timing) -> Outcome:
        return replay_on(self._deployment, self._workload, timing, self._options)


def render(comparison: Comparison, console: Console) -> None:
    """Print the table, the sentence, and what to bear in mind."""
    from passtime.comparison_table import comparison_tables

    for table in comparison_tables(comparison, width=console.width):
        console.print(table, "")
    for sentence in (comparison.verdict(), *comparison.caveats()):
        console.print(sentence)
