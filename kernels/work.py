"""What a pass computes and moves, from the shape of the model alone.

FLOPs count a multiply-add as two; bytes count every operand once, at its stored width, as if the
caches were perfect within an operator and empty between operators. Both are the usual roofline
counts (Williams, Waterman, Patterson 2009); attention follows FlashAttention-2 (arXiv 2307.08691,
§4.1) with the causal pairs counted exactly instead of halved.

Symbols: T new tokens, P cached tokens before them, d hidden size, H query heads, K KV heads,
D head dimension, F FFN size, V vocabulary, e bytes per element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from passtime.profiles.shapes import BYTES, ModelShape


class BatchLike(Protocol):
    """Tokens of one pass: (new, prefix) per prompt chunk, cached KV length per decode."""

    @property
    def prefill(self) -> Sequence[tuple[int, int]]:
        """(new tokens, prefix tokens) of each prompt chunk."""
        ...

    @property
    def decode(self) -> Sequence[int]:
        """KV length of each decoding request, before its new token."""
        ...


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of device memory traffic, both >= 0."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both done."""
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        """Done ``times`` times."""
        return Work(self.flops * times, self.bytes * times)

    def floor_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """The roofline: no device of these peaks is faster. Seconds."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def total(parts: Iterable[Work]) -> Work:
    """All of them done."""
    return sum(parts, Work())


def causal_pairs(new: int, prefix: int) -> int:
    """Query-key pairs of a chunk: every new token sees the prefix, itself and what is between."""
    return new * prefix + new * (new + 1) // 2


def new_tokens(batch: BatchLike) -> int:
    """Rows of the pass: prompt tokens plus one for each decode."""
    return sum(new for new, _ in batch.prefill) + len(batch.decode)


def requests(batch: BatchLike) -> int:
    """Requests of the pass, each of which gets one row of logits."""
    return len(batch.prefill) + len(batch.decode)


# --- One operator --------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int, *, input_bytes: int, weight_bytes: int, output_bytes: int) -> Work:
    """C[m, n] = A[m, k] · B[n, k]ᵀ: 2mnk FLOPs; A, B read once and C written once."""
    moved = input_bytes * m * k + weight_bytes * n * k + output_bytes * m * n
    return Work(2.0 * m * n * k, float(moved))


def rmsnorm(tokens: int, size: int, element_bytes: int, *, residual: bool = True) -> Work:
    """Square, sum, scale, weight (and add): 5 FLOPs an element; x, residual in, both out."""
    return Work(5.0 * tokens * size, float((4 if residual else 2) * element_bytes * tokens * size))


def silu_mul(tokens: int, size: int, element_bytes: int) -> Work:
    """silu(gate) · up: about 5 FLOPs an element; gate and up in, the product out."""
    return Work(5.0 * tokens * size, 3.0 * element_bytes * tokens * size)


def rope_kv_write(tokens: int, model: ModelShape) -> Work:
    """Rotate q and k (6 FLOPs a pair), write q back and k, v into the pages."""
    element, kv_element = BYTES[model.dtype], BYTES[model.kv_dtype or model.dtype]
    rotated = tokens * (model.query_size + model.kv_size)
    read = element * tokens * (model.query_size + 2 * model.kv_size)
    written = tokens * (element * model.query_size + kv_element * 2 * model.kv_size)
    return Work(3.0 * rotated, float(read + written))


def prefill_attention(model: ModelShape, chunks: Sequence[tuple[int, int]]) -> Work:
    """4·H·D FLOPs a causal pair (QKᵀ and PV); q and output once, K and V of prefix and chunk."""
    element, kv_element = BYTES[model.dtype], BYTES[model.kv_dtype or model.dtype]
    pairs = sum(causal_pairs(new, prefix) for new, prefix in chunks)
    rows = sum(new for new, _ in chunks)
    keys = sum(new + prefix for new, prefix in chunks)
    moved = 2 * element * rows * model.query_size + 2 * kv_element * keys * model.kv_size
    return Work(4.0 * model.query_size * pairs, float(moved))


def decode_attention(model: ModelShape, kv_lengths: Sequence[int], *, partials: int = 0) -> Work:
    """4·H·D FLOPs a key; K and V once, q and output once.

    ``kv_lengths`` include the new token. ``partials`` is the number of split-KV items, each of
    which writes and reads back H·(D+1) float32 (Flash-Decoding).
    """
    element, kv_element = BYTES[model.dtype], BYTES[model.kv_dtype or model.dtype]
    keys, rows = sum(kv_lengths), len(kv_lengths)
    moved = 2 * kv_element * keys * model.kv_size + 2 * element * rows * model.query_size
    moved += 2 * 4 * partials * model.heads * (model.head_dim + 1)
    return Work(4.0 * model.query_size * keys, float(moved))


def argmax(rows: int, columns: int, element_bytes: int) -> Work:
    """One comparison an element, every logit read once."""
    return Work(float(rows * columns), float(element_bytes * rows * columns))


def experts_hit(tokens: int, experts: int, experts_per_token: int) -> float:
    """Expected number of distinct experts under uniform routing: E·(1 − (1 − k/E)^T)."""
    return experts * (1.0 - (1.0 - experts_per_token / experts) ** tokens)


# --- One pass ------------------------------------------------------------------------------------


def _linear(model: ModelShape, tokens: int, outputs: int, inputs: int) -> Work:
    element, weight = BYTES[model.dtype], model.weight_bytes_per_element
    # An fp8 layer quantises its input first: read it wide, write it narrow, read it narrow.
    narrow = weight if weight < element else element
    work = gemm(
        tokens, outputs, inputs,
        input_bytes=narrow, weight_bytes=weight, output_bytes=element,
    )  # fmt: skip
    if narrow < element:
        work += Work(2.0 * tokens * inputs, float((element + narrow) * tokens * inputs))
    return work


def _experts(model: ModelShape, tokens: int) -> dict[str, Work]:
    assert model.moe is not None
    moe, element = model.moe, BYTES[model.dtype]
    routed = tokens * moe.experts_per_token
    hit = experts_hit(tokens, moe.experts, moe.experts_per_token)
    size = moe.expert_ffn_size

    def grouped(outputs: int, inputs: int) -> Work:
        moved = element * routed * (inputs + outputs) + element * hit * outputs * inputs
        return Work(2.0 * routed * outputs * inputs, float(moved))

    router = gemm(
        tokens, moe.experts, model.hidden_size,
        input_bytes=element, weight_bytes=element, output_bytes=element,
    )  # fmt: skip
    return {
        "router": router,
        "experts_gate_up": grouped(2 * size, model.hidden_size),
        "experts_silu_mul": silu_mul(routed, size, element),
        "experts_down": grouped(model.hidden_size, size),
        "experts_combine": Work(
            2.0 * routed * model.hidden_size,
            float(element * (routed + tokens) * model.hidden_size),
        ),
    }


def layer_operators(model: ModelShape, batch: BatchLike) -> dict[str, Work]:
    """Work of each operator of one layer, in the order in which they run."""
    tokens, element = new_tokens(batch), BYTES[model.dtype]
    d = model.hidden_size
    operators = {
        "attention_norm": rmsnorm(tokens, d, element),
        "qkv": _linear(model, tokens, model.query_size + 2 * model.kv_size, d),
        "rope_kv_write": rope_kv_write(tokens, model),
        "prefill_attention": prefill_attention(model, batch.prefill),
        "decode_attention": decode_attention(model, [kv + 1 for kv in batch.decode]),
        "output": _linear(model, tokens, d, model.query_size),
        "ffn_norm": rmsnorm(tokens, d, element),
    }
    if model.moe is not None:
        return operators | _experts(model, tokens)
    return operators | {
        "gate_up": _linear(model, tokens, 2 * model.ffn_size, d),
        "silu_mul": silu_mul(tokens, model.ffn_size, element),
        "down": _linear(model, tokens, d, model.ffn_size),
    }


def end_operators(model: ModelShape, batch: BatchLike) -> dict[str, Work]:
    """Work of what runs once a pass: embedding, final norm, LM head and argmax."""
    tokens, rows, element = new_tokens(batch), requests(batch), BYTES[model.dtype]
    d, vocabulary = model.hidden_size, model.vocab_size
    head = gemm(
        rows, vocabulary, d,
        input_bytes=element, weight_bytes=element, output_bytes=element,
    )  # fmt: skip
    return {
        "embedding": Work(0.0, 2.0 * element * tokens * d),
        "final_norm": rmsnorm(tokens, d, element),
        "lm_head": head,
        "argmax": argmax(rows, vocabulary, element),
    }


def pass_work(model: ModelShape, batch: BatchLike) -> Work:
    """Work of one whole pass of all layers."""
    layer = total(layer_operators(model, batch).values())
    return layer * model.layers + total(end_operators(model, batch).values())
