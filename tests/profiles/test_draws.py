"""Draws of a profile: spread as its intervals say, smooth, reproducible, ordinary profiles."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from passtime.errors import DocumentError
from passtime.profiles.document import Profile
from passtime.profiles.draws import draws
from passtime.profiles.predict import decode_shape, prefill_shape
from passtime.profiles.provider import ProfileTiming

PREFILL, DECODE = prefill_shape(1, 300, 0), decode_shape(8, 8 * 400)


def test_share_of_draws_inside_the_interval_is_its_level(fitted: Profile) -> None:
    timing = ProfileTiming(fitted)
    for shape in (PREFILL, DECODE):
        bounds = timing.predict_interval(shape)
        assert bounds is not None
        times = [ProfileTiming(d).predict_pass_ms(shape) for d in draws(fitted, 150, seed=1)]
        inside = np.mean([bounds.low_ms <= time <= bounds.high_ms for time in times])
        assert fitted.intervals is not None
        assert abs(inside - fitted.intervals.level_percent / 100) < 0.08
        assert abs(np.median(times) / bounds.predicted_ms - 1) < 0.03


def test_same_seed_same_draws(fitted: Profile) -> None:
    first, again = (list(draws(fitted, 3, seed=7)) for _ in range(2))
    assert first == again
    assert first[0] != first[1]
    assert first != list(draws(fitted, 3, seed=8))


def test_neighbouring_shapes_are_off_alike(fitted: Profile) -> None:
    near, far = [], []
    base = ProfileTiming(fitted)
    shapes = [prefill_shape(1, tokens, 0) for tokens in (64, 80, 2048)]
    for draw in draws(fitted, 100, seed=2):
        timing = ProfileTiming(draw)
        off = [np.log(timing.predict_pass_ms(s) / base.predict_pass_ms(s)) for s in shapes]
        near.append(off[:2])
        far.append([off[0], off[2]])
    assert np.corrcoef(np.array(near).T)[0, 1] > 0.9
    assert np.corrcoef(np.array(far).T)[0, 1] < 0.9


def test_model_class_without_a_residual_is_drawn_too(fitted: Profile) -> None:
    plain = msgspec.structs.replace(fitted, residual={})
    times = {ProfileTiming(d).predict_pass_ms(DECODE) for d in draws(plain, 5, seed=1)}
    assert len(times) == 5


def test_profile_without_intervals_is_refused(fitted: Profile) -> None:
    bare = msgspec.structs.replace(fitted, intervals=None)
    with pytest.raises(DocumentError, match="carries no intervals"):
        list(draws(bare, 1, seed=0))
