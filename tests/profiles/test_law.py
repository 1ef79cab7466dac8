"""The law's own behaviour, without any residual."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.profiles.document import EngineFacts, Profile
from passtime.profiles.law import ARRAYS, FLOATS, Law, Work, _overlap
from passtime.profiles.shapes import load_model

TIMES = st.floats(1e-6, 1e4)


@given(a=TIMES, b=TIMES)
def test_nothing_visible_is_the_longer_all_visible_is_the_sum(a: float, b: float) -> None:
    assert _overlap(a, b, 0.0, FLOATS) == pytest.approx(max(a, b))
    assert _overlap(a, b, 1.0, FLOATS) == pytest.approx(a + b)


@given(a=TIMES, b=TIMES, visible=st.floats(0.0, 1.0), more=st.floats(1.0, 3.0))
def test_an_overlap_lies_between_and_rises(a: float, b: float, visible: float, more: float) -> None:
    time = _overlap(a, b, visible, FLOATS)
    assert max(a, b) * (1 - 1e-12) <= time <= (a + b) * (1 + 1e-12)
    assert _overlap(a * more, b, visible, FLOATS) >= time * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=30))
def test_expert_streaming_agrees_for_floats_and_arrays(
    fitted: Profile, tokens: list[float]
) -> None:
    law = Law(Work.of(load_model("qwen3-30b-a3b")), fitted.coefficients, EngineFacts())
    many = law.decode_ms(np.array(tokens), np.array(tokens) * 100.0, ARRAYS)
    assert many.tolist() == [law.decode_ms(t, t * 100.0, FLOATS) for t in tokens]


def test_a_mixture_of_experts_streams_what_its_tokens_hit(fitted: Profile) -> None:
    work = Work.of(load_model("qwen3-30b-a3b"))
    law = Law(work, fitted.coefficients, EngineFacts())
    assert law.experts is not None
    rate = fitted.coefficients.weight_bytes_per_s
    one, all_of_them = work.expert_bytes * 8 / 128 * 1e3 / rate, work.expert_bytes * 1e3 / rate
    assert law.experts(1.0) == pytest.approx(one)
    assert law.experts(4096.0) == pytest.approx(all_of_them, rel=1e-6)


def test_tiles_make_a_staircase_that_never_falls(fitted: Profile) -> None:
    coefficients = msgspec.structs.replace(fitted.coefficients, tile_share=0.8)
    law = Law(Work.of(fitted.model), coefficients, EngineFacts(tile_tokens=128))
    times = [law.prefill_ms(1.0, float(n), 0.0, n * (n + 1) / 2.0, FLOATS) for n in range(1, 2000)]
    steps = np.diff(times)
    assert (steps >= 0).all()
    assert steps[1023] > 20 * np.median(steps)  # from 1024 to 1025 tokens


def test_rectangular_attention_costs_more_than_causal(fitted: Profile) -> None:
    work = Work.of(fitted.model)
    causal = Law(work, fitted.coefficients, EngineFacts())
    rectangle = Law(work, fitted.coefficients, EngineFacts(attention="rectangle"))
    args = (1.0, 4096.0, 0.0, 4096.0 * 4097.0 / 2.0, FLOATS)
    assert rectangle.prefill_ms(*args) > causal.prefill_ms(*args)


def test_only_the_attention_part_moves_no_weights(fitted: Profile) -> None:
    work = Work.of(fitted.model, timed_part="attention")
    assert work.weight_bytes == work.flops_per_token == 0.0
    law = Law(work, fitted.coefficients, EngineFacts(timed_part="attention"))
    assert math.isfinite(law.decode_ms(1.0, 10.0, FLOATS))


def test_unequal_decodes_cost_between_their_mean_and_their_longest(fitted: Profile) -> None:
    coefficients = msgspec.structs.replace(fitted.coefficients, decode_skew=0.25)
    law = Law(Work.of(fitted.model), coefficients, EngineFacts())
    assert law.effective_kv(4.0, 4000.0, 1000.0) == 4000.0
    assert law.effective_kv(4.0, 4000.0, 2600.0) == 4000.0 + 0.25 * (4 * 2600.0 - 4000.0)
