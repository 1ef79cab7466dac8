"""RMSNorm, with the residual addition that precedes it (Zhang, Sennrich 2019)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rmsnorm_kernel(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE], becomes x + residual; unused without ADD
    weight,  # [SIZE]
    out,  # [rows, SIZE]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program per row, the row in registers: read once, written once."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + column, value.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise the rows of ``x`` [rows, size], contiguous.

    With ``residual`` (same shape) the sum x + residual is normalised, and stored in ``residual``.
    """
    rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    rmsnorm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=warps_for(block),
    )
    return out


def warps_for(block: int) -> int:
    """Warps for a row of ``block`` elements: 16 to 32 elements, two to four loads, a thread."""
    return min(16, max(1, block // 512))


def reference(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """:func:`rmsnorm` in float64, ``residual`` updated likewise."""
    value = x.double()
    if residual is not None:
        value = value + residual.double()
        residual.copy_(value)
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return value * scale * weight.double()
