"""The law: milliseconds of one pass from what it computes, moves and keeps.

    pass      = launch + linear + attention + requests
    linear    = overlap(FLOPs / rate, weight bytes / rate) + tokens · token_ms
    attention = overlap(prompts + decodes [+ mixed terms], longest row)
    row       = √(2 · pairs + prefix²) tokens, or the longest decode: n + p of one prompt alone
    prompts   = overlap(pair FLOPs / rate, KV bytes / rate)
    decodes   = KV bytes / rate + ramp · kv / (kv + ramp_tokens)
    kv        = tokens + skew · (decodes · longest - tokens)

``overlap(a, b)`` is a smooth maximum: max(a, b) where the shorter is hidden wholly, a + b where
not at all. All coefficients are positive and every term rises with every sum over the pass
(requests, new tokens, prefix tokens, pairs, KV tokens) and with the longest decode; none divides
by a number of requests. Whatever joins a pass or grows in it raises sums only, so a pass never
gets cheaper by more work. The mixed terms exist because one kernel over prompts and decodes loses
what pure decode batches enjoy (split KV, packed query heads): measured batches do not add.

One formula serves floats and arrays. It uses only + - * / and square root, which IEEE 754 rounds
alike everywhere: a scalar prediction equals the vectorised one to the last bit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from passtime.profiles.document import Coefficients, EngineFacts
from passtime.profiles.shapes import BYTES, ModelShape
from passtime.sched.timing import FloatArray

Number = TypeVar("Number", float, FloatArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model shape asks of a device, in FLOPs and bytes."""

    flops_per_token: float
    flops_per_row: float  # LM head: per request of the pass
    weight_bytes: float  # of the linear layers and the LM head, routed experts apart
    expert_bytes: float  # of all routed experts
    experts: int
    experts_per_token: int
    flops_per_pair: float
    kv_bytes_per_token: float
    elementwise_bytes_per_token: float

    @classmethod
    def of(cls, model: ModelShape, *, timed_part: str = "pass") -> Work:
        """The work of a whole pass of ``model``, or of its attention alone."""
        linear = 1.0 if timed_part == "pass" else 0.0
        element, layers = BYTES[model.dtype], model.layers
        head = model.hidden_size * model.vocab_size
        moe = model.moe
        routed = 0 if moe is None else moe.experts * 3 * model.hidden_size * moe.expert_ffn_size
        dense = model.attention_parameters_per_layer + model.ffn_parameters_per_layer - routed
        active = model.attention_parameters_per_layer + model.active_ffn_parameters_per_layer
        ffn = model.ffn_size if moe is None else moe.experts_per_token * moe.expert_ffn_size
        touched = linear * (10.0 * model.hidden_size + 3.0 * ffn) + 4.0 * model.query_size
        weight = model.weight_bytes_per_element
        return cls(
            flops_per_token=linear * 2.0 * layers * active,
            flops_per_row=linear * 2.0 * head,
            weight_bytes=linear * (layers * dense * weight + head * element),
            expert_bytes=linear * layers * routed * weight,
            experts=0 if moe is None else moe.experts,
            experts_per_token=0 if moe is None else moe.experts_per_token,
            flops_per_pair=4.0 * layers * model.query_size,
            kv_bytes_per_token=float(model.kv_bytes_per_token),
            elementwise_bytes_per_token=layers * element * touched,
        )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The operations that differ between floats and arrays; each rounds alike in both."""

    sqrt: Callable[[Any], Any]
    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    ceil: Callable[[Any], Any]


FLOATS = Arithmetic(
    math.sqrt, lambda a, b: a if a >= b else b, lambda a, b: a if a <= b else b, math.ceil
)
ARRAYS = Arithmetic(np.sqrt, np.maximum, np.minimum, np.ceil)


class Law:
    """The law of one profile, with every rate turned into ms per unit."""

    def __init__(self, work: Work, c: Coefficients, engine: EngineFacts) -> None:
        """``c`` as in the document; ``engine`` says what attention computes and how it pads."""
        self.launch = c.launch_ms
        self.flop = 1e3 / c.linear_flops_per_s
        self.per_token = work.flops_per_token * self.flop
        self.per_row = work.flops_per_row * self.flop
        self.weights = work.weight_bytes * 1e3 / c.weight_bytes_per_s
        self.experts = _expert_curve(work, 1e3 / c.weight_bytes_per_s)
        self.linear_overlap = c.linear_overlap
        self.token = c.token_ms
        self.tile = float(engine.tile_tokens) if engine.tile_tokens and c.tile_share else None
        self.tile_share = c.tile_share
        self.rectangle = engine.attention == "rectangle"
        self.pair = work.flops_per_pair * 1e3 / c.attention_flops_per_s
        self.prefill_kv = work.kv_bytes_per_token * 1e3 / c.prefill_kv_bytes_per_s
        self.attention_overlap = c.attention_overlap
        self.decode_kv = work.kv_bytes_per_token * 1e3 / c.decode_kv_bytes_per_s
        self.skew = c.decode_skew
        self.ramp = c.decode_ramp_ms
        self.ramp_tokens = c.decode_ramp_tokens
        self.prefill_request = c.prefill_request_ms
        self.decode_request = c.decode_request_ms
        self.row = c.row_ms_per_token
        self.row_overlap = c.row_overlap
        self.mixed = c.mixed_ms
        self.mixed_request = c.mixed_request_ms
        self.mixed_kv = c.mixed_kv_ms
        self.mixed_request_kv = c.mixed_request_kv_ms

    def prefill_ms(
        self,
        requests: Number,
        new_tokens: Number,
        prefix_tokens: Number,
        pairs: Number,
        ops: Arithmetic,
    ) -> Number:
        """A pass of prompts only; ``requests`` and ``new_tokens`` are > 0."""
        row = _longest_prompt(prefix_tokens, pairs, ops) * self.row
        prompts = self._prompts(new_tokens, prefix_tokens, pairs, ops)
        linear = self._linear(new_tokens, requests, ops)
        attention = _overlap(prompts, row, self.row_overlap, ops)
        return self.launch + linear + attention + requests * self.prefill_request

    def effective_kv(self, decodes: Number, kv_tokens: Number, kv_max: Number) -> Number:
        """KV tokens as they cost: unequal decodes wait for the longest, by a share."""
        return kv_tokens + self.skew * (decodes * kv_max - kv_tokens)

    def decode_ms(self, requests: Number, kv_tokens: Number, ops: Arithmetic) -> Number:
        """A pass of decodes only; ``requests`` is > 0, ``kv_tokens`` are effective ones."""
        linear = self._linear(requests, requests, ops)
        return self.launch + linear + self._decodes(kv_tokens) + requests * self.decode_request

    def mixed_ms(
        self,
        requests: Number,
        new_tokens: Number,
        prefix_tokens: Number,
        pairs: Number,
        decodes: Number,
        kv_tokens: Number,
        kv_max: Number,
        ops: Arithmetic,
    ) -> Number:
        """A pass of both; ``requests``, ``new_tokens`` and ``decodes`` are > 0.

        ``kv_tokens`` are effective ones.
        """
        longest: Number = ops.maximum(_longest_prompt(prefix_tokens, pairs, ops), kv_max)
        work = (
            self._prompts(new_tokens, prefix_tokens, pairs, ops)
            + self._decodes(kv_tokens)
            + decodes * self.mixed_request
            + kv_tokens * self.mixed_kv
            + decodes * kv_tokens * self.mixed_request_kv
        )
        linear = self._linear(new_tokens + decodes, requests + decodes, ops)
        attention = _overlap(work, longest * self.row, self.row_overlap, ops)
        served = requests * self.prefill_request + decodes * self.decode_request
        return self.launch + self.mixed + linear + attention + served

    def _linear(self, tokens: Number, rows: Number, ops: Arithmetic) -> Number:
        computed: Number = tokens
        if self.tile is not None:
            padded: Number = ops.ceil(tokens / self.tile) * self.tile
            computed = tokens * (1.0 - self.tile_share) + padded * self.tile_share
        compute = computed * self.per_token + rows * self.per_row
        weights: Number | float = self.weights
        if self.experts is not None:
            weights = self.experts(tokens) + weights
        return _overlap(compute, weights, self.linear_overlap, ops) + tokens * self.token

    def _prompts(
        self, new_tokens: Number, prefix_tokens: Number, pairs: Number, ops: Arithmetic
    ) -> Number:
        if self.rectangle:  # the other half: exact for one prompt, and for any without a prefix
            pairs = pairs + ops.minimum(pairs, 0.5 * new_tokens * new_tokens)
        read = (new_tokens + prefix_tokens) * self.prefill_kv
        return _overlap(pairs * self.pair, read, self.attention_overlap, ops)

    def _decodes(self, kv_tokens: Number) -> Number:
        ramp = self.ramp * (kv_tokens / (kv_tokens + self.ramp_tokens))
        return kv_tokens * self.decode_kv + ramp


def _longest_prompt(prefix_tokens: Number, pairs: Number, ops: Arithmetic) -> Number:
    """new + prefix tokens of a prompt alone; of several, no less than the longest of them.

    A mean length would fall when a short prompt joins.
    """
    length: Number = ops.sqrt(2.0 * pairs + prefix_tokens * prefix_tokens)
    return length


def _overlap(a: Number, b: Number | float, visible: float, ops: Arithmetic) -> Number:
    """max(a, b) at ``visible`` 0, a + b at 1, smooth in between; rises with both."""
    gap = a - b
    root: Number = ops.sqrt(gap * gap + 4.0 * visible * (a * b))
    return 0.5 * (a + b + root)


def _expert_curve(work: Work, ms_per_byte: float) -> Callable[[Any], Any] | None:
    """ms to stream the experts that ``tokens`` hit on average: E · (1 - (1 - k/E)^tokens).

    Tabulated at powers of two and linear between them: powers round differently in the C library
    and in NumPy, interpolation does not.
    """
    if not work.experts:
        return None
    missed = 1.0 - work.experts_per_token / work.experts
    nodes = [0.0] + [float(2**exponent) for exponent in range(21)]
    values = [work.expert_bytes * ms_per_byte * (1.0 - missed**node) for node in nodes]
    grid, table = np.array(nodes), np.array(values)
    last = len(nodes) - 2

    def curve(tokens: Any) -> Any:
        if isinstance(tokens, float):
            index = min(bisect_right(nodes, tokens) - 1, last)
            low, high, at = values[index], values[index + 1], nodes[index]
            share = min((tokens - at) / (nodes[index + 1] - at), 1.0)
            return low + (high - low) * share
        index = np.minimum(np.searchsorted(grid, tokens, side="right") - 1, last)
        low, high, at = table[index], table[index + 1], grid[index]
        share = np.minimum((tokens - at) / (grid[index + 1] - at), 1.0)
        return low + (high - low) * share

    return curve
