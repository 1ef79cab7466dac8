"""Run a case through the literal core and the lock-step one, and tell every difference."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from workload_generators import Case

from passtime.errors import PasstimeError
from passtime.sched.config import builtin_timing
from passtime.sched.lockstep import replay
from passtime.sched.lockstep.replay import LockstepReplay
from passtime.sched.replay.driver import AggregatedReplay
from passtime.sched.replay.outcome import Outcome
from passtime.sched.timing import FloatArray, IntArray, PassShape, TimingModel
from passtime.sched.vllm.core import VllmCore


class Tally:
    """A model that counts what it is asked, and answers another model's times."""

    def __init__(self, model: TimingModel) -> None:
        self.questions: Counter[tuple[object, ...]] = Counter()
        self._model = model

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        self.questions["prefill", batch_size, mean_isl, mean_prefix] += 1
        return self._model.predict_prefill_ms(batch_size, mean_isl, mean_prefix)

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        assert mean_context_length == active_kv_tokens // batch_size
        self.questions["decode", batch_size, active_kv_tokens] += 1
        return self._model.predict_decode_ms(
            batch_size, active_kv_tokens, mean_context_length, total_kv_tokens
        )


class StretchTally(Tally):
    """The same, also asked about many decode steps at once."""

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        answers = [
            self.predict_decode_ms(batch_size, tokens, tokens // batch_size, total_kv_tokens)
            for tokens in active_kv_tokens.tolist()
        ]
        return np.array(answers)


class WholePassTally:
    """A model that is asked about whole passes, and answers from every number it is told."""

    composition = "pass"

    def __init__(self) -> None:
        self.questions: Counter[tuple[object, ...]] = Counter()

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        raise AssertionError("a model that is asked about whole passes is asked nothing else")

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        raise AssertionError("a model that is asked about whole passes is asked nothing else")

    def predict_pass_ms(self, shape: PassShape) -> float:
        self.questions[shape] += 1
        return sum(value * weight for value, weight in zip(shape, _WEIGHTS, strict=True))


_WEIGHTS = (0.3, 0.01, 0.002, 1e-4, 0.1, 1e-3, 0.01, 1e-6)


@dataclass
class Run:
    """How a replay ended."""

    outcome: Outcome | None
    error: PasstimeError | None
    questions: Counter[tuple[object, ...]]
    free_blocks: list[int]
    unreferenced_blocks: list[int]


def timing_of(case: Case) -> TimingModel:
    """The model of a case, by its seed: as configured, counted, or asked about whole passes."""
    model = builtin_timing(case.launch.engine.timing_model)
    draw = random.Random(case.seed).random()
    if draw < 0.5:
        return model
    if draw < 0.65:
        return Tally(model)
    return StretchTally(model) if draw < 0.85 else WholePassTally()


def run_literal(case: Case) -> Run:
    """Through the core that reads as the rules do."""
    timing = timing_of(case)
    literal = AggregatedReplay(
        case.workload,
        case.launch,
        timing,
        arrivals=case.options.arrivals(case.workload),
        num_workers=case.options.num_workers,
        max_sim_time_ms=case.options.max_sim_time_ms,
        capture_admissions=True,
    )
    run = _run(literal.run, timing)
    busy = min(case.options.num_workers, len(case.workload))
    cores = [engine.ranks[0]._core for engine in literal._fleet.engines[:busy]]
    pools = [core.pool for core in cores if isinstance(core, VllmCore)]
    free = [pool.free for pool in pools]
    return dataclasses.replace(
        run, free_blocks=free, unreferenced_blocks=[pool.unreferenced for pool in pools]
    )


def run_lockstep(case: Case) -> Run:
    """Through the core that counts."""
    timing = timing_of(case)
    options, pools = case.options, []

    class Watched(LockstepReplay):
        def run(self) -> None:
            pools.append(self.pool)
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "LockstepReplay", Watched)
        run = _run(
            lambda: replay.replay_lockstep(
                case.workload,
                case.launch,
                timing,
                concurrency=options.concurrency,
                arrival_speedup_ratio=options.arrival_speedup_ratio,
                max_sim_time_ms=options.max_sim_time_ms,
                capture_admissions=True,
                num_workers=options.num_workers,
            ),
            timing,
        )
    free = [pool.free for pool in pools]
    return dataclasses.replace(
        run, free_blocks=free, unreferenced_blocks=[pool.evictable for pool in pools]
    )


def _run(replay: Callable[[], Outcome], timing: TimingModel) -> Run:
    outcome, error = None, None
    try:
        outcome = replay()
    except PasstimeError as raised:
        error = raised
    questions = timing.questions if isinstance(timing, Tally | WholePassTally) else Counter()
    return Run(outcome, error, questions, [], [])


def differences(case: Case) -> list[str]:
    """Everything in which the two cores disagree about a case."""
    literal, lockstep = run_literal(case), run_lockstep(case)
    if literal.error is not None or lockstep.error is not None:
        said = [f"{type(run.error).__name__}: {run.error}" for run in (literal, lockstep)]
        return [] if said[0] == said[1] else [f"literal {said[0]}; lockstep {said[1]}"]
    assert literal.outcome is not None
    assert lockstep.outcome is not None
    found = outcome_differences(literal.outcome, lockstep.outcome)
    for name in ("questions", "free_blocks", "unreferenced_blocks"):
        a, b = getattr(literal, name), getattr(lockstep, name)
        if a != b:
            found.append(f"{name}: literal {a}, lockstep {b}")
    if case.options.max_sim_time_ms is None:
        both = zip(lockstep.free_blocks, lockstep.unreferenced_blocks, strict=True)
        if any(sum(blocks) != case.launch.engine.num_gpu_blocks for blocks in both):
            found.append(f"blocks are active at the end: {lockstep}")
    return found


def outcome_differences(literal: Outcome, lockstep: Outcome) -> list[str]:
    """Fields of two outcomes that are not bit for bit the same."""
    found = []
    for field in dataclasses.fields(Outcome):
        a, b = getattr(literal, field.name), getattr(lockstep, field.name)
        if isinstance(a, np.ndarray):
            same = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        else:
            same = a == b
        if not same:
            found.append(f"{field.name}: literal {a}, lockstep {b}")
    return found
