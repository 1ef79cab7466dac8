"""A profile as a timing model: the door by which a calibration enters a simulation."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from passtime.errors import ConfigError
from passtime.profiles.document import Profile, load_profile
from passtime.profiles.law import decode_ms, prefill_ms
from passtime.profiles.reading import convert_document
from passtime.sched.timing import FloatArray, IntArray, PassShape

Composition: TypeAlias = Literal["calls", "pass"]
Coverage: TypeAlias = Literal["inside", "held", "extrapolated"]
StrArray = npt.NDArray[np.str_]


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
        self._law = profile.coefficients

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Time of ``batch_size`` equal prompts of ``mean_isl`` tokens, ``mean_prefix`` present."""
        new = mean_isl - mean_prefix
        if batch_size <= 0 or new <= 0:
            return 0.0
        pairs = float(new) * mean_prefix + new * (new + 1) / 2
        law = self._law
        return law.launch_ms + prefill_ms(
            law, float(batch_size), batch_size * float(new), batch_size * pairs
        )

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """Time of one decode step over ``active_kv_tokens`` cached tokens."""
        if batch_size <= 0:
            return 0.0
        return self._law.launch_ms + decode_ms(
            self._law, float(batch_size), float(active_kv_tokens)
        )

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """:meth:`predict_decode_ms` for many steps of one batch, bit for bit."""
        kv_tokens = active_kv_tokens.astype(float)
        if batch_size <= 0:
            return kv_tokens * 0.0
        law = self._law
        steps = kv_tokens * law.decode_kv_ms
        base = float(batch_size) * (law.token_ms + law.decode_request_ms)
        return law.launch_ms + (base + steps)

    def predict_pass_ms(self, shape: PassShape) -> float:
        """Time of a whole pass, prefill and decode together; 0 for an empty one."""
        law, total = self._law, 0.0
        if shape.prefill_new_tokens:
            total += prefill_ms(
                law,
                float(shape.prefill_requests),
                float(shape.prefill_new_tokens),
                float(shape.prefill_pairs),
            )
        if shape.decode_requests:
            total += decode_ms(law, float(shape.decode_requests), float(shape.decode_kv_tokens))
        if shape.prefill_new_tokens and shape.decode_requests:
            total += law.mixed_ms
        return law.launch_ms + total if total else 0.0

    def coverage_prefill(self, batch_size: int, mean_isl: int, mean_prefix: int) -> Coverage:
        """Whether the prefill query lies in the measured box."""
        new = mean_isl - mean_prefix
        pairs = batch_size * (new * mean_prefix + new * (new + 1) // 2)
        return self._coverage(
            "prefill", {"prefill_new_tokens": batch_size * new, "prefill_pairs": pairs}
        )

    def coverage_decode(self, batch_size: int, active_kv_tokens: int) -> Coverage:
        """Whether the decode query lies in the measured box."""
        return self._coverage(
            "decode", {"decode_requests": batch_size, "decode_kv_tokens": active_kv_tokens}
        )

    def coverage_decode_many(self, batch_size: int, active_kv_tokens: IntArray) -> StrArray:
        """:meth:`coverage_decode` for many steps of one batch."""
        tags = [self.coverage_decode(batch_size, int(kv)) for kv in active_kv_tokens]
        return np.array(tags, dtype=np.str_)

    def coverage_pass(self, shape: PassShape) -> Coverage:
        """Whether the whole pass lies in the measured box."""
        parts: dict[str, int] = {}
        if shape.prefill_new_tokens:
            parts |= {
                "prefill_new_tokens": shape.prefill_new_tokens,
                "prefill_pairs": shape.prefill_pairs,
            }
        if shape.decode_requests:
            parts |= {
                "decode_requests": shape.decode_requests,
                "decode_kv_tokens": shape.decode_kv_tokens,
            }
        regime = "mixed" if len(parts) > 2 else "decode" if shape.decode_requests else "prefill"
        return self._coverage(regime, parts)

    def _coverage(self, regime: str, sizes: dict[str, int]) -> Coverage:
        box = self.profile.box.get(regime)  # type: ignore[call-overload]
        if box is None:
            return "extrapolated"
        worst = 1.0
        for axis, size in sizes.items():
            edge = box[axis]
            worst = max(worst, size / max(edge.high, 1.0), max(edge.low, 1.0) / max(size, 1))
        return "inside" if worst == 1.0 else "held" if worst <= 4.0 else "extrapolated"
