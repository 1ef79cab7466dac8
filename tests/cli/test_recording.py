"""Counting what a model is asked, and the best constants that follow from it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from passtime.deployment import Deployment, Pools
from passtime.recording import Recording, RecordingTiming, record
from passtime.sched.config import EngineConfig, LaunchConfig
from passtime.sched.replay.outcome import Outcome
from passtime.sched.replay.report import summary
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.timing import (
    FixedTiming,
    IntArray,
    PassShape,
    PolynomialTiming,
    TimingModel,
    asks_whole_pass,
)
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic

LAUNCH = LaunchConfig(
    engine=EngineConfig(
        block_size=16, num_gpu_blocks=2000, max_num_seqs=16, max_num_batched_tokens=1024
    )
)
WORKLOAD = synthetic(SyntheticLoad(kind="conversation", num_prompts=60, request_rate=4.0))


class Ledger(PolynomialTiming):
    """The polynomials, keeping a book of their own."""

    def __init__(self) -> None:
        self.prefills: list[float] = []
        self.decodes: list[float] = []

    def predict_prefill_ms(self, *query: int) -> float:
        self.prefills.append(super().predict_prefill_ms(*query))
        return self.prefills[-1]

    def predict_decode_ms(self, *query: int) -> float:
        self.decodes.append(super().predict_decode_ms(*query))
        return self.decodes[-1]


class Covered(FixedTiming):
    """Ten constants of prefill, one of decode; measured for a batch of 1."""

    def __init__(self, composition: str = "calls") -> None:
        super().__init__(prefill_ms=10.0, decode_ms=1.0)
        self.composition = composition

    def coverage_prefill(self, batch_size: int, mean_isl: int, mean_prefix: int) -> str:
        return "held"

    def coverage_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray
    ) -> npt.NDArray[np.str_]:
        inside = batch_size <= 1
        return np.array(["inside" if inside else "extrapolated"] * len(active_kv_tokens))

    def predict_pass_ms(self, shape: PassShape) -> float:
        return 11.0 if shape.prefill_requests else 1.0

    def coverage_pass(self, shape: PassShape) -> str:
        return "held" if shape.prefill_requests else "inside"


def recorded(
    model: TimingModel, deployment: Deployment = LAUNCH, **options: Any
) -> tuple[Outcome, Recording]:
    return record(lambda launch: model, WORKLOAD, deployment, ReplayOptions(**options))


@pytest.mark.parametrize("core", ["literal", "auto"])
def test_every_executed_pass_is_counted_once(core: Any) -> None:
    ledger = Ledger()
    outcome = replay(WORKLOAD, LAUNCH, _scalar_only(ledger), ReplayOptions(core="literal"))
    watched, recording = recorded(PolynomialTiming(), core=core)
    assert recording.prefill.calls == len(ledger.prefills)
    assert recording.decode.calls == len(ledger.decodes)
    assert recording.prefill.total_ms == math.fsum(ledger.prefills)
    assert recording.decode.total_ms == math.fsum(ledger.decodes)
    assert watched.passes == outcome.passes


def _scalar_only(model: Ledger) -> Any:
    class Scalar:
        predict_prefill_ms = model.predict_prefill_ms
        predict_decode_ms = model.predict_decode_ms

    return Scalar()


def test_recording_changes_no_number() -> None:
    plain = replay(WORKLOAD, LAUNCH, PolynomialTiming(), ReplayOptions())
    watched, _ = recorded(PolynomialTiming())
    assert summary(watched, WORKLOAD) == summary(plain, WORKLOAD)


def test_best_constants_spend_the_same_total_over_the_same_calls() -> None:
    _, recording = recorded(PolynomialTiming())
    constants, facts = recording.constants(), recording.facts()
    assert constants.prefill_ms * facts["prefill_calls"] == pytest.approx(
        recording.prefill.total_ms, rel=1e-12
    )
    assert constants.decode_ms * facts["decode_calls"] == pytest.approx(
        recording.decode.total_ms, rel=1e-12
    )


def test_best_constants_of_constants_are_themselves() -> None:
    fixed = FixedTiming(prefill_ms=8.0, decode_ms=2.0)
    _, recording = recorded(fixed)
    constants = recording.constants()
    assert (constants.prefill_ms, constants.decode_ms) == (8.0, 2.0)


def test_a_part_that_is_never_asked_costs_nothing() -> None:
    recording = Recording((RecordingTiming(FixedTiming(prefill_ms=8.0, decode_ms=2.0)),))
    assert recording.constants().decode_ms == 0.0


def test_coverage_counts_every_query() -> None:
    _, recording = recorded(Covered())
    coverage = recording.coverage()
    assert coverage is not None
    assert coverage["held"] == recording.prefill.calls
    assert coverage["inside"] + coverage["extrapolated"] == recording.decode.calls
    assert min(coverage.values()) > 0


def test_a_whole_pass_model_stays_one() -> None:
    model = Covered("pass")
    outcome, recording = recorded(model)
    (watched,) = recording.models
    assert asks_whole_pass(watched)
    assert recording.prefill.calls == recording.decode.calls == 0
    assert watched.whole.calls == outcome.passes
    coverage = recording.coverage()
    assert coverage is not None
    assert sum(coverage.values()) == outcome.passes
    assert outcome.clock_ms == replay(WORKLOAD, LAUNCH, model, ReplayOptions()).clock_ms


def pools() -> Pools:
    prefill, decode = (
        LaunchConfig(engine=msgspec.structs.replace(LAUNCH.engine, worker_type=worker_type))
        for worker_type in ("prefill", "decode")
    )
    return Pools(prefill=prefill, decode=decode)


def test_two_pools_are_recorded_as_one() -> None:
    ledgers = []

    def ledger(launch: LaunchConfig) -> Ledger:
        ledgers.append(Ledger())
        return ledgers[-1]

    outcome, recording = record(ledger, WORKLOAD, pools(), ReplayOptions())
    prefill_pool, decode_pool = ledgers
    assert prefill_pool.prefills
    assert decode_pool.decodes
    prefills = prefill_pool.prefills + decode_pool.prefills
    decodes = prefill_pool.decodes + decode_pool.decodes
    assert (recording.prefill.calls, recording.decode.calls) == (len(prefills), len(decodes))
    assert recording.constants().prefill_ms == math.fsum(prefills) / len(prefills)
    assert recording.constants().decode_ms == math.fsum(decodes) / len(decodes)
    assert outcome.passes == len(prefills) + len(decodes)


def test_coverage_counts_the_queries_of_both_pools() -> None:
    _, recording = recorded(Covered(), pools())
    coverage = recording.coverage()
    assert coverage is not None
    assert sum(coverage.values()) == recording.prefill.calls + recording.decode.calls


def test_a_pool_whose_model_cannot_tell_leaves_no_coverage() -> None:
    """Half a tally would pass for a whole one."""

    def one_of_two(launch: LaunchConfig) -> TimingModel:
        return Covered() if launch.engine.worker_type == "prefill" else PolynomialTiming()

    _, recording = record(one_of_two, WORKLOAD, pools(), ReplayOptions())
    assert recording.coverage() is None


def test_a_model_without_a_range_has_no_coverage() -> None:
    _, recording = recorded(PolynomialTiming())
    assert recording.coverage() is None
