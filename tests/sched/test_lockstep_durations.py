"""Times of many passes at once against one pass at a time (V-70)."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.errors import ProviderError
from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.durations import (
    Durations,
    contributions_ms,
    durations,
    quick_contribution_ms,
)
from passtime.sched.timing import (
    FixedTiming,
    FloatArray,
    IntArray,
    PassShape,
    PolynomialTiming,
    TimingModel,
    contribution_ms,
)

RATIOS = st.sampled_from([0.0, 1.0, 0.5, 2.0, 3.0, 1e-3, 7.7])
TIES = st.integers(0, 10**9).map(lambda half: (half + 0.5) / 1e6)  # half a nanosecond over
RAW_MS = st.one_of(
    st.floats(0, 100), st.floats(0, 1e12), TIES, st.integers(0, 10**7).map(float), st.just(0.0)
)


def by_the_rule(raw_ms: float, ratio: float) -> float:
    """V-70, step by step, with rational arithmetic."""

    def rounded(seconds: float) -> int:
        return round(Fraction(seconds) * 10**9)

    def seconds(nanoseconds: int) -> float:
        return float(nanoseconds // 10**9) + float(nanoseconds % 10**9) / 1e9

    u = rounded(raw_ms / 1000.0)
    m = rounded(seconds(u) / ratio) if ratio > 0 and u > 0 else u
    return seconds(rounded(seconds(m) * 1000.0 / 1000.0)) * 1000.0


@settings(max_examples=2000, deadline=None)
@given(RAW_MS, RATIOS)
def test_a_contribution_is_what_the_rule_says(raw_ms: float, ratio: float) -> None:
    expected = by_the_rule(raw_ms, ratio)
    assert contribution_ms(raw_ms, ratio) == expected
    assert quick_contribution_ms(raw_ms, ratio) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(RAW_MS, min_size=1, max_size=30), RATIOS)
def test_contributions_of_an_array_are_those_of_its_entries(
    raw_ms: list[float], ratio: float
) -> None:
    expected = [contribution_ms(value, ratio) for value in raw_ms]
    assert contributions_ms(np.array(raw_ms), ratio).tolist() == expected


def one_by_one(
    timer: Durations, now_ms: float, batch: int, kv_tokens: int, passes: int, cut_ms: float
) -> list[float]:
    ends: list[float] = []
    for step in range(passes):
        now_ms += timer.decode_ms(batch, kv_tokens + step * batch)
        ends.append(now_ms)
        if now_ms >= cut_ms:
            break
    return ends


@settings(max_examples=200, deadline=None)
@given(
    model=st.sampled_from(
        [PolynomialTiming(), *(FixedTiming(prefill_ms=1, decode_ms=d) for d in (0.0, 0.37, 1, 9))]
    ),
    ratio=RATIOS,
    now_ms=st.sampled_from([0.0, 0.1, 12345.678]),
    passes=st.sampled_from([1, 2, 30, 100, 500]),
    cut_after_ms=st.one_of(st.just(math.inf), st.floats(-1, 2000)),
)
def test_a_stretch_ends_as_its_passes_do(
    model: TimingModel, ratio: float, now_ms: float, passes: int, cut_after_ms: float
) -> None:
    timer = durations(model, EngineConfig(speedup_ratio=ratio))
    ends_ms = array("d", [7.0])
    timer.decode_stretch(ends_ms, now_ms, 3, 5000, passes, now_ms + cut_after_ms)
    expected = one_by_one(timer, now_ms, 3, 5000, passes, now_ms + cut_after_ms)
    assert ends_ms.tolist() == [7.0, *expected]


class Failing:
    """A model that answers 1 ms until it is asked about too many tokens."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        return 1.0

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        return 1.0 if active_kv_tokens < 150 else math.nan

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        return np.where(active_kv_tokens < 150, 1.0, np.nan)


@pytest.mark.parametrize("cut_ms", [math.inf, 1e9])
def test_a_failure_in_a_stretch_leaves_the_passes_before_it(cut_ms: float) -> None:
    timer = durations(Failing(), EngineConfig())
    ends_ms: array[float] = array("d")
    with pytest.raises(ProviderError, match="non-finite"):
        timer.decode_stretch(ends_ms, 0.0, 1, 100, 80, cut_ms)
    assert ends_ms.tolist() == [float(end) for end in range(1, 51)]


class WholePass(Failing):
    """A model that is asked about whole passes."""

    composition = "pass"

    def __init__(self) -> None:
        self.shapes: list[PassShape] = []

    def predict_pass_ms(self, shape: PassShape) -> float:
        self.shapes.append(shape)
        return 2.0


def test_a_stretch_of_whole_passes_grows_by_a_token_per_request() -> None:
    model = WholePass()
    timer = durations(model, EngineConfig())
    ends_ms: array[float] = array("d")
    shape = PassShape(0, 0, 0, 0, 3, 30, 12, 1000)
    timer.whole_pass_stretch(ends_ms, 0.0, shape, 5, 4.0)
    assert ends_ms.tolist() == [2.0, 4.0]
    assert model.shapes == [shape, PassShape(0, 0, 0, 0, 3, 33, 13, 1000)]
