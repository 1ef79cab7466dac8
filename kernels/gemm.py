"""A · Bᵀ in Triton: the alternative to cuBLAS, and the only path for scaled fp8.

B is a weight as ``nn.Linear`` stores it, [N, K] row-major, so both operands run along K and every
load is 16 bytes wide. Tiles of ``group`` rows are visited together: they share the columns of B
while those are in L2. From sm_90 on, the descriptor kernel lets the copy engine (TMA) fetch tiles
whole; the pointer kernel runs everywhere and takes any K. M is the batch: it must not be
specialised on, or every sixteenth batch size would compile a kernel of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from passtime.kernels.tiles import GemmTile


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of the program's tile: GROUP rows at a time, down each column of tiles."""
    per_group = GROUP * tiles_n
    first = program // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + program % per_group % rows, program % per_group // rows


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a,  # [M, K]
    b,  # [N, K]
    c,  # [M, N]
    a_scale,  # [M] float32, unused without SCALED
    b_scale,  # [N] float32
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One program per tile of C; rows and columns past the end wrap and are not stored."""
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_tile = a + (row % M).to(tl.int64)[:, None] * K + depth[None, :]
    b_tile = b + (column % N).to(tl.int64)[:, None] * K + depth[None, :]
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
    if SCALED:
        accumulator *= tl.load(a_scale + row, mask=row < M, other=0.0)[:, None]
        accumulator *= tl.load(b_scale + column, mask=column < N, other=0.0)[None, :]
    target = c + row.to(tl.int64)[:, None] * N + column[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(target, accumulator.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def gemm_descriptor_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same product through tensor descriptors, which clip at the edges by themselves."""
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    a_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_tiles = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        left = a_tiles.load([tile_m * BLOCK_M, start])
        right = b_tiles.load([tile_n * BLOCK_N, start])
        accumulator = tl.dot(left, right.T, accumulator)
    c_tiles.store([tile_m * BLOCK_M, tile_n * BLOCK_N], accumulator.to(c.dtype.element_ty))


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    tile: GemmTile,
    descriptors: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a`` [M, K] · ``b`` [N, K]ᵀ → [M, N], all contiguous, accumulated in float32.

    ``scales`` (float32, [M] and [N]) multiply the rows and columns of the product: the two halves
    of a dequantisation. ``descriptors`` needs sm_90 and rows of whole 16 bytes.
    """
    (m, k), n = a.shape, b.shape[0]
    c = a.new_empty(m, n, dtype=out_dtype or a.dtype)
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
    if descriptors:
        assert scales is None, "the descriptor kernel does not scale"
        triton.set_allocator(_scratch)
        gemm_descriptor_kernel[grid](
            a,
            b,
            c,
            m,
            n,
            k,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        return c
    a_scale, b_scale = scales or (a, b)
    gemm_kernel[grid](
        a,
        b,
        c,
        a_scale,
        b_scale,
        m,
        n,
        k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=tile.group,
        EVEN_K=k % tile.k == 0,
        SCALED=scales is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return c


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for the descriptors a kernel builds; torch aligns to 512 bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(size, dtype=torch.int8, device=device)


def reference(a: Tensor, b: Tensor, *, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """:func:`gemm` in float64."""
    product = a.double() @ b.double().T
    if scales is not None:
        product = product * scales[0].double()[:, None] * scales[1].double()[None, :]
    return product
