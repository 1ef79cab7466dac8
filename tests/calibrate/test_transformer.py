"""The NumPy transformer computes what a transformer computes, however its pass is cut up."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.calibrate.runners import transformer as numpy_runner
from passtime.calibrate.runners.transformer import Segment, Transformer
from passtime.profiles.shapes import ModelShape, MoeShape

Doubles = npt.NDArray[np.float64]

DENSE = ModelShape(
    name="small",
    layers=2,
    hidden_size=48,
    heads=6,
    kv_heads=2,
    head_dim=8,
    ffn_size=40,
    vocab_size=97,
    dtype="float32",
)
SHAPES = {
    "grouped": DENSE,
    "every head its own": msgspec.structs.replace(DENSE, kv_heads=6),
    "more heads than a tile holds": msgspec.structs.replace(DENSE, heads=66, kv_heads=66),
    "one kv head": msgspec.structs.replace(DENSE, kv_heads=1),
    "tied and normed": msgspec.structs.replace(DENSE, tied_embeddings=True, qk_norm=True),
    "experts": msgspec.structs.replace(
        DENSE, moe=MoeShape(experts=5, experts_per_token=2, expert_ffn_size=24)
    ),
}


def reference_logits(model: Transformer, token_ids: npt.NDArray[np.int64]) -> Doubles:
    """Logits after every token of one prompt, by the textbook: float64, no cache, no tiles."""
    shape = model.shape
    count = len(token_ids)
    x = model.embedding.astype(np.float64)[token_ids]
    for layer in model.layers:
        qkv = norm(x, layer.attention_norm) @ layer.qkv.astype(np.float64)
        heads = [
            qkv[:, i * shape.head_dim : (i + 1) * shape.head_dim]
            for i in range(shape.heads + 2 * shape.kv_heads)
        ]
        queries, keys = heads[: shape.heads], heads[shape.heads : shape.heads + shape.kv_heads]
        values = heads[shape.heads + shape.kv_heads :]
        if layer.head_norms is not None:
            queries = [norm(q, layer.head_norms[0]) for q in queries]
            keys = [norm(k, layer.head_norms[1]) for k in keys]
        attended = []
        for head, query in enumerate(queries):
            kv_head = head // (shape.heads // shape.kv_heads)
            scores = rope(query) @ rope(keys[kv_head]).T / np.sqrt(shape.head_dim)
            scores[np.triu_indices(count, k=1)] = -np.inf
            weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            attended.append(weights @ values[kv_head])
        x = x + np.concatenate(attended, axis=1) @ layer.output.astype(np.float64)
        x = x + np.stack([ffn(model, layer, token) for token in norm(x, layer.ffn_norm)])
    return norm(x, model.norm) @ model.head.astype(np.float64)


def norm(x: Doubles, weight: npt.NDArray[np.float32]) -> Doubles:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def rope(x: Doubles) -> Doubles:
    """Rotation of the pairs (i, i + half) as complex numbers."""
    half = x.shape[1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate((turned.real, turned.imag), axis=1)


def ffn(model: Transformer, layer: numpy_runner._Layer, token: Doubles) -> Doubles:
    def expert(index: int) -> Doubles:
        gate, up = np.split(token @ layer.gate_up[index].astype(np.float64), 2)
        out: Doubles = (gate / (1 + np.exp(-gate)) * up) @ layer.down[index].astype(np.float64)
        return out

    if layer.router is None:
        return expert(0)
    assert model.shape.moe is not None
    affinity = token @ layer.router.astype(np.float64)
    best = np.argsort(affinity)[::-1][: model.shape.moe.experts_per_token]
    weights = np.exp(affinity[best]) / np.exp(affinity[best]).sum()
    return np.sum([w * expert(i) for w, i in zip(weights, best, strict=True)], axis=0)


@pytest.fixture(params=SHAPES, ids=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Transformer:
    """Weights large enough for every part of the layer to matter."""
    built = Transformer(SHAPES[request.param], kv_tokens=400, seed=3)
    for layer in built.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            weight *= np.float32(15)
    return built


def prompt(model: Transformer, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, model.shape.vocab_size, length)


def close(found: npt.NDArray[np.float32], wanted: Doubles) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_a_prefill_equals_full_attention_in_float64(model: Transformer, length: int) -> None:
    ids = prompt(model, length)
    found = model.logits(ids, [Segment(start=7, prefix=0, new=length)])
    close(found[0], reference_logits(model, ids)[-1])


@pytest.mark.parametrize("cut", [1, 64, 149])
def test_prefix_and_chunk_equal_the_whole_prompt(model: Transformer, cut: int) -> None:
    ids = prompt(model, 150)
    first = model.logits(ids[:cut], [Segment(start=0, prefix=0, new=cut)])
    second = model.logits(ids[cut:], [Segment(start=0, prefix=cut, new=150 - cut)])
    wanted = reference_logits(model, ids)
    close(first[0], wanted[cut - 1])
    close(second[0], wanted[-1])


def test_decoding_token_by_token_equals_the_rows_of_a_prefill(model: Transformer) -> None:
    ids = prompt(model, 30)
    wanted = reference_logits(model, ids)
    model.logits(ids[:20], [Segment(start=0, prefix=0, new=20)])
    for position in range(20, 30):
        found = model.logits(
            ids[position : position + 1], [Segment(start=0, prefix=position, new=1)]
        )
        close(found[0], wanted[position])


def test_requests_of_one_pass_do_not_see_one_another(model: Transformer) -> None:
    chunk, decode, fresh = prompt(model, 90, 1), prompt(model, 50, 2), prompt(model, 70, 3)
    segments = [
        Segment(start=0, prefix=60, new=30),
        Segment(start=90, prefix=49, new=1),
        Segment(start=140, prefix=0, new=70),
    ]
    model.logits(chunk[:60], [Segment(start=0, prefix=0, new=60)])
    model.logits(decode[:49], [Segment(start=90, prefix=0, new=49)])
    found = model.logits(np.concatenate((chunk[60:], decode[49:], fresh)), segments)
    for row, ids in zip(found, (chunk, decode, fresh), strict=True):
        close(row, reference_logits(model, ids)[-1])


def test_forward_answers_the_likeliest_token(model: Transformer) -> None:
    ids, segments = prompt(model, 12), [Segment(start=0, prefix=0, new=12)]
    assert model.forward(ids, segments)[0] == reference_logits(model, ids)[-1].argmax()


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 9),
    scores=st.integers(2, 200),
    cut=st.integers(1, 59),
)
def test_the_sizes_of_the_tiles_change_nothing(rows: int, scores: int, cut: int) -> None:
    ids = np.random.default_rng(5).integers(0, DENSE.vocab_size, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_runner, "QUERY_ROWS", rows)
        patch.setattr(numpy_runner, "TILE_SCORES", scores)
        model = Transformer(DENSE, kv_tokens=60, seed=1)
        model.logits(ids[:cut], [Segment(start=0, prefix=0, new=cut)])
        found = model.logits(ids[cut:], [Segment(start=0, prefix=cut, new=60 - cut)])
    close(found[0], reference_logits(model, ids)[-1])
