"""The timing door: what a rank asks about a pass, and the models that are built in.

A rank asks a :class:`TimingModel` how long the prefill part and the decode part of a pass take
(C-40 … C-45). A model may offer more (:class:`PassModel`, :class:`DecodeStretchModel`); it says
so by having the methods. Everything measured enters through the same door, see
:mod:`passtime.providers`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from passtime.errors import ProviderError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class TimingModel(Protocol):
    """How long the two parts of a pass take (C-40): integers in, milliseconds out."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Time of a prefill of ``batch_size`` prompts, from the floored means of C-41."""
        ...

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """Time of one decode step of ``batch_size`` requests (C-42)."""
        ...


@runtime_checkable
class DecodeStretchModel(Protocol):
    """A model that answers many decode steps of one batch at once, bit-equal to the scalar."""

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """One value per entry of ``active_kv_tokens``; mean context is the floored quotient."""
        ...


class PassShape(NamedTuple):
    """What the scheduler really knows of a pass: sums over its requests, all in tokens.

    ``prefill_pairs`` is Σ new·prefix + new·(new+1)/2, the query-key pairs of causal attention.
    """

    prefill_requests: int
    prefill_new_tokens: int
    prefill_prefix_tokens: int
    prefill_pairs: int
    decode_requests: int
    decode_kv_tokens: int
    decode_kv_max: int
    total_kv_tokens: int


@runtime_checkable
class PassModel(Protocol):
    """A model that is asked the whole question (``"composition": "pass"``)."""

    composition: str

    def predict_pass_ms(self, shape: PassShape) -> float:
        """Time of the whole pass, prefill and decode together."""
        ...


def asks_whole_pass(model: TimingModel) -> bool:
    """Whether ranks ask ``model`` by :meth:`PassModel.predict_pass_ms`, not by the two calls."""
    return isinstance(model, PassModel) and model.composition == "pass"


class FixedTiming:
    """Two constants, whatever the batch (C-44)."""

    def __init__(self, *, prefill_ms: float, decode_ms: float) -> None:
        """Both in milliseconds, finite and >= 0 (checked by the configuration)."""
        self.prefill_ms = prefill_ms
        self.decode_ms = decode_ms

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """The prefill constant."""
        return self.prefill_ms if batch_size else 0.0

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """The decode constant."""
        return self.decode_ms if batch_size else 0.0

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """The decode constant, once per step."""
        return np.full(len(active_kv_tokens), self.decode_ms if batch_size else 0.0)


class PolynomialTiming:
    """The reference's default polynomials (C-45), operation by operation."""

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Quadratic in batch × new tokens."""
        tokens = float(batch_size * (mean_isl - mean_prefix))
        if tokens == 0.0:
            return 0.0
        return (4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens) + 16.50142

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """Quadratic in the share of the KV pool in use, at least 1 ms."""
        if batch_size == 0:
            return 0.0
        used = min(1.0, active_kv_tokens / total_kv_tokens) if total_kv_tokens else 1.0
        return max(1.0, (-25.74 * (used * used) + 54.01 * used) + 5.74)

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """The decode polynomial, once per step."""
        if batch_size == 0:
            return np.zeros(len(active_kv_tokens))
        if total_kv_tokens:
            used = np.minimum(1.0, active_kv_tokens / float(total_kv_tokens))
        else:
            used = np.ones(len(active_kv_tokens))
        steps: FloatArray = np.maximum(1.0, (-25.74 * (used * used) + 54.01 * used) + 5.74)
        return steps


# --- From a model's answer to simulated time (V-70) ---------------------------------------------

_NS_PER_S = 10**9
_NS_LIMIT_S = 2**64
EXACT_NS = 2**50
"""Below, a count of nanoseconds survives its conversion to seconds or milliseconds and back."""


def _round_ns(seconds: float) -> int:
    """Nearest whole nanosecond of the double's exact value, ties to even."""
    nanoseconds = seconds * 1e9
    nearest = round(nanoseconds)
    if nanoseconds < EXACT_NS and abs(nanoseconds - nearest) <= 0.4999:
        return nearest  # the product's rounding error cannot reach the tie
    return round(Fraction(seconds) * _NS_PER_S)


def _seconds(nanoseconds: int) -> float:
    if nanoseconds < _NS_PER_S:
        return nanoseconds / 1e9
    whole, rest = divmod(nanoseconds, _NS_PER_S)
    return float(whole) + rest / 1e9


def contribution_ms(raw_ms: float, ratio: float) -> float:
    """What ``raw_ms`` of a model adds to the clock at speed-up ``ratio`` (V-70); ratio 0 = 1.

    ``raw_ms`` is finite and >= 0. Raises ProviderError if it does not fit a 64-bit second count.
    """
    seconds = raw_ms / 1000.0
    if ratio == 1.0 and seconds < 1.0:  # nearly always: the whole chain in four operations
        nearest = round(seconds * 1e9)
        if abs(seconds * 1e9 - nearest) <= 0.4999:
            return nearest / 1e9 * 1000.0
    if seconds >= _NS_LIMIT_S:
        raise ProviderError(f"timing duration {raw_ms}ms is out of range: over 2**64 seconds")
    nanoseconds = _round_ns(seconds)
    if ratio != 1.0 or nanoseconds >= EXACT_NS:
        nanoseconds = _scaled_ns(nanoseconds, ratio)
    return _seconds(nanoseconds) * 1000.0


def _scaled_ns(nanoseconds: int, ratio: float) -> int:
    """Steps 3 to 5 of V-70, which change nothing at ratio 1 below ``EXACT_NS``."""
    if ratio > 0 and nanoseconds > 0:
        scaled = _seconds(nanoseconds) / ratio
        if scaled >= _NS_LIMIT_S:
            raise ProviderError(
                f"scaled timing duration is out of range for speedup {ratio}: over 2**64 seconds"
            )
        nanoseconds = _round_ns(scaled)
    milliseconds = _seconds(nanoseconds) * 1000.0
    return _round_ns(milliseconds / 1000.0)


def checked_prefill_ms(raw_ms: float) -> float:
    """The value of a prefill call: not finite is an error, negative becomes 0 (C-43)."""
    if 0.0 <= raw_ms < math.inf:
        return raw_ms
    if not math.isfinite(raw_ms):
        raise ProviderError(f"prefill timing provider returned non-finite duration {raw_ms}ms")
    return 0.0


def checked_decode_ms(raw_ms: float) -> float:
    """The value of a decode or whole-pass call: it must be finite and >= 0 (C-43)."""
    if 0.0 <= raw_ms < math.inf:
        return raw_ms
    if not math.isfinite(raw_ms):
        raise ProviderError(f"decode timing provider returned non-finite duration {raw_ms}ms")
    raise ProviderError(f"timing provider returned invalid duration {raw_ms}ms")
