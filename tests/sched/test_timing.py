"""The timing door: built-in models, checks of what a model answers, and V-70 to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from passtime.errors import ConfigError, ProviderError, RunError
from passtime.sched.config import EngineConfig, ExternalConfig, FixedConfig, builtin_timing
from passtime.sched.pass_timer import PassTimer
from passtime.sched.timing import (
    EXACT_NS,
    DecodeStretchModel,
    FixedTiming,
    PassShape,
    PolynomialTiming,
    asks_whole_pass,
    checked_decode_ms,
    checked_prefill_ms,
    contribution_ms,
)

# --- V-70: from a model's answer to the clock ---------------------------------------------------


def round_ns(seconds: float) -> int:
    """To whole nanoseconds: the double's exact value, ties to even."""
    exact = Fraction(seconds) * 10**9
    below = exact.numerator // exact.denominator
    over = exact - below
    return below + (over > Fraction(1, 2) or (over == Fraction(1, 2) and below % 2 == 1))


def seconds(nanoseconds: int) -> float:
    return float(nanoseconds // 10**9) + float(nanoseconds % 10**9) / 1e9


def by_the_rule(raw_ms: float, ratio: float) -> float:
    """V-70 as it is written, step by step."""
    u = round_ns(raw_ms / 1000.0)
    m = round_ns(seconds(u) / ratio) if ratio > 0 and u > 0 else u
    ms = seconds(m) * 1000.0
    d = round_ns(ms / 1000.0)
    return seconds(d) * 1000.0


milliseconds = st.one_of(
    st.floats(0, 1e4),
    st.floats(0, 1e18),
    st.integers(0, 10**7).map(lambda k: k / 1e6),  # whole nanoseconds
    st.integers(0, 10**7).map(lambda k: (2 * k + 1) / 2e6),  # halves of them: the ties
    st.floats(0, 1e-6),
)
ratios = st.one_of(st.just(1.0), st.just(0.0), st.floats(1e-3, 1e3), st.sampled_from([2.0, 0.5, 3]))


@settings(max_examples=1500, deadline=None)
@given(milliseconds, ratios)
@example(10.0, 1.0)
@example(0.0, 0.0)
@example(0.0000005, 1.0)  # half a nanosecond: to even, that is nothing
@example(0.0000015, 1.0)
@example(float(EXACT_NS) / 1e6, 1.0)
@example(math.nextafter(float(EXACT_NS) / 1e6, 0), 1.0)
@example(1000.0, 1.0)
@example(math.nextafter(1000.0, 0), 1.0)
@example(5e-324, 1.0)
@example(1e18, 7.0)
def test_contributions_follow_the_rule_to_the_last_bit(raw_ms: float, ratio: float) -> None:
    assert contribution_ms(raw_ms, ratio) == by_the_rule(raw_ms, ratio)


def test_a_ratio_of_zero_scales_nothing() -> None:
    assert contribution_ms(12.5, 0.0) == contribution_ms(12.5, 1.0) == 12.5


@pytest.mark.parametrize("raw_ms", [2.0**64 * 1000, 1e300])
def test_a_duration_beyond_64_bits_of_seconds_is_an_error(raw_ms: float) -> None:
    with pytest.raises(ProviderError, match="is out of range"):
        contribution_ms(raw_ms, 1.0)


@pytest.mark.parametrize("ratio", [5e-324, 1e-310, 1e-22])
def test_so_is_one_that_its_ratio_makes_so_long(ratio: float) -> None:
    with pytest.raises(ProviderError, match=f"out of range for speedup {ratio}"):
        contribution_ms(10.0, ratio)
    assert contribution_ms(10.0, 1e-18) == 1e19


# --- C-45, C-44: the built-in models ------------------------------------------------------------


def test_polynomial_prefill_by_hand() -> None:
    tokens = 3 * (100 - 36)
    expected = 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142
    assert PolynomialTiming().predict_prefill_ms(3, 100, 36) == pytest.approx(expected, rel=1e-15)
    assert PolynomialTiming().predict_prefill_ms(1, 40, 0) == 17.10943119824


def test_polynomial_decode_by_hand() -> None:
    model = PolynomialTiming()
    assert model.predict_decode_ms(4, 500, 125, 1000) == pytest.approx(
        -25.74 * 0.25 + 54.01 * 0.5 + 5.74, rel=1e-15
    )
    full = -25.74 + 54.01 + 5.74
    assert model.predict_decode_ms(1, 2000, 2000, 1000) == pytest.approx(full, rel=1e-15)
    assert model.predict_decode_ms(1, 5, 5, 0) == pytest.approx(full, rel=1e-15)
    assert model.predict_decode_ms(0, 0, 0, 1000) == model.predict_prefill_ms(2, 7, 7) == 0.0


def test_fixed_asks_only_whether_there_is_a_batch() -> None:
    model = FixedTiming(prefill_ms=7.0, decode_ms=3.0)
    assert [model.predict_prefill_ms(n, 10, 0) for n in (0, 1, 9)] == [0.0, 7.0, 7.0]
    assert [model.predict_decode_ms(n, 10, 1, 99) for n in (0, 1, 9)] == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("model", [FixedTiming(prefill_ms=7.0, decode_ms=3.1), PolynomialTiming()])
@pytest.mark.parametrize("total", [0, 1000, 16384 * 64, 2**70])
def test_many_decode_steps_at_once_are_bit_equal_to_one_by_one(model: Any, total: int) -> None:
    kv = np.arange(5, 3000, 7)
    assert isinstance(model, DecodeStretchModel)
    scalar: Any = model
    many = model.predict_decode_many(5, kv, total)
    assert many.tolist() == [scalar.predict_decode_ms(5, int(k), int(k) // 5, total) for k in kv]
    assert model.predict_decode_many(0, kv, total).tolist() == [0.0] * len(kv)


def test_configured_models() -> None:
    assert isinstance(builtin_timing(EngineConfig().timing_model), PolynomialTiming)
    fixed = builtin_timing(FixedConfig(1.5, 2.5))
    assert fixed.predict_decode_ms(1, 1, 1, 1) == 2.5
    with pytest.raises(ConfigError, match="timing provider 'mine' requires a live model"):
        builtin_timing(ExternalConfig("mine"))


# --- C-43: what a model may not answer ----------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_answers_that_are_not_finite(value: float) -> None:
    words = f"prefill timing provider returned non-finite duration {value}ms"
    with pytest.raises(ProviderError, match=words):
        checked_prefill_ms(value)
    words = f"decode timing provider returned non-finite duration {value}ms"
    with pytest.raises(ProviderError, match=words):
        checked_decode_ms(value)


def test_a_negative_prefill_is_none_and_a_negative_decode_is_an_error() -> None:
    assert checked_prefill_ms(-3.0) == 0.0
    with pytest.raises(ProviderError, match=r"timing provider returned invalid duration -3\.0ms"):
        checked_decode_ms(-3.0)
    assert checked_prefill_ms(-0.0) == checked_decode_ms(-0.0) == 0.0


class Answers:
    """A model that answers one thing, or raises it; ``composition`` makes it a pass model."""

    def __init__(self, answer: Any, composition: str = "calls") -> None:
        self.answer = answer
        self.composition = composition

    def predict_prefill_ms(self, *arguments: int) -> Any:
        return self.say()

    def predict_decode_ms(self, *arguments: int) -> Any:
        return self.say()

    def predict_pass_ms(self, shape: PassShape) -> Any:
        return self.say()

    def say(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


SHAPE = PassShape(1, 5, 0, 15, 0, 0, 0, 64)


@pytest.mark.parametrize(
    ("part", "ask"),
    [
        ("prefill", lambda timer: timer.prefill_ms(1, 5, 0)),
        ("decode", lambda timer: timer.decode_ms(1, 5)),
        ("pass", lambda timer: timer.pass_ms(SHAPE)),
    ],
)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ZeroDivisionError("no such shape"), "ZeroDivisionError: no such shape"),
        (None, "TypeError"),
        ("soon", "ValueError"),
        (1j, "TypeError"),
    ],
)
def test_what_a_model_raises_says_which_question_it_was(
    part: str, ask: Any, answer: Any, words: str
) -> None:
    timer = PassTimer(Answers(answer), EngineConfig())
    with pytest.raises(ProviderError, match=f"external {part} prediction failed: {words}"):
        ask(timer)


def test_errors_of_our_own_tree_pass_as_they_are() -> None:
    timer = PassTimer(Answers(RunError("the table ends at 8192")), EngineConfig())
    asks: list[Any] = [lambda: timer.prefill_ms(1, 5, 0), lambda: timer.decode_ms(1, 5)]
    for ask in asks:
        with pytest.raises(RunError, match=r"^the table ends at 8192$"):
            ask()


@pytest.mark.parametrize("answer", [np.float32(2.5), np.array(2.5), 2.5, Fraction(5, 2)])
def test_any_number_is_an_answer(answer: Any) -> None:
    timer = PassTimer(Answers(answer), EngineConfig())
    assert timer.prefill_ms(1, 5, 0) == timer.decode_ms(1, 5) == timer.pass_ms(SHAPE) == 2.5


def test_ratios_divide_their_part_of_the_pass() -> None:
    config = EngineConfig(speedup_ratio=2.0, decode_speedup_ratio=5.0)
    timer = PassTimer(Answers(100.0), config)
    assert timer.prefill_ms(1, 5, 0) == 50.0
    assert timer.decode_ms(1, 5) == 10.0
    assert timer.pass_ms(SHAPE) == 50.0
    decode_only = SHAPE._replace(prefill_requests=0, prefill_new_tokens=0, decode_requests=1)
    assert timer.pass_ms(decode_only) == 10.0


def test_a_pass_without_work_is_not_asked_about() -> None:
    timer = PassTimer(Answers(AssertionError("asked")), EngineConfig())
    assert timer.pass_ms(PassShape(0, 0, 0, 0, 0, 0, 0, 64)) == 0.0


def test_only_a_model_that_says_so_is_asked_about_whole_passes() -> None:
    assert asks_whole_pass(Answers(1.0, "pass"))
    assert not asks_whole_pass(Answers(1.0, "calls"))
    assert not asks_whole_pass(FixedTiming(prefill_ms=1, decode_ms=1))
