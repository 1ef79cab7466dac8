"""The law: milliseconds of one pass from what it computes. One formula for floats and arrays."""

from __future__ import annotations

from typing import TypeVar

from passtime.profiles.document import Coefficients
from passtime.sched.timing import FloatArray

Number = TypeVar("Number", float, FloatArray)


def prefill_ms(c: Coefficients, requests: Number, new_tokens: Number, pairs: Number) -> Number:
    """Time above the launch of the prompts of a pass."""
    return requests * c.prefill_request_ms + new_tokens * c.token_ms + pairs * c.pair_ms


def decode_ms(c: Coefficients, requests: Number, kv_tokens: Number) -> Number:
    """Time above the launch of the decodes of a pass."""
    return requests * (c.token_ms + c.decode_request_ms) + kv_tokens * c.decode_kv_ms
