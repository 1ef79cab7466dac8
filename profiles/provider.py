"""A profile as a timing model: the door by which a calibration enters a simulation."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct

from passtime.errors import ConfigError
from passtime.profiles.document import Profile, load_profile
from passtime.profiles.predict import (
    Coverage,
    Interval,
    Predictor,
    StrArray,
    decode_shape,
    prefill_shape,
)
from passtime.profiles.reading import convert_document
from passtime.sched.timing import FloatArray, IntArray, PassShape

Composition: TypeAlias = Literal["calls", "pass"]


class ProviderConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``{"profile": PATH_OR_NAME, "composition": "calls" | "pass"}``."""

    profile: str
    composition: Composition = "calls"


def from_config(config: Any, *, source: str) -> ProfileTiming:
    """The timing model that ``config`` describes; ConfigError or DocumentError names the fault."""
    read = convert_document(config, ProviderConfig, source=source, error=ConfigError)
    return ProfileTiming(load_profile(read.profile), composition=read.composition)


class ProfileTiming:
    """Predictions of one profile by both doors: two calls per pass, or the whole pass at once."""

    def __init__(self, profile: Profile, *, composition: Composition = "calls") -> None:
        """``composition`` says which door ranks use (see ``asks_whole_pass``)."""
        self.profile = profile
        self.composition: str = composition
        self.predictor = Predictor.of(profile)

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Time of ``batch_size`` equal prompts of ``mean_isl`` tokens, ``mean_prefix`` present."""
        new, prefix = float(mean_isl - mean_prefix), float(mean_prefix)
        batch = float(batch_size)
        pairs = new * prefix + new * (new + 1.0) / 2.0
        return self.predictor.prefill_ms(batch, batch * new, batch * prefix, batch * pairs)

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """Time of one decode step over ``active_kv_tokens`` cached tokens.

        The mean context is their quotient, so neither it nor the pool's capacity is looked at.
        """
        return self.predictor.decode_ms(float(batch_size), float(active_kv_tokens))

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """:meth:`predict_decode_ms` for many steps of one batch, bit for bit."""
        kv_tokens = np.asarray(active_kv_tokens, dtype=np.float64)
        return self.predictor.decode_many_ms(float(batch_size), kv_tokens)

    def predict_pass_ms(self, shape: PassShape) -> float:
        """Time of a whole pass, prefill and decode together; 0 for an empty one."""
        return self.predictor.pass_ms(shape)

    def predict_interval(self, shape: PassShape) -> Interval | None:
        """The prediction of a whole pass with its bounds; None if the profile carries none."""
        return self.predictor.interval(shape)

    def coverage_prefill(self, batch_size: int, mean_isl: int, mean_prefix: int) -> Coverage:
        """Whether the prefill query lies in the measured box."""
        return self.predictor.coverage(prefill_shape(batch_size, mean_isl, mean_prefix))

    def coverage_decode(self, batch_size: int, active_kv_tokens: int) -> Coverage:
        """Whether the decode query lies in the measured box."""
        return self.predictor.coverage(decode_shape(batch_size, active_kv_tokens))

    def coverage_decode_many(self, batch_size: int, active_kv_tokens: IntArray) -> StrArray:
        """:meth:`coverage_decode` for many steps of one batch."""
        kv_tokens = np.asarray(active_kv_tokens, dtype=np.float64)
        return self.predictor.coverage_decode_many(batch_size, kv_tokens)

    def coverage_pass(self, shape: PassShape) -> Coverage:
        """Whether the whole pass lies in the measured box."""
        return self.predictor.coverage(shape)
