"""fp8 (e4m3) linear layers: weights scaled per output channel, activations per token, at run time.

This is the W8A8 scheme of serving engines (dynamic per-token activations, static per-channel
weights). The product accumulates in float32 and is scaled once at the end. Needs sm_89.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from passtime.kernels.gemm import gemm
from passtime.kernels.rmsnorm import warps_for
from passtime.kernels.tiles import GemmTile

E4M3_MAX = 448.0
"""Largest finite e4m3 value (OCP 8-bit floating point specification, 2023)."""


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K] as e4m3 ``values`` and float32 ``scales`` [N]: W = values · scales."""

    values: Tensor
    scales: Tensor


@triton.jit
def quantize_rows_kernel(
    x,  # [rows, SIZE]
    values,  # [rows, SIZE] e4m3
    scales,  # [rows] float32
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program per row: its largest magnitude becomes LARGEST."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / LARGEST, 1e-12)
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(values + row * SIZE + column, scaled.to(values.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [rows, size] and float32 scales [rows] of ``x``, contiguous."""
    rows, size = x.shape
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    quantize_rows_kernel[(rows,)](
        x,
        values,
        scales,
        SIZE=size,
        BLOCK=block,
        LARGEST=E4M3_MAX,
        num_warps=warps_for(block),
    )
    return values, scales


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """Quantise a weight [N, K] per output channel."""
    return Fp8Weight(*reference_quantize(weight))


def fp8_linear(x: Tensor, weight: Fp8Weight, *, tile: GemmTile) -> Tensor:
    """``x`` [rows, K] · Wᵀ → [rows, N] in the dtype of ``x``."""
    values, scales = quantize_rows(x)
    return gemm(values, weight.values, tile=tile, scales=(scales, weight.scales), out_dtype=x.dtype)


def reference_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` by torch's own conversion."""
    wide = x.float()
    scales = (wide.abs().amax(dim=1) / E4M3_MAX).clamp(min=1e-12)
    scaled = (wide / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scales
