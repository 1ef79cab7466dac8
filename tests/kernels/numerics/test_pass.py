"""A whole pass against a dense transformer that knows neither pages nor chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from passtime.kernels import argmax
from passtime.kernels.inputs import pass_inputs
from passtime.kernels.layer import run_pass
from passtime.kernels.layout import Int32, lay_out
from passtime.kernels.operators import EPS, Operators, ReferenceOperators, TimedOperators
from passtime.kernels.tiles import tiles_for
from passtime.kernels.weights import (
    DenseFfn,
    LinearWeight,
    MoeFfn,
    Weights,
    random_pages,
    random_weights,
)
from passtime.profiles.shapes import DType, ModelShape, MoeShape

PAGE_TOKENS = 4
MODEL = ModelShape(
    name="dense",
    layers=2,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn_size=96,
    vocab_size=200,
)
MODELS = {
    "dense": MODEL,
    "qk norm, tied": msgspec.structs.replace(MODEL, qk_norm=True, tied_embeddings=True),
    "experts": msgspec.structs.replace(
        MODEL, moe=MoeShape(experts=5, experts_per_token=2, expert_ffn_size=48)
    ),
    "three heads of keys": msgspec.structs.replace(MODEL, heads=3, kv_heads=3),
}
PROMPT = np.random.default_rng(5).integers(0, MODEL.vocab_size, 13)


@dataclass
class Engine:
    """Passes of named requests over one pool of pages: a serving engine without a scheduler."""

    model: ModelShape
    weights: Weights
    operators: Operators
    device: str
    page_dtype: torch.dtype
    computed: dict[str, int] = field(default_factory=dict)
    tables: dict[str, Int32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pages = random_pages(
            self.model,
            layers=len(self.weights.layers),
            pages=40,
            page_tokens=PAGE_TOKENS,
            device=self.device,
            dtype=self.page_dtype,
        )
        self.free = list(np.random.default_rng(3).permutation(40).astype(np.int32))

    def run(self, *work: tuple[str, np.ndarray], decode: str = "", padded: int = 0) -> Tensor:
        """Logits [requests, vocabulary] of one pass; requests named in ``decode`` are decodes."""
        chunks = [(name, tokens) for name, tokens in work if name not in decode]
        decodes = [(name, tokens) for name, tokens in work if name in decode]
        tables = []
        for name, tokens in chunks + decodes:
            table = list(self.tables.get(name, ()))
            while len(table) * PAGE_TOKENS < self.computed.get(name, 0) + len(tokens):
                table.append(self.free.pop())
            self.tables[name] = np.array(table, np.int32)
            tables.append(self.tables[name])
        batch = Tokens(
            prefill=[(len(tokens), self.computed.get(name, 0)) for name, tokens in chunks],
            decode=[self.computed[name] for name, _ in decodes],
        )
        layout = lay_out(
            batch,
            tables,
            page_tokens=PAGE_TOKENS,
            padded_rows=padded,
            padding_slot=int(self.free[0]) * PAGE_TOKENS,
        )
        token_ids = np.concatenate([tokens for _, tokens in chunks + decodes])
        inputs = pass_inputs(
            layout,
            np.concatenate([token_ids, np.zeros(layout.padding)]).astype(np.int64),
            model=self.model,
            tiles=getattr(self.operators, "tiles", tiles_for(None)),
            processors=4,
            device=self.device,
        )
        for name, tokens in work:
            self.computed[name] = self.computed.get(name, 0) + len(tokens)
        output = run_pass(self.model, self.weights, self.pages, inputs, self.operators)
        assert torch.equal(output.tokens, argmax.reference(output.logits))
        return output.logits.double()


@dataclass(frozen=True)
class Tokens:
    prefill: list[tuple[int, int]]
    decode: list[int]


@dataclass(frozen=True)
class Precision:
    operators: type[Operators]
    dtype: DType
    limit: float


FLOAT64 = Precision(ReferenceOperators, "float32", 1e-9)
BF16 = Precision(TimedOperators, "bfloat16", 1e-2)
FP16 = Precision(TimedOperators, "float16", 2e-3)
CASES = {
    **{f"{name}, float64": (model, FLOAT64) for name, model in MODELS.items()},
    "dense, bf16": (MODELS["dense"], BF16),
    "qk norm, tied, fp16": (MODELS["qk norm, tied"], FP16),
    "experts, bf16": (MODELS["experts"], BF16),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[ModelShape, Precision]:
    model, precision = request.param
    return model, precision


@pytest.fixture
def precision(case: tuple[ModelShape, Precision]) -> Precision:
    return case[1]


@pytest.fixture
def engine(device: str, case: tuple[ModelShape, Precision]) -> Engine:
    model, precision = case
    model = msgspec.structs.replace(model, dtype=precision.dtype)
    weights = random_weights(model, layers=2, positions=64, device=device, std=0.2)
    reference = precision.operators is ReferenceOperators
    return Engine(
        model,
        weights,
        ReferenceOperators() if reference else TimedOperators.on(device),
        device,
        page_dtype=torch.float64 if reference else weights.embedding.dtype,
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# --- The dense transformer -----------------------------------------------------------------------


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


def rotated(x: Tensor) -> Tensor:
    """[tokens, heads, head dim]: pairs (i, i + D/2) turned by position · base^(−2i / D)."""
    half = x.shape[-1] // 2
    frequency = 500_000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(len(x), dtype=torch.float64, device=x.device)[:, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def wide(weight: LinearWeight) -> Tensor:
    assert isinstance(weight, Tensor), "the dense transformer knows no fp8"
    return weight.double()


def gated(x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
    gate, up = (x @ wide(gate_up).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ wide(down).T


def ffn(x: Tensor, weights: DenseFfn | MoeFfn) -> Tensor:
    if isinstance(weights, DenseFfn):
        return gated(x, weights.gate_up, weights.down)
    probabilities = (x @ weights.router.double().T).softmax(-1)
    rows = []
    for row, probability in zip(x, probabilities, strict=True):
        chosen = probability.argsort(descending=True)[: weights.experts_per_token]
        share = probability[chosen] / probability[chosen].sum()
        rows.append(
            sum(
                s * gated(row, weights.gate_up[e], weights.down[e])
                for s, e in zip(share, chosen, strict=True)
            )
        )
    return torch.stack(rows)


def dense_logits(model: ModelShape, weights: Weights, tokens: np.ndarray) -> Tensor:
    """Logits [tokens, vocabulary] of a whole sequence, in float64."""
    x = weights.embedding.double()[torch.from_numpy(tokens).to(weights.embedding.device)]
    sizes = [model.query_size, model.kv_size, model.kv_size]
    for layer in weights.layers:
        qkv = normed(x, layer.attention_norm) @ wide(layer.qkv).T
        parts = torch.split(qkv, sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, model.head_dim) for part in parts)
        if layer.qk_gains is not None:
            q, k = normed(q, layer.qk_gains[0]), normed(k, layer.qk_gains[1])
        q, k, v = (part.transpose(0, 1) for part in (rotated(q), rotated(k), v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + attended.transpose(0, 1).flatten(1) @ wide(layer.output).T
        x = x + ffn(normed(x, layer.ffn_norm), layer.ffn)
    return normed(x, weights.final_norm) @ weights.lm_head.double().T


# --- What must hold ------------------------------------------------------------------------------


def test_a_whole_prompt_agrees_with_the_dense_transformer(
    engine: Engine, precision: Precision
) -> None:
    found = engine.run(("a", PROMPT))
    wanted = dense_logits(engine.model, engine.weights, PROMPT)[-1:]
    # Rounding adds up over two layers of ten operators; sines and cosines are float32 throughout.
    assert relative_error(found, wanted) <= max(3 * precision.limit, 1e-6)


def test_a_prefix_and_a_chunk_equal_the_whole_prompt(engine: Engine, precision: Precision) -> None:
    whole = engine.run(("whole", PROMPT))
    engine.run(("cut", PROMPT[:6]))
    engine.run(("cut", PROMPT[6:7]))
    assert relative_error(engine.run(("cut", PROMPT[7:])), whole) <= precision.limit


def test_a_decode_equals_the_last_row_of_a_prefill(engine: Engine, precision: Precision) -> None:
    whole = engine.run(("whole", PROMPT))
    engine.run(("cut", PROMPT[:-1]))
    decoded = engine.run(("cut", PROMPT[-1:]), decode="cut")
    assert relative_error(decoded, whole) <= precision.limit


def test_a_mixed_pass_equals_its_parts(engine: Engine, precision: Precision) -> None:
    for side in "12":
        engine.run((f"short{side}", PROMPT[:3]), (f"long{side}", PROMPT[3:12]))
    decodes = [("short1", PROMPT[3:4]), ("long1", PROMPT[:1])]
    apart = [engine.run(("new1", PROMPT)), engine.run(*decodes, decode="short1 long1")]
    decodes = [("short2", PROMPT[3:4]), ("long2", PROMPT[:1])]
    together = engine.run(("new2", PROMPT), *decodes, decode="short2 long2")
    assert relative_error(together, torch.cat(apart)) <= precision.limit


def test_padding_changes_nothing(engine: Engine, precision: Precision) -> None:
    plain = engine.run(("a", PROMPT))
    padded = engine.run(("b", PROMPT), padded=16)
    assert relative_error(padded, plain) <= precision.limit
