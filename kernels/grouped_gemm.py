"""The products of a mixture of experts: every routed row with the weight of its own expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from passtime.kernels.gemm import grouped_tile
from passtime.kernels.routing import Groups
from passtime.kernels.tiles import GemmTile


@triton.jit
def grouped_gemm_kernel(
    a,  # [routed / SHARED, K]
    b,  # [EXPERTS, N, K]
    c,  # [routed, N]
    rows,  # [places] int32: the routed row of each place, -1 for none
    ends,  # [EXPERTS] int32
    places,
    N,
    K,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per tile; a tile's places all belong to one expert (runs are whole tiles)."""
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), tl.cdiv(places, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP
    )
    index = tl.arange(0, EXPERTS_BLOCK)
    run_end = tl.load(ends + index, mask=index < EXPERTS, other=2**31 - 1)
    expert = tl.sum((run_end <= tile_m * BLOCK_M).to(tl.int32), axis=0)
    if expert >= EXPERTS:
        return
    routed = tl.load(rows + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))
    present = routed >= 0
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_row = tl.where(present, routed // SHARED, 0).to(tl.int64)
    a_tile = a + a_row[:, None] * K + depth[None, :]
    b_tile = b + (expert.to(tl.int64) * N + column % N)[:, None] * K + depth[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            left = tl.load(a_tile)
            right = tl.load(b_tile)
        else:
            inside = (start + depth < K)[None, :]
            left = tl.load(a_tile, mask=inside, other=0.0)
            right = tl.load(b_tile, mask=inside, other=0.0)
        accumulator = tl.dot(left, tl.trans(right), accumulator)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    target = c + routed.to(tl.int64)[:, None] * N + column[None, :]
    inside = present[:, None] & (column < N)[None, :]
    tl.store(target, accumulator.to(c.dtype.element_ty), mask=inside)


def grouped_gemm(
    a: Tensor, weights: Tensor, groups: Groups, *, routed: int, tile: GemmTile
) -> Tensor:
    """Each routed row of ``a`` times its expert's ``weights`` [experts, N, K]ᵀ → [routed, N].

    ``a`` [rows, K] has either one row per routed row, or one per token, which its choices share.
    ``groups.tile`` is ``tile.m``.
    """
    assert groups.tile == tile.m, "an expert's run must be whole tiles"
    experts, n, k = weights.shape
    c = a.new_empty(routed, n)
    places = len(groups.rows)
    grid = (triton.cdiv(places, tile.m) * triton.cdiv(n, tile.n),)
    grouped_gemm_kernel[grid](
        a,
        weights,
        c,
        groups.rows,
        groups.ends,
        places,
        n,
        k,
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        SHARED=routed // len(a),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=tile.group,
        EVEN_K=k % tile.k == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return c


@triton.jit
def combine_kernel(
    y,  # [tokens, CHOSEN, SIZE]
    weights,  # [tokens, CHOSEN] float32
    out,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """One program per token and block of columns: the weighted sum over its experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        source = y + (token * CHOSEN + choice) * SIZE + column
        weight = tl.load(weights + token * CHOSEN + choice)
        value += weight * tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """Σ over choices of weight · y: [tokens · chosen, size], [tokens, chosen] → [tokens, size]."""
    tokens, chosen = weights.shape
    size = y.shape[1]
    out = y.new_empty(tokens, size)
    block = min(2048, triton.next_power_of_2(size))
    combine_kernel[(tokens, triton.cdiv(size, block))](
        y,
        weights,
        out,
        SIZE=size,
        BLOCK=block,
        CHOSEN=chosen,
        num_warps=max(1, block // 512),
    )
    return out


def reference(a: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """:func:`grouped_gemm` in float64 from the experts [tokens, chosen] themselves."""
    flat = experts.flatten().long()
    rows = a.double().repeat_interleave(len(flat) // len(a), dim=0)
    return torch.stack([weights[e].double() @ row for e, row in zip(flat, rows, strict=True)])


def reference_combine(y: Tensor, weights: Tensor) -> Tensor:
    """:func:`combine` in float64."""
    tokens, chosen = weights.shape
    return (y.double().view(tokens, chosen, -1) * weights.double()[..., None]).sum(dim=1)
