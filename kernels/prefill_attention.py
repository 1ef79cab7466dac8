"""Causal attention of prompt chunks over paged keys and values (FlashAttention-2, paged, varlen).

A tile holds the query heads of one KV head side by side: ``rows // group`` tokens × ``group``
heads. All of them read the same keys, so grouped-query attention costs no extra traffic and a
short chunk still fills a tile. The host plans the tiles, longest first: late tiles of a causal
triangle see the most keys, and starting them last would leave the device half idle at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from passtime.kernels.tiles import PrefillTile

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    accumulator,
    largest,
    weight_sum,
    q,
    q_position,
    k_pages,
    v_pages,
    table,
    kv_head,
    kv_length,
    scale,
    first,
    last,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys from ``first`` (a multiple of KEYS) to ``last``."""
    lane = tl.arange(0, HEAD_DIM)[None, :]
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        if MASKED:
            present = key < kv_length
            page = tl.load(table + key // PAGE, mask=present, other=0).to(tl.int64)
        else:
            page = tl.load(table + key // PAGE).to(tl.int64)
        row = ((page * KV_HEADS + kv_head) * PAGE + key % PAGE)[:, None] * HEAD_DIM + lane
        if MASKED:
            k = tl.load(k_pages + row, mask=present[:, None], other=0.0)
        else:
            k = tl.load(k_pages + row)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            visible = (key[None, :] <= q_position[:, None]) & present[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        weight_sum = weight_sum * decay + tl.sum(weights, axis=1)
        if MASKED:
            v = tl.load(v_pages + row, mask=present[:, None], other=0.0)
        else:
            v = tl.load(v_pages + row)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator * decay[:, None])
        largest = new_largest
    return accumulator, largest, weight_sum


@triton.jit
def prefill_attention_kernel(
    q,  # rows of q_stride elements: [tokens, heads, HEAD_DIM] within
    k_pages,  # [pages, KV_HEADS, PAGE, HEAD_DIM]
    v_pages,
    out,  # [tokens, heads, HEAD_DIM]
    tile_chunk,  # [tiles] int32: which chunk
    tile_token,  # [tiles] int32: its first token within the chunk
    chunk_starts,  # [chunks + 1] int32: rows of q
    kv_lengths,  # [chunks] int32: prefix and chunk
    block_tables,  # [chunks, table_width] int32
    q_stride,
    table_width,
    scale,  # 1 / sqrt(HEAD_DIM) * log2(e)
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program per tile and KV head, the KV heads of a tile next to each other."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.load(tile_chunk + tile)
    first_token = tl.load(tile_token + tile)
    chunk_start = tl.load(chunk_starts + chunk)
    new = tl.load(chunk_starts + chunk + 1) - chunk_start
    kv_length = tl.load(kv_lengths + chunk)
    table = block_tables + chunk.to(tl.int64) * table_width

    row = tl.arange(0, ROWS)
    lane = tl.arange(0, HEAD_DIM)[None, :]
    token = first_token + row // GROUP
    valid = ((row < TOKENS * GROUP) & (token < new))[:, None]
    q_row = (chunk_start + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    tile_q = tl.load(
        q + (q_row * q_stride + head * HEAD_DIM)[:, None] + lane, mask=valid, other=0.0
    )

    # Keys up to the first token's own position are visible to every row: no mask in that loop.
    first_position = kv_length - new + first_token
    last = tl.minimum(first_position + TOKENS, kv_length)
    unmasked = (first_position + 1) // KEYS * KEYS
    position = first_position + row // GROUP

    accumulator = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    accumulator, largest, weight_sum = _attend(
        accumulator, largest, weight_sum, tile_q, position, k_pages, v_pages, table, kv_head,
        kv_length, scale, 0, unmasked, KV_HEADS, HEAD_DIM, PAGE, KEYS, False,
    )  # fmt: skip
    accumulator, largest, weight_sum = _attend(
        accumulator, largest, weight_sum, tile_q, position, k_pages, v_pages, table, kv_head,
        kv_length, scale, unmasked, last, KV_HEADS, HEAD_DIM, PAGE, KEYS, True,
    )  # fmt: skip
    result = accumulator / weight_sum[:, None]
    out_row = (q_row * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + out_row[:, None] + lane, result.to(out.dtype.element_ty), mask=valid)


@dataclass(frozen=True)
class PrefillPlan:
    """Chunks of a pass, cut into tiles; every tensor int32 on the device of the pass."""

    tile: PrefillTile
    tile_chunk: Tensor
    """[tiles] the chunk of each tile."""
    tile_token: Tensor
    """[tiles] its first token within the chunk."""
    chunk_starts: Tensor
    """[chunks + 1] rows of q."""
    kv_lengths: Tensor
    """[chunks] keys: prefix and chunk."""
    block_tables: Tensor
    """[chunks, width] pages."""


def plan_prefill(
    chunks: Sequence[tuple[int, int]],
    block_tables: npt.NDArray[np.int32],
    *,
    group: int,
    kv_heads: int,
    tiles: Sequence[PrefillTile],
    processors: int,
    device: torch.device | str,
) -> PrefillPlan:
    """Cut (new, prefix) chunks into tiles, those with the most keys first.

    The tile shape is the largest of ``tiles`` that still gives every processor a program, else
    the smallest. ``group`` query heads share each of ``kv_heads``.
    """
    new = [tokens for tokens, _ in chunks]
    for tile in tiles:
        step = tile.rows // group
        assert step > 0, "a tile holds all query heads of a KV head"
        if kv_heads * sum(-(-tokens // step) for tokens in new) >= processors:
            break
    cuts = sorted(
        (-(prefix + min(tokens, token + step)), index, token)
        for index, (tokens, prefix) in enumerate(chunks)
        for token in range(0, tokens, step)
    )

    def put(values: Sequence[int] | npt.NDArray[np.int32]) -> Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=device)

    return PrefillPlan(
        tile=tile,
        tile_chunk=put([index for _, index, _ in cuts]),
        tile_token=put([token for _, _, token in cuts]),
        chunk_starts=put(list(accumulate(new, initial=0))),
        kv_lengths=put([tokens + prefix for tokens, prefix in chunks]),
        block_tables=put(block_tables),
    )


def prefill_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, plan: PrefillPlan
) -> None:
    """Attend ``q`` [tokens, heads, head dim] to the pages of its chunks, causally, into ``out``.

    ``q`` may be a slice of a wider qkv (any token stride, heads contiguous); ``out`` is contiguous.
    The keys and values of the chunks themselves are already in the pages
    [pages, KV heads, page tokens, head dim].
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page_tokens, _ = k_pages.shape
    tile = plan.tile
    prefill_attention_kernel[(kv_heads, len(plan.tile_chunk))](
        q,
        k_pages,
        v_pages,
        out,
        plan.tile_chunk,
        plan.tile_token,
        plan.chunk_starts,
        plan.kv_lengths,
        plan.block_tables,
        q.stride(0),
        plan.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_tokens,
        ROWS=tile.rows,
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def gather_pages(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a request, [length, KV heads, head dim], in float64."""
    page_tokens = pages.shape[2]
    used = table[: -(-length // page_tokens)].long()
    return pages[used].transpose(1, 2).flatten(0, 1)[:length].double()


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float64 softmax attention of the last rows of a sequence, with all scores written out.

    ``q`` [new, heads, head dim]; ``k``, ``v`` [length, KV heads, head dim], length >= new.
    """
    (new, heads, head_dim), (length, kv_heads, _) = q.shape, k.shape
    k, v = (part.double().repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * head_dim**-0.5
    position = length - new + torch.arange(new, device=q.device)
    hidden = torch.arange(length, device=q.device) > position[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def reference(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: PrefillPlan) -> Tensor:
    """:func:`prefill_attention` in float64, chunk by chunk."""
    starts, lengths = plan.chunk_starts.tolist(), plan.kv_lengths.tolist()
    outputs = [
        attend_causally(
            q[first:last],
            gather_pages(k_pages, table, length),
            gather_pages(v_pages, table, length),
        )
        for first, last, length, table in zip(
            starts, starts[1:], lengths, plan.block_tables, strict=False
        )
    ]
    return torch.cat(outputs)
