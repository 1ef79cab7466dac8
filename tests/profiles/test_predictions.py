"""What every prediction keeps to: equal bits by both paths, rising, positive, finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.profiles.document import EngineFacts, Profile
from passtime.profiles.predict import PassColumns, Predictor, decode_shape, prefill_shape
from passtime.profiles.provider import ProfileTiming
from passtime.sched.timing import PassShape

BATCHES = st.integers(1, 600)
KV_TOKENS = st.lists(st.integers(1, 5_000_000), min_size=1, max_size=40)

# Sizes from 1 to four times what was measured.
NEW = [1, 2, 15, 16, 17, 40, 100, 129, 200, 500, 513, 1000, 2000, 4000, 8192]
PREFIX = [0, 1, 16, 100, 500, 1000, 3000, 8192, 20_000, 32_768]
CONTEXT = [1, 15, 16, 40, 100, 300, 900, 2000, 5000, 8192, 8193, 20_000, 32_768]
COUNT = [1, 2, 3, 4, 6, 9, 12, 16, 17, 24, 33, 64, 100, 128, 129, 200, 400, 512]


def mixed(prompts: int, new: int, prefix: int, decodes: int, context: int) -> PassShape:
    prefill, decode = (
        prefill_shape(prompts, new + prefix, prefix),
        decode_shape(decodes, decodes * context),
    )
    return PassShape(*prefill[:4], *decode[4:7], 10**6)


@settings(max_examples=80, deadline=None)
@given(batch=BATCHES, kv_tokens=KV_TOKENS)
def test_many_decodes_equal_single_ones_to_the_last_bit(
    timing: ProfileTiming, batch: int, kv_tokens: list[int]
) -> None:
    many = timing.predict_decode_many(batch, np.array(kv_tokens), 10**6)
    single = [timing.predict_decode_ms(batch, kv, kv // batch, 10**6) for kv in kv_tokens]
    assert many.tolist() == single


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(1, 4000),
            st.integers(0, 9000),
            st.integers(0, 300),
            st.integers(1, 20_000),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_many_passes_equal_single_ones_to_the_last_bit(
    fitted: Profile, passes: list[tuple[int, int, int, int, int]]
) -> None:
    predictor = Predictor.of(fitted)
    shapes = [mixed(*sizes) for sizes in passes]
    columns = PassColumns(*np.array(shapes, dtype=float).T[:7])
    assert predictor.pass_many_ms(columns).tolist() == [predictor.pass_ms(s) for s in shapes]


def test_prefill_rises_with_prompts_new_tokens_and_prefix(timing: ProfileTiming) -> None:
    times = {
        (n, new, prefix): timing.predict_prefill_ms(n, new + prefix, prefix)
        for n in COUNT[:8]
        for new in NEW
        for prefix in PREFIX
    }
    assert_rises(times, (COUNT[:8], NEW, PREFIX))


def test_decode_rises_with_requests_and_context(timing: ProfileTiming) -> None:
    times = {
        (n, context): timing.predict_decode_ms(n, n * context, context, 10**6)
        for n in COUNT
        for context in CONTEXT
    }
    assert_rises(times, (COUNT, CONTEXT))


def test_a_dense_sweep_of_decode_context_never_falls(timing: ProfileTiming) -> None:
    for batch in (1, 5, 17, 64, 128, 300):
        steps = timing.predict_decode_many(batch, np.arange(batch, batch * 33_000, batch * 7), 0)
        assert (np.diff(steps) >= 0).all()


def test_a_dense_sweep_of_prompt_lengths_never_falls(timing: ProfileTiming) -> None:
    for batch, prefix in ((1, 0), (1, 4000), (3, 100)):
        sweep = [
            timing.predict_prefill_ms(batch, new + prefix, prefix) for new in range(1, 8200, 3)
        ]
        assert (np.diff(sweep) >= 0).all()


def test_mixed_passes_rise_with_everything(timing: ProfileTiming) -> None:
    axes = (
        [1, 2, 4],
        [16, 100, 300, 2000, 8000],
        [0, 500, 8192],
        [1, 8, 17, 100, 400],
        CONTEXT[::3],
    )
    times = {sizes: timing.predict_pass_ms(mixed(*sizes)) for sizes in itertools.product(*axes)}
    assert_rises(times, axes)


def assert_rises(times: Mapping[Any, float], axes: tuple[list[int], ...]) -> None:
    """Along every axis, others kept, no time is below the one before; all finite and > 0."""
    for place, time in times.items():
        assert math.isfinite(time)
        assert time > 0.0
        for axis, line in enumerate(axes):
            index = line.index(place[axis])
            if index:
                lower = (*place[:axis], line[index - 1], *place[axis + 1 :])
                assert time >= times[lower], (lower, place)


def test_a_pass_is_never_shorter_than_either_of_its_halves(timing: ProfileTiming) -> None:
    for sizes in itertools.product([1, 3], [16, 300, 2000], [0, 4000], [1, 40, 300], [20, 3000]):
        whole = mixed(*sizes)
        prompts = whole._replace(decode_requests=0, decode_kv_tokens=0, decode_kv_max=0)
        decodes = PassShape(0, 0, 0, 0, *whole[4:])
        assert timing.predict_pass_ms(whole) >= timing.predict_pass_ms(prompts)
        assert timing.predict_pass_ms(whole) >= timing.predict_pass_ms(decodes)


def test_both_doors_agree_on_a_pass_of_one_kind(timing: ProfileTiming) -> None:
    assert timing.predict_pass_ms(prefill_shape(3, 700, 200)) == timing.predict_prefill_ms(
        3, 700, 200
    )
    assert timing.predict_pass_ms(decode_shape(4, 4000)) == pytest.approx(
        timing.predict_decode_ms(4, 4000, 1000, 10**6), rel=1e-12
    )


def test_a_longer_straggler_costs_no_less(timing: ProfileTiming) -> None:
    even = PassShape(0, 0, 0, 0, 8, 8000, 1000, 10**6)
    assert timing.predict_pass_ms(even._replace(decode_kv_max=6000)) >= timing.predict_pass_ms(even)


def test_empty_batches_take_no_time(timing: ProfileTiming) -> None:
    assert timing.predict_prefill_ms(0, 0, 0) == 0.0
    assert timing.predict_prefill_ms(4, 100, 100) == 0.0
    assert timing.predict_decode_ms(0, 0, 0, 100) == 0.0
    assert timing.predict_decode_many(0, np.array([0, 5]), 100).tolist() == [0.0, 0.0]
    assert timing.predict_pass_ms(PassShape(0, 0, 0, 0, 0, 0, 0, 100)) == 0.0


def test_absurdly_large_passes_are_finite(timing: ProfileTiming) -> None:
    assert math.isfinite(timing.predict_prefill_ms(10**6, 10**9, 10**8))
    assert math.isfinite(timing.predict_decode_ms(10**9, 10**15, 10**6, 1))
    assert math.isfinite(timing.predict_pass_ms(mixed(10**4, 10**6, 10**6, 10**6, 10**7)))


def test_prefill_depends_on_the_number_of_tokens(timing: ProfileTiming) -> None:
    assert timing.predict_prefill_ms(1, 4096, 0) > timing.predict_prefill_ms(1, 64, 0)


def test_numpy_scalars_and_0d_arrays_are_taken(timing: ProfileTiming) -> None:
    plain = timing.predict_decode_ms(8, 4096, 512, 10**6)
    zero_d = [np.array(value) for value in (8, 4096, 512, 10**6)]
    assert timing.predict_decode_ms(*zero_d) == plain  # type: ignore[arg-type]
    sizes: list[Any] = [np.int64(value) for value in (2, 700, 100)]
    assert timing.predict_prefill_ms(*sizes) == (timing.predict_prefill_ms(2, 700, 100))


def test_decode_batches_are_padded_to_the_next_graph_size(fitted: Profile) -> None:
    padded = ProfileTiming(
        msgspec.structs.replace(fitted, engine=EngineFacts(graph_sizes=(8, 16, 32)))
    )
    times = [padded.predict_decode_ms(n, 16_000, 16_000 // n, 10**6) for n in (9, 12, 16)]
    bare = Predictor.of(fitted)
    assert max(times) / min(times) < 1.1
    assert padded.predict_decode_ms(16, 16_000, 1000, 10**6) == bare.decode_ms(16.0, 16_000.0)
    assert padded.predict_decode_ms(33, 33_000, 1000, 10**6) == bare.decode_ms(33.0, 33_000.0)
    many = padded.predict_decode_many(9, np.array([16_000, 17_000]), 10**6)
    assert many[0] == padded.predict_decode_ms(9, 16_000, 0, 10**6)


def test_coverage_says_where_a_query_lies(timing: ProfileTiming) -> None:
    assert timing.coverage_prefill(1, 600, 100) == "inside"
    assert timing.coverage_prefill(1, 9_000, 0) == "held"
    assert timing.coverage_prefill(1, 10**6, 0) == "extrapolated"
    assert timing.coverage_decode(8, 8_000) == "inside"
    assert timing.coverage_decode(300, 300_000) == "held"
    assert timing.coverage_decode(8, 8 * 10**6) == "extrapolated"
    assert timing.coverage_decode_many(8, np.array([8_000, 8 * 20_000, 8 * 10**6])).tolist() == [
        "inside",
        "held",
        "extrapolated",
    ]
    assert timing.coverage_pass(mixed(1, 300, 0, 8, 1000)) == "inside"


def test_a_regime_that_was_never_measured_is_extrapolated(fitted: Profile) -> None:
    box = {regime: axes for regime, axes in fitted.box.items() if regime != "mixed"}
    narrow = ProfileTiming(msgspec.structs.replace(fitted, box=box))
    assert narrow.coverage_pass(mixed(1, 300, 0, 8, 1000)) == "extrapolated"


def test_outside_the_box_the_edge_of_the_residual_is_held(fitted: Profile) -> None:
    predictor = Predictor.of(fitted)
    bare = Predictor(
        model=fitted.model,
        engine=fitted.engine,
        coefficients=fitted.coefficients,
        box=fitted.box,
        residual={},
    )
    edges = fitted.box["decode"]
    edge = edges["decodes"].high * edges["decode_context"].high
    factors = [
        predictor.decode_ms(8.0, kv_tokens) / bare.decode_ms(8.0, kv_tokens)
        for kv_tokens in (edge, 2 * edge, 50 * edge)
    ]
    assert factors == pytest.approx([factors[0]] * 3, rel=1e-12)


def test_intervals_enclose_the_prediction_and_widen_outside(timing: ProfileTiming) -> None:
    inside = timing.predict_interval(decode_shape(8, 8_000))
    outside = timing.predict_interval(decode_shape(8, 8 * 30_000))
    assert inside is not None
    assert outside is not None
    assert inside.low_ms < inside.predicted_ms < inside.high_ms
    assert outside.high_ms / outside.low_ms > inside.high_ms / inside.low_ms


def test_a_profile_without_intervals_has_none(fitted: Profile) -> None:
    bare = ProfileTiming(msgspec.structs.replace(fitted, intervals=None))
    assert bare.predict_interval(decode_shape(8, 8_000)) is None
