"""Each kernel against its float64 reference, odd sizes included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from passtime.kernels import argmax, fp8, gemm, grouped_gemm, rmsnorm, rope, routing, silu_mul
from passtime.kernels.tiles import GemmTile

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp16"])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(3, 256), (2, 100), (1, 4096)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(
    device: str, dtype: torch.dtype, rows: int, size: int, with_residual: bool
) -> None:
    x, weight = (
        random(rows, size, device=device, dtype=dtype),
        random(size, device=device, dtype=dtype, seed=1),
    )
    residual = random(rows, size, device=device, dtype=dtype, seed=2) if with_residual else None
    expected_residual = residual.double() if residual is not None else None
    wanted = rmsnorm.reference(x, weight, eps=1e-5, residual=expected_residual)
    found = rmsnorm.rmsnorm(x, weight, eps=1e-5, residual=residual)
    assert relative_error(found, wanted) <= LIMITS[dtype]
    if residual is not None:
        assert expected_residual is not None
        assert relative_error(residual, expected_residual) <= LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(3, 96), (1, 3000), (2, 2048)])
def test_silu_mul(device: str, dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size, device=device, dtype=dtype)
    assert relative_error(silu_mul.silu_mul(gate_up), silu_mul.reference(gate_up)) <= LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 128), (20, 4, 64)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_kv_write(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, qk_norm: bool
) -> None:
    tokens, page_tokens, pages = 5, 4, 6
    qkv = random(tokens, heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)
    cos, sin = (table.to(device) for table in rope.rotation_table(64, head_dim))
    positions = torch.tensor([0, 3, 11, 40, 63], dtype=torch.int32, device=device)
    slots = torch.tensor([23, 0, 9, 10, 4], device=device)
    gains = None
    if qk_norm:
        q_gain, k_gain = (random(head_dim, device=device, dtype=dtype, seed=s) + 1 for s in (1, 2))
        gains = (q_gain, k_gain)
    untouched = torch.zeros(pages, kv_heads, page_tokens, head_dim, dtype=dtype, device=device)
    k, v = untouched.clone(), untouched.clone()
    wanted_qkv, wanted_k, wanted_v = qkv.double(), k.double(), v.double()
    rope.reference(
        wanted_qkv, cos, sin, positions, slots, wanted_k, wanted_v, qk_gains=gains, eps=1e-5
    )
    rope.rope_kv_write(qkv, cos, sin, positions, slots, k, v, qk_gains=gains, eps=1e-5)
    assert relative_error(qkv[:, :heads], wanted_qkv[:, :heads]) <= LIMITS[dtype]
    assert relative_error(k, wanted_k) <= LIMITS[dtype]
    assert relative_error(v, wanted_v) == 0
    written = torch.zeros(pages, page_tokens, dtype=torch.bool, device=device)
    written[slots // page_tokens, slots % page_tokens] = True
    assert not k.transpose(1, 2)[~written].any(), "a slot that belongs to no token was written"


GEMM_SHAPES = [(64, 128, 128), (1, 96, 64), (33, 70, 200), (100, 257, 72)]


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), GEMM_SHAPES)
def test_gemm(device: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = (
        random(m, k, device=device, dtype=dtype),
        random(n, k, device=device, dtype=dtype, seed=1),
    )
    found = gemm.gemm(a, b, tile=GemmTile(32, 64, 64, warps=4, stages=3, group=2))
    assert relative_error(found, gemm.reference(a, b)) <= LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (70, 72, 200)])
def test_gemm_by_descriptors(device: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need sm_90")
    a, b = (
        random(m, k, device=device, dtype=dtype),
        random(n, k, device=device, dtype=dtype, seed=1),
    )
    tile = GemmTile(64, 64, 64, warps=4, stages=3, group=2)
    found = gemm.gemm(a, b, tile=tile, descriptors=True)
    assert relative_error(found, gemm.reference(a, b)) <= LIMITS[dtype]


@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (3, 70_001), (2, 100)])
def test_argmax_takes_the_first_of_the_largest(device: str, rows: int, columns: int) -> None:
    logits = random(rows, columns, device=device, dtype=torch.bfloat16)
    assert torch.equal(argmax.argmax(logits), argmax.reference(logits)), "bf16 logits tie often"
    first = columns // 40
    for column in (first, min(first + argmax.BLOCK, columns - 1), columns - 1):
        logits[:, column] = 100.0
    assert argmax.argmax(logits).tolist() == [first] * rows


# --- fp8 -----------------------------------------------------------------------------------------


def require_fp8(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89")


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(3, 128), (2, 100)])
def test_rows_quantise_as_torch_does(device: str, dtype: torch.dtype, rows: int, size: int) -> None:
    require_fp8(device)
    x = random(rows, size, device=device, dtype=dtype)
    values, scales = fp8.quantize_rows(x)
    wanted_values, wanted_scales = fp8.reference_quantize(x)
    torch.testing.assert_close(scales, wanted_scales)
    # A quotient on a rounding boundary may fall either way: one e4m3 step is 2^-3 of the value.
    step = (values.float() - wanted_values.float()).abs() / wanted_values.float().abs().clamp(min=1)
    assert step.max() <= 0.125
    assert (step > 0).float().mean() <= 0.01


@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(33, 70, 192), (1, 64, 128)])
def test_fp8_linear(device: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    require_fp8(device)
    x = random(m, k, device=device, dtype=dtype)
    weight = fp8.fp8_weight(random(n, k, device=device, dtype=dtype, seed=1))
    found = fp8.fp8_linear(x, weight, tile=GemmTile(32, 64, 64, warps=4, stages=3))
    values, scales = fp8.reference_quantize(x)
    wanted = gemm.reference(values, weight.values, scales=(scales, weight.scales))
    assert relative_error(found, wanted) <= LIMITS[dtype]
    exact = gemm.reference(x, random(n, k, device=device, dtype=dtype, seed=1))
    assert relative_error(found, exact) <= 0.06, "e4m3 keeps three bits: 4 % for a product of two"


# --- Mixture of experts --------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(5, 8, 2), (3, 60, 8), (1, 128, 1)])
def test_top_experts(device: str, tokens: int, experts: int, chosen: int) -> None:
    logits = random(tokens, experts, device=device, dtype=torch.float32)
    found, weights = routing.top_experts(logits, chosen)
    wanted, wanted_weights = routing.reference_top_experts(logits, chosen)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(weights.double(), wanted_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(40, 8, 2), (1, 60, 4), (300, 4, 1)])
def test_groups_hold_each_routed_row_once(
    device: str, tokens: int, experts: int, chosen: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)]
    choice = torch.stack(picks).int().to(device)
    found = routing.group_by_expert(choice, experts, tile=16)
    wanted = routing.reference_groups(choice, experts, tile=16)
    assert torch.equal(found.ends.cpu(), wanted.ends)
    bounds = [0, *wanted.ends.tolist(), len(wanted.rows)]
    for first, last in pairwise(bounds):
        run = found.rows[first:last].cpu()
        assert torch.equal(run.sort().values, wanted.rows[first:last].sort().values)


@DTYPES
@pytest.mark.parametrize("shared", [True, False], ids=["one row a token", "one row a choice"])
def test_grouped_gemm(device: str, dtype: torch.dtype, shared: bool) -> None:
    tokens, experts, chosen, n, k = 21, 5, 2, 70, 72
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randperm(experts - 1, generator=generator)[:chosen] for _ in range(tokens)]
    choice = torch.stack(picks).int().to(device)
    a = random(tokens if shared else tokens * chosen, k, device=device, dtype=dtype)
    weights = random(experts, n, k, device=device, dtype=dtype, seed=1)
    tile = GemmTile(16, 64, 64, warps=4, stages=3)
    groups = routing.group_by_expert(choice, experts, tile=tile.m)
    found = grouped_gemm.grouped_gemm(a, weights, groups, routed=tokens * chosen, tile=tile)
    assert relative_error(found, grouped_gemm.reference(a, weights, choice)) <= LIMITS[dtype]


@DTYPES
def test_combine(device: str, dtype: torch.dtype) -> None:
    y = random(7 * 3, 100, device=device, dtype=dtype)
    weights = random(7, 3, device=device, dtype=torch.float32, seed=1)
    found = grouped_gemm.combine(y, weights)
    assert relative_error(found, grouped_gemm.reference_combine(y, weights)) <= LIMITS[dtype]
