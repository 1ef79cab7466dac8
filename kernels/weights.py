"""Weights and KV pages of a stack of layers, random but of the magnitude of trained ones.

Values matter to time: zeros and small integers toggle fewer wires, so a matrix product on them
draws less power and clocks higher than on normal data. Weights are N(0, 0.02), the usual
initialisation; activations follow from them through the norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from passtime.kernels.fp8 import Fp8Weight, fp8_weight
from passtime.kernels.rope import rotation_table
from passtime.profiles.shapes import DType, ModelShape

TORCH_DTYPE: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}

LinearWeight: TypeAlias = Tensor | Fp8Weight


@dataclass(frozen=True)
class DenseFfn:
    """gate_up [2 · ffn, hidden]: gate rows, then up rows; down [hidden, ffn]."""

    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class MoeFfn:
    """router [experts, hidden]; gate_up [experts, 2 · ffn, hidden]; down [experts, hidden, ffn]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    experts_per_token: int


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv [query + 2 · kv, hidden], output [hidden, query]; norms [hidden]."""

    attention_norm: Tensor
    qkv: LinearWeight
    qk_gains: tuple[Tensor, Tensor] | None
    output: LinearWeight
    ffn_norm: Tensor
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True)
class Weights:
    """A stack of distinct layers and the two ends; embedding and lm_head [vocabulary, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    rotations: tuple[Tensor, ...]

    def first(self, layers: int) -> Weights:
        """The same ends around the first ``layers`` layers."""
        return replace(self, layers=self.layers[:layers])


@dataclass(frozen=True)
class LayerPages:
    """Keys and values of one layer, each [pages, KV heads, page tokens, head dim]."""

    k: Tensor
    v: Tensor


def random_weights(
    model: ModelShape,
    *,
    layers: int,
    positions: int,
    device: torch.device | str,
    seed: int = 0,
    std: float = 0.02,
) -> Weights:
    """Weights of ``layers`` distinct layers of ``model``; ``positions`` rotary positions."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, d = TORCH_DTYPE[model.dtype], model.hidden_size

    def normal(*shape: int) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, std, generator=generator)

    def linear(outputs: int, inputs: int) -> LinearWeight:
        weight = normal(outputs, inputs)
        return fp8_weight(weight) if model.linear_dtype == "float8_e4m3" else weight

    def gain(size: int) -> Tensor:
        return normal(size) + 1.0

    def ffn() -> DenseFfn | MoeFfn:
        if model.moe is None:
            return DenseFfn(linear(2 * model.ffn_size, d), linear(d, model.ffn_size))
        experts, size = model.moe.experts, model.moe.expert_ffn_size
        return MoeFfn(
            router=normal(experts, d),
            gate_up=normal(experts, 2 * size, d),
            down=normal(experts, d, size),
            experts_per_token=model.moe.experts_per_token,
        )

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=gain(d),
            qkv=linear(model.query_size + 2 * model.kv_size, d),
            qk_gains=(gain(model.head_dim), gain(model.head_dim)) if model.qk_norm else None,
            output=linear(d, model.query_size),
            ffn_norm=gain(d),
            ffn=ffn(),
        )

    embedding = normal(model.vocab_size, d)
    cos, sin = rotation_table(positions, model.head_dim)
    return Weights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(layers)),
        final_norm=gain(d),
        lm_head=embedding if model.tied_embeddings else normal(model.vocab_size, d),
        rotations=(cos.to(device), sin.to(device)),
    )


def random_pages(
    model: ModelShape,
    *,
    layers: int,
    pages: int,
    page_tokens: int,
    device: torch.device | str,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[LayerPages, ...]:
    """Pages of ``layers`` layers that already hold N(0, 1) keys and values: cached prefixes."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (pages, model.kv_heads, page_tokens, model.head_dim)

    def normal() -> Tensor:
        filled = torch.empty(shape, dtype=dtype or TORCH_DTYPE[model.dtype], device=device)
        return filled.normal_(generator=generator)

    return tuple(LayerPages(normal(), normal()) for _ in range(layers))
