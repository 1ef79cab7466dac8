"""What a timing model was asked in a replay: calls, time in total, and inside which range.

The same figures give the best constants: the pair that spends the same total time on prefills
and the same on decode steps, over the very passes of the replay.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from passtime.deployment import Deployment, Timing, replay_on
from passtime.sched.config import LaunchConfig
from passtime.sched.replay.outcome import Outcome
from passtime.sched.simulate import ReplayOptions
from passtime.sched.timing import FixedTiming, IntArray, PassModel, PassShape, TimingModel
from passtime.sched.workload.rows import Workload

COVERAGES = ("inside", "held", "extrapolated")

# A profile that is asked outside its range less often than this needs no word about it.
ENOUGH_INSIDE_PERCENT = 99.0


@runtime_checkable
class CoveredModel(Protocol):
    """A model that knows where it was measured: each tag is one of ``COVERAGES``."""

    def coverage_prefill(self, batch_size: int, mean_isl: int, mean_prefix: int) -> str:
        """The tag of one prefill query."""
        ...

    def coverage_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray
    ) -> npt.NDArray[np.str_]:
        """The tag of each decode query."""
        ...

    def coverage_pass(self, shape: PassShape) -> str:
        """The tag of a whole-pass query."""
        ...


@dataclass(slots=True)
class Answers:
    """Answers of one kind of query, raw: before rounding and speed-up ratios."""

    times_ms: array[float] = field(default_factory=lambda: array("d"))

    @staticmethod
    def joined(parts: Iterable[Answers]) -> Answers:
        """The answers of several models as if one had given them."""
        together = Answers()
        for part in parts:
            together.times_ms.extend(part.times_ms)
        return together

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.times_ms)

    @property
    def total_ms(self) -> float:
        """Sum of the answers, rounded once."""
        return math.fsum(self.times_ms)

    @property
    def mean_ms(self) -> float:
        """The constant that would have added up to the same; 0 if never asked."""
        return self.total_ms / self.calls if self.calls else 0.0


class RecordingTiming:
    """A model that remembers what it was asked, and answers as the one inside.

    It has no ``predict_decode_many``: a core may use a part only of many answers, but a scalar
    query is one executed pass.
    """

    def __init__(self, model: TimingModel) -> None:
        """Wrap ``model``."""
        self.model = model
        self.composition = model.composition if isinstance(model, PassModel) else "calls"
        self.prefill = Answers()
        self.decode = Answers()
        self.whole = Answers()
        self._prefill_queries: list[tuple[int, int, int]] = []
        self._decode_queries: dict[int, array[int]] = {}
        self._pass_queries: list[PassShape] = []

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """The inner model's answer."""
        answer = float(self.model.predict_prefill_ms(batch_size, mean_isl, mean_prefix))
        if batch_size:
            self.prefill.times_ms.append(max(0.0, answer))  # negative counts as 0 (C-43)
            self._prefill_queries.append((batch_size, mean_isl, mean_prefix))
        return answer

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """The inner model's answer."""
        answer = float(
            self.model.predict_decode_ms(
                batch_size, active_kv_tokens, mean_context_length, total_kv_tokens
            )
        )
        if batch_size:
            self.decode.times_ms.append(answer)
            self._decode_queries.setdefault(batch_size, array("q")).append(active_kv_tokens)
        return answer

    def predict_pass_ms(self, shape: PassShape) -> float:
        """The inner model's answer."""
        assert isinstance(self.model, PassModel)
        answer = float(self.model.predict_pass_ms(shape))
        self.whole.times_ms.append(answer)
        self._pass_queries.append(shape)
        return answer

    def coverage(self) -> dict[str, int] | None:
        """Queries by where they lay; None if the model cannot tell."""
        if not isinstance(self.model, CoveredModel):
            return None
        tags: Counter[str] = Counter(
            self.model.coverage_prefill(*query) for query in self._prefill_queries
        )
        for batch_size, kv_tokens in self._decode_queries.items():
            queries = np.frombuffer(kv_tokens, dtype=np.int64)
            tags.update(self.model.coverage_decode_many(batch_size, queries).tolist())
        tags.update(self.model.coverage_pass(shape) for shape in self._pass_queries)
        return {coverage: tags[coverage] for coverage in COVERAGES}


@dataclass(frozen=True, slots=True)
class Recording:
    """What the models of a deployment's pools were asked in one replay, all together."""

    models: tuple[RecordingTiming, ...]

    @property
    def prefill(self) -> Answers:
        """Prefill queries of all pools."""
        return Answers.joined(model.prefill for model in self.models)

    @property
    def decode(self) -> Answers:
        """Decode queries of all pools."""
        return Answers.joined(model.decode for model in self.models)

    def coverage(self) -> dict[str, int] | None:
        """Queries by where they lay; None if a model cannot tell."""
        tags: Counter[str] = Counter()
        for model in self.models:
            found = model.coverage()
            if found is None:
                return None
            tags.update(found)
        return {coverage: tags[coverage] for coverage in COVERAGES}

    def constants(self) -> FixedTiming:
        """The two constants with the same totals over the same calls."""
        return FixedTiming(prefill_ms=self.prefill.mean_ms, decode_ms=self.decode.mean_ms)

    def facts(self) -> dict[str, float]:
        """The constants, and how many calls stand behind each."""
        prefill, decode = self.prefill, self.decode
        return {
            "prefill_ms": prefill.mean_ms,
            "decode_ms": decode.mean_ms,
            "prefill_calls": prefill.calls,
            "decode_calls": decode.calls,
        }


def record(
    timing: Timing, workload: Workload, deployment: Deployment, options: ReplayOptions
) -> tuple[Outcome, Recording]:
    """Replay under ``timing``: the outcome, and what its models were asked on the way."""
    models: list[RecordingTiming] = []

    def recorded(launch: LaunchConfig) -> RecordingTiming:
        models.append(RecordingTiming(timing(launch)))
        return models[-1]

    outcome = replay_on(deployment, workload, recorded, options)
    return outcome, Recording(tuple(models))


def replay_covered(
    timing: Timing, workload: Workload, deployment: Deployment, options: ReplayOptions
) -> tuple[Outcome, dict[str, int] | None]:
    """Replay under ``timing``: the outcome, and where the queries lay if every model can tell.

    A model that cannot is not watched: it may answer many decode steps at once.
    """
    models: list[TimingModel] = []

    def watched(launch: LaunchConfig) -> TimingModel:
        model = timing(launch)
        models.append(RecordingTiming(model) if isinstance(model, CoveredModel) else model)
        return models[-1]

    outcome = replay_on(deployment, workload, watched, options)
    recorded = tuple(model for model in models if isinstance(model, RecordingTiming))
    return outcome, Recording(recorded).coverage() if len(recorded) == len(models) else None


def coverage_percent(coverage: dict[str, int] | None) -> dict[str, float] | None:
    """Shares of the queries by where they lay; None if nobody can tell, or nothing was asked."""
    asked = sum(coverage.values()) if coverage else 0
    if not coverage or not asked:
        return None
    return {tag: queries / asked * 100.0 for tag, queries in coverage.items()}
