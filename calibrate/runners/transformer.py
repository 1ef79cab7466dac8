"""A decoder-only transformer in NumPy: any model shape, a KV cache, and one pass over a batch.

Grouped-query attention with rotary positions, RMSNorm, a gated FFN (dense or a mixture of
experts), LM head and argmax, all in float32. Attention is computed in tiles with a running
softmax (Milakov and Gimelshein 2018, FlashAttention 2022), so that a pass costs the causal sum of
query-key pairs and not the whole rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from passtime.profiles.shapes import ModelShape

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

EPSILON = np.float32(1e-6)
ROPE_THETA = 10000.0
WEIGHT_SCALE = 0.02

QUERY_ROWS = 128  # query rows (tokens × query heads of one KV head) of an attention tile
LEAST_ROWS = 8  # fewer are padded: BLAS has other, discontinuous paths for one to a few rows
TILE_SCORES = 128 * 1024  # scores of an attention tile over all KV heads, half a MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One request's share of a pass: ``new`` tokens after ``prefix`` cached ones.

    Its keys and values lie in the pool's slots ``start`` … ``start + prefix + new - 1``.
    """

    start: int
    prefix: int
    new: int

    @property
    def end(self) -> int:
        """The slot after the last one."""
        return self.start + self.prefix + self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer; matrices are [in, out]."""

    attention_norm: Floats
    qkv: Floats
    head_norms: tuple[Floats, Floats] | None
    output: Floats
    ffn_norm: Floats
    router: Floats | None
    gate_up: Floats  # [experts, hidden, 2 × ffn]
    down: Floats  # [experts, ffn, hidden]


class Transformer:
    """Random weights of a shape, a pool of ``kv_tokens`` slots, and the forward pass."""

    def __init__(self, shape: ModelShape, *, kv_tokens: int, seed: int) -> None:
        """Weights are N(0, 0.02²), the pool starts filled with N(0, 1)."""
        rng = np.random.default_rng(seed)
        self.shape = shape
        self.kv_tokens = kv_tokens
        self.embedding = _normal(rng, shape.vocab_size, shape.hidden_size)
        self.head = (
            self.embedding.T
            if shape.tied_embeddings
            else _normal(rng, shape.hidden_size, shape.vocab_size)
        )
        self.norm = np.ones(shape.hidden_size, dtype=np.float32)
        self.layers = [_random_layer(rng, shape) for _ in range(shape.layers)]
        pool = (shape.layers, 2, shape.kv_heads, kv_tokens, shape.head_dim)
        self._pool = rng.standard_normal(pool, dtype=np.float32)
        self._cosine, self._sine = _rotations(shape.head_dim, kv_tokens)
        self._query_tile = max(1, min(QUERY_ROWS // self._group, isqrt(TILE_SCORES // shape.heads)))
        largest = max(TILE_SCORES, shape.heads * self._query_tile**2)
        self._scores = np.empty(largest, dtype=np.float32)
        square = np.full((self._query_tile, self._query_tile), -np.inf, dtype=np.float32)
        self._triangle = np.triu(square, k=1)

    @property
    def _group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    def forward(self, token_ids: Ints, segments: Sequence[Segment]) -> Ints:
        """One pass: the next token of every segment.

        ``token_ids`` are the new tokens of all segments in a row. Their keys and values are
        written to the pool; those of the prefixes are read from it.
        """
        following: Ints = self.logits(token_ids, segments).argmax(axis=-1)
        return following

    def logits(self, token_ids: Ints, segments: Sequence[Segment]) -> Floats:
        """As ``forward``, before the argmax: [segments, vocab_size]."""
        positions, slots = _positions_and_slots(segments)
        tokens: Floats = self.embedding[token_ids]
        for layer, (keys, values) in zip(self.layers, self._pool, strict=True):
            query, key, value = self._project(layer, tokens, positions)
            keys[:, slots] = key.swapaxes(0, 1)
            values[:, slots] = value.swapaxes(0, 1)
            queries = query.reshape(len(tokens), self.shape.query_size)
            tokens += _linear(self._attention(queries, keys, values, segments), layer.output)
            tokens += self._ffn(layer, _rms_norm(tokens, layer.ffn_norm))
        last = np.cumsum([segment.new for segment in segments]) - 1
        return _linear(_rms_norm(tokens[last], self.norm), self.head)

    def _project(
        self, layer: _Layer, tokens: Floats, positions: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values of some tokens: [tokens, heads or kv_heads, head_dim]."""
        shape = self.shape
        qkv = _linear(_rms_norm(tokens, layer.attention_norm), layer.qkv)
        query, key, value = np.split(
            qkv.reshape(len(tokens), -1, shape.head_dim),
            [shape.heads, shape.heads + shape.kv_heads],
            axis=1,
        )
        if layer.head_norms is not None:
            query = _rms_norm(query, layer.head_norms[0])
            key = _rms_norm(key, layer.head_norms[1])
        cosine, sine = self._cosine[positions, None], self._sine[positions, None]
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine), value

    def _attention(
        self, queries: Floats, keys: Floats, values: Floats, segments: Sequence[Segment]
    ) -> Floats:
        attended = np.empty_like(queries)
        row = 0
        for segment in segments:
            for first in range(0, segment.new, self._query_tile):
                count = min(self._query_tile, segment.new - first)
                rows = slice(row + first, row + first + count)
                attended[rows] = self._attend(
                    queries[rows],
                    keys[:, segment.start : segment.end],
                    values[:, segment.start : segment.end],
                    segment.prefix + first,
                )
            row += segment.new
        return attended

    def _attend(self, queries: Floats, keys: Floats, values: Floats, before: int) -> Floats:
        """Attention of one tile of consecutive queries, the first of which is key ``before``.

        Keys before it are seen by all; those of the tile itself under the causal triangle.
        """
        shape, count = self.shape, len(queries)
        rows = count * self._group
        query = (
            queries.reshape(count, shape.kv_heads, self._group, shape.head_dim)
            .swapaxes(0, 1)
            .reshape(shape.kv_heads, rows, shape.head_dim)
        ) * np.float32(shape.head_dim**-0.5)
        softmax = _RunningSoftmax(shape.kv_heads, rows, shape.head_dim)
        step = max(1, TILE_SCORES // (shape.kv_heads * rows))
        for start, end in pairwise([*range(0, before, step), before, before + count]):
            scores = self._scores[: shape.kv_heads * rows * (end - start)].reshape(
                shape.kv_heads, rows, end - start
            )
            np.matmul(query, keys[:, start:end].swapaxes(1, 2), out=scores)
            if start == before and count > 1:
                masked = scores.reshape(shape.kv_heads, count, self._group, count)
                masked += self._triangle[:count, None, :count]
            softmax.add(scores, values[:, start:end])
        return (
            softmax.result()
            .reshape(shape.kv_heads, count, self._group, shape.head_dim)
            .swapaxes(0, 1)
            .reshape(count, shape.query_size)
        )

    def _ffn(self, layer: _Layer, tokens: Floats) -> Floats:
        if layer.router is None:
            return _gated(tokens, layer.gate_up[0], layer.down[0])
        assert self.shape.moe is not None
        affinity = _linear(tokens, layer.router)
        chosen = np.argsort(-affinity, axis=-1, kind="stable")[
            :, : self.shape.moe.experts_per_token
        ]
        weights = _softmax(np.take_along_axis(affinity, chosen, axis=-1))
        result = np.zeros_like(tokens)
        for expert in np.unique(chosen):
            rows, rank = np.nonzero(chosen == expert)
            part = _gated(tokens[rows], layer.gate_up[expert], layer.down[expert])
            result[rows] += weights[rows, rank, None] * part
        return result


class _RunningSoftmax:
    """softmax(scores) @ values over all keys, from one tile of keys after the other."""

    def __init__(self, heads: int, rows: int, head_dim: int) -> None:
        self._maximum = np.full((heads, rows, 1), -np.inf, dtype=np.float32)
        self._sum = np.zeros((heads, rows, 1), dtype=np.float32)
        self._weighted = np.zeros((heads, rows, head_dim), dtype=np.float32)

    def add(self, scores: Floats, values: Floats) -> None:
        """One tile: [heads, rows, keys] and [heads, keys, head_dim]; ``scores`` is overwritten."""
        maximum = np.maximum(self._maximum, scores.max(axis=-1, keepdims=True))
        rescale = np.exp(self._maximum - maximum)
        np.subtract(scores, maximum, out=scores)
        np.exp(scores, out=scores)
        self._sum = self._sum * rescale + scores.sum(axis=-1, keepdims=True)
        self._weighted = self._weighted * rescale + scores @ values
        self._maximum = maximum

    def result(self) -> Floats:
        """[heads, rows, head_dim]."""
        return self._weighted / self._sum


def _positions_and_slots(segments: Sequence[Segment]) -> tuple[Ints, Ints]:
    """Of every new token: its position in the sequence, and its slot in the pool."""
    positions = [np.arange(s.prefix, s.prefix + s.new, dtype=np.int64) for s in segments]
    slots = [s.start + place for s, place in zip(segments, positions, strict=True)]
    return np.concatenate(positions), np.concatenate(slots)


def _random_layer(rng: np.random.Generator, shape: ModelShape) -> _Layer:
    moe = shape.moe
    experts, ffn = (moe.experts, moe.expert_ffn_size) if moe else (1, shape.ffn_size)
    head = np.ones(shape.head_dim, dtype=np.float32)
    hidden = np.ones(shape.hidden_size, dtype=np.float32)
    return _Layer(
        attention_norm=hidden,
        qkv=_normal(rng, shape.hidden_size, shape.query_size + 2 * shape.kv_size),
        head_norms=(head, head) if shape.qk_norm else None,
        output=_normal(rng, shape.query_size, shape.hidden_size),
        ffn_norm=hidden,
        router=_normal(rng, shape.hidden_size, experts) if moe else None,
        gate_up=_normal(rng, experts, shape.hidden_size, 2 * ffn),
        down=_normal(rng, experts, ffn, shape.hidden_size),
    )


def _normal(rng: np.random.Generator, *size: int) -> Floats:
    values = rng.standard_normal(size, dtype=np.float32)
    values *= np.float32(WEIGHT_SCALE)
    return values


def _rotations(head_dim: int, positions: int) -> tuple[Floats, Floats]:
    """Cosine and sine per position and half dimension (RoPE, Su et al. 2021)."""
    frequency = ROPE_THETA ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.outer(np.arange(positions), frequency)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rotate(heads: Floats, cosine: Floats, sine: Floats) -> Floats:
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=-1)


def _rms_norm(tokens: Floats, weight: Floats) -> Floats:
    mean_square = np.einsum("...i,...i->...", tokens, tokens) / np.float32(tokens.shape[-1])
    scaled: Floats = tokens * (1 / np.sqrt(mean_square + EPSILON))[..., None] * weight
    return scaled


def _linear(tokens: Floats, weight: Floats) -> Floats:
    """tokens @ weight, with at least ``LEAST_ROWS`` rows computed."""
    count = len(tokens)
    if count < LEAST_ROWS:
        tokens = np.concatenate((tokens, tokens[-1:].repeat(LEAST_ROWS - count, axis=0)))
    product: Floats = tokens @ weight
    return product[:count]


def _gated(tokens: Floats, gate_up: Floats, down: Floats) -> Floats:
    """silu(gate) × up, then down."""
    gate, up = np.split(_linear(tokens, gate_up), 2, axis=-1)
    return _linear(gate / (1 + np.exp(-gate)) * up, down)


def _softmax(scores: Floats) -> Floats:
    exponent = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normal: Floats = exponent / exponent.sum(axis=-1, keepdims=True)
    return normal
