"""What a pass computes and moves, against sums done by hand."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from passtime.kernels import work
from passtime.kernels.work import Work
from passtime.profiles.shapes import ModelShape, MoeShape

LLAMA = ModelShape(
    name="llama-8b",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
)


@dataclass(frozen=True)
class Tokens:
    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()


def test_causal_pairs_are_counted_exactly() -> None:
    for new, prefix in [(1, 0), (5, 0), (4, 7)]:
        by_hand = sum(prefix + row + 1 for row in range(new))
        assert work.causal_pairs(new, prefix) == by_hand


def test_a_long_prompt_takes_two_flops_per_parameter_and_token() -> None:
    tokens = 8192
    found = work.pass_work(LLAMA, Tokens(prefill=((tokens, 0),)))
    embedding = LLAMA.hidden_size * LLAMA.vocab_size
    linear = 2 * tokens * (LLAMA.linear_parameters - embedding) + 2 * embedding
    attention = 32 * 4 * 4096 * work.causal_pairs(tokens, 0)
    assert found.flops == pytest.approx(linear + attention, rel=0.01)


def test_one_decode_moves_the_weights_and_its_kv() -> None:
    kv = 1024
    found = work.pass_work(LLAMA, Tokens(decode=(kv,)))
    weights = LLAMA.weight_bytes - 2 * LLAMA.hidden_size * LLAMA.vocab_size  # the embedding
    assert found.bytes == pytest.approx(weights + (kv + 1) * LLAMA.kv_bytes_per_token, rel=0.001)


def test_a_pass_is_the_sum_of_its_operators() -> None:
    batch = Tokens(prefill=((100, 28), (7, 0)), decode=(50, 60))
    layer = work.total(work.layer_operators(LLAMA, batch).values())
    ends = work.total(work.end_operators(LLAMA, batch).values())
    found = work.pass_work(LLAMA, batch)
    assert found.flops == pytest.approx(32 * layer.flops + ends.flops)
    assert found.bytes == pytest.approx(32 * layer.bytes + ends.bytes)


def test_attention_of_a_mixed_pass_adds() -> None:
    chunks, decodes = ((100, 28),), (50, 60)
    apart = work.layer_operators(LLAMA, Tokens(prefill=chunks))["prefill_attention"]
    together = work.layer_operators(LLAMA, Tokens(prefill=chunks, decode=decodes))
    assert together["prefill_attention"] == apart
    assert together["decode_attention"].flops == 4 * 4096 * (51 + 61)


def test_partial_results_of_a_split_decode_are_traffic() -> None:
    whole = work.decode_attention(LLAMA, [4096])
    split = work.decode_attention(LLAMA, [4096], partials=10)
    assert split.flops == whole.flops
    assert split.bytes - whole.bytes == 10 * 32 * 129 * 4 * 2


@pytest.mark.parametrize(("tokens", "hit"), [(1, 8), (10_000, 128)])
def test_experts_hit_run_from_a_tokens_own_to_all(tokens: int, hit: float) -> None:
    assert work.experts_hit(tokens, 128, 8) == pytest.approx(hit)


def test_experts_replace_the_dense_ffn() -> None:
    moe = msgspec.structs.replace(
        LLAMA, moe=MoeShape(experts=128, experts_per_token=8, expert_ffn_size=768)
    )
    operators = work.layer_operators(moe, Tokens(decode=(10,)))
    assert "gate_up" not in operators
    assert operators["experts_gate_up"].flops == 2 * 8 * 2 * 768 * 4096
    assert operators["experts_down"].bytes == pytest.approx(8 * 4096 * 768 * 2, rel=0.02)


def test_fp8_weights_halve_what_a_decode_moves() -> None:
    fp8 = msgspec.structs.replace(LLAMA, linear_dtype="float8_e4m3")
    wide, narrow = (work.layer_operators(m, Tokens(decode=(10,)))["qkv"] for m in (LLAMA, fp8))
    assert narrow.bytes == pytest.approx(wide.bytes / 2, rel=0.01)


def test_the_roofline_is_the_slower_of_two() -> None:
    assert Work(100.0, 10.0).floor_s(flops_per_s=10.0, bytes_per_s=10.0) == 10.0
    assert Work(10.0, 100.0).floor_s(flops_per_s=10.0, bytes_per_s=10.0) == 10.0
