"""Rotary embedding (Su et al. 2021, rotate-half form) fused with the write into the KV pages.

The pages of one layer are two tensors [pages, KV heads, page tokens, head dim]: the tokens of one
page and head are one contiguous piece (4 KiB at 16 tokens × 128 × 2 bytes), which is what the
attention kernels stream. A token's *slot* is page · page_tokens + offset within the page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 16


@triton.jit
def rope_kv_write_kernel(
    qkv,  # [tokens, HEADS + 2 * KV_HEADS, HEAD_DIM]; q is rotated in place
    cos,  # [positions, HEAD_DIM / 2] float32
    sin,
    positions,  # [tokens] int32
    slots,  # [tokens] int64
    k_pages,  # [pages, KV_HEADS, PAGE, HEAD_DIM]
    v_pages,
    q_gain,  # [HEAD_DIM], unused without QK_NORM
    k_gain,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """One program per token and BLOCK heads of q, k and v together."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    inside = head < HEADS + 2 * KV_HEADS

    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + lane
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM:
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        gain_low = tl.where(is_q, tl.load(q_gain + lane), tl.load(k_gain + lane)).to(tl.float32)
        gain_high = tl.where(is_q, tl.load(q_gain + HALF + lane), tl.load(k_gain + HALF + lane))
        low = tl.where(is_v, low, low * scale * gain_low)
        high = tl.where(is_v, high, high * scale * gain_high.to(tl.float32))

    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + lane)
    s = tl.load(sin + position * HALF + lane)
    rotated_low = tl.where(is_v, low, low * c - high * s)
    rotated_high = tl.where(is_v, high, high * c + low * s)

    first = rotated_low.to(qkv.dtype.element_ty)
    second = rotated_high.to(qkv.dtype.element_ty)
    tl.store(source, first, mask=is_q)
    tl.store(source + HALF, second, mask=is_q)
    slot = tl.load(slots + token)
    page = (slot // PAGE) * KV_HEADS
    offset = slot % PAGE
    k_target = k_pages + ((page + head - HEADS) * PAGE + offset) * HEAD_DIM + lane
    tl.store(k_target, first, mask=is_k)
    tl.store(k_target + HALF, second, mask=is_k)
    v_target = v_pages + ((page + head - HEADS - KV_HEADS) * PAGE + offset) * HEAD_DIM + lane
    tl.store(v_target, first, mask=is_v)
    tl.store(v_target + HALF, second, mask=is_v)


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    qk_gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q in place; rotate k and write it, and v, to their slots.

    ``qkv`` [tokens, heads + 2 · KV heads, head dim], contiguous; ``cos``, ``sin`` [positions, head
    dim / 2] float32; ``positions`` [tokens] int32, ``slots`` [tokens] int64; the pages as above.
    ``qk_gains`` (of q and k, [head dim] each) normalise q and k per head first, as Qwen3 does.
    """
    tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, page_tokens, _ = k_pages.shape
    q_gain, k_gain = qk_gains or (qkv, qkv)
    block = min(HEADS_PER_PROGRAM, triton.next_power_of_2(all_heads))
    rope_kv_write_kernel[(tokens, triton.cdiv(all_heads, block))](
        qkv,
        cos,
        sin,
        positions,
        slots,
        k_pages,
        v_pages,
        q_gain,
        k_gain,
        eps,
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_tokens,
        BLOCK=block,
        QK_NORM=qk_gains is not None,
        num_warps=4,
    )


def rotation_table(positions: int, head_dim: int, *, base: float = 500_000.0) -> tuple[Tensor, ...]:
    """cos and sin, [positions, head dim / 2] float32, of position · base^(−2i / head dim)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), base**-exponents)
    return angles.cos().float(), angles.sin().float()


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    qk_gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> None:
    """:func:`rope_kv_write` in float64, on float64 tensors."""
    kv_heads, page_tokens = k_pages.shape[1:3]
    q, k, v = qkv.double().split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if qk_gains is not None:
        q, k = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * gain.double()
            for part, gain in ((q, qk_gains[0]), (k, qk_gains[1]))
        )
    row = positions.long()
    c, s = cos.double()[row][:, None], sin.double()[row][:, None]

    def rotated(part: Tensor) -> Tensor:
        low, high = part.chunk(2, dim=-1)
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    page, offset = slots // page_tokens, slots % page_tokens
    qkv[:, : q.shape[1]] = rotated(q).to(qkv.dtype)
    k_pages[page, :, offset] = rotated(k).to(k_pages.dtype)
    v_pages[page, :, offset] = v.to(v_pages.dtype)
