"""Attention of one new token per request over its paged KV (Flash-Decoding: split, then reduce).

A decode reads every key once and computes almost nothing, so its speed is the number of bytes in
flight. The host cuts the KV of all requests into items of one common length, short enough that
the items fill the device several times and long requests do not straggle; each item leaves a
partial output and the log-sum-exp of its weights, and a second kernel joins them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from passtime.kernels.prefill_attention import LOG2_E, attend_causally, gather_pages
from passtime.kernels.tiles import DecodeTile

PROGRAMS_PER_PROCESSOR = 6
"""Two rounds of the three programs that fit a processor: longer items pipeline better, and the
last, partial round still has more bytes in flight than it takes to saturate the memory."""

MIN_TILES_PER_ITEM = 2
"""An item of one tile would have nothing to overlap its first load with."""

REDUCED_AT_ONCE = 16


@triton.jit
def decode_attention_kernel(
    q,  # rows of q_stride elements: [requests, heads, HEAD_DIM] within
    k_pages,  # [pages, KV_HEADS, PAGE, HEAD_DIM]
    v_pages,
    partial,  # [items, heads, HEAD_DIM] float32; the output itself without SPLIT
    log_weight,  # [items, heads] float32: log2 of the item's softmax denominator
    item_request,  # [items] int32
    item_first,  # [items] int32: first key
    item_last,  # [items] int32: past the last key
    block_tables,  # [requests, table_width] int32
    q_stride,
    table_width,
    scale,  # 1 / sqrt(HEAD_DIM) * log2(e)
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per item and KV head; the GROUP query heads are padded to ROWS for the MMA."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    request = tl.load(item_request + item).to(tl.int64)
    first = tl.load(item_first + item)
    last = tl.load(item_last + item)
    table = block_tables + request * table_width

    row = tl.arange(0, ROWS)
    lane = tl.arange(0, HEAD_DIM)[None, :]
    valid = row < GROUP
    head = kv_head * GROUP + row
    tile_q = tl.load(
        q + request * q_stride + head[:, None] * HEAD_DIM + lane, mask=valid[:, None], other=0.0
    )

    accumulator = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        present = key < last
        page = tl.load(table + key // PAGE, mask=present, other=0).to(tl.int64)
        source = ((page * KV_HEADS + kv_head) * PAGE + key % PAGE)[:, None] * HEAD_DIM + lane
        k = tl.load(k_pages + source, mask=present[:, None], other=0.0)
        v = tl.load(v_pages + source, mask=present[:, None], other=0.0)
        scores = tl.where(present[None, :], tl.dot(tile_q, tl.trans(k)), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        weight_sum = weight_sum * decay + tl.sum(weights, axis=1)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator * decay[:, None])
        largest = new_largest

    result = (accumulator / weight_sum[:, None]).to(partial.dtype.element_ty)
    slot = item.to(tl.int64) * (KV_HEADS * GROUP) + head  # without SPLIT, item i is request i
    tl.store(partial + slot[:, None] * HEAD_DIM + lane, result, mask=valid[:, None])
    if SPLIT:
        tl.store(log_weight + slot, largest + tl.log2(weight_sum), mask=valid)


@triton.jit
def decode_reduce_kernel(
    partial,  # [items, HEADS, HEAD_DIM] float32
    log_weight,  # [items, HEADS] float32
    item_starts,  # [requests + 1] int32: the items of each request are neighbours
    out,  # [requests, HEADS, HEAD_DIM]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per head and request: the weighted mean of its items' outputs."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    lane = tl.arange(0, HEAD_DIM)
    last = tl.load(item_starts + request + 1)
    accumulator = tl.zeros((HEAD_DIM,), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    for start in range(tl.load(item_starts + request), last, BLOCK):
        item = start + tl.arange(0, BLOCK)
        present = item < last
        slot = item.to(tl.int64) * HEADS + head
        log_weights = tl.load(log_weight + slot, mask=present, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(log_weights, axis=0))
        weights = tl.exp2(log_weights - new_largest)
        decay = tl.exp2(largest - new_largest)
        parts = tl.load(
            partial + slot[:, None] * HEAD_DIM + lane[None, :], mask=present[:, None], other=0.0
        )
        accumulator = accumulator * decay + tl.sum(parts * weights[:, None], axis=0)
        weight_sum = weight_sum * decay + tl.sum(weights, axis=0)
        largest = new_largest
    target = (request.to(tl.int64) * HEADS + head) * HEAD_DIM + lane
    tl.store(out + target, (accumulator / weight_sum).to(out.dtype.element_ty))


@dataclass(frozen=True)
class DecodePlan:
    """The decodes of a pass, cut into items; every tensor int32 on the device of the pass."""

    tile: DecodeTile
    item_request: Tensor
    """[items] the request of each item; the items of a request are neighbours."""
    item_first: Tensor
    """[items] first key."""
    item_last: Tensor
    """[items] past the last key."""
    item_starts: Tensor
    """[requests + 1] first item of each request."""
    kv_lengths: Tensor
    """[requests] keys, the new token's included."""
    block_tables: Tensor
    """[requests, width] pages."""


def item_keys(kv_lengths: Sequence[int], *, kv_heads: int, keys: int, processors: int) -> int:
    """Keys per item: the fewest that keep the device busy and no busier.

    The shortest multiple of a tile's ``keys`` whose items × KV heads stay within
    ``PROGRAMS_PER_PROCESSOR`` programs a processor, and never under ``MIN_TILES_PER_ITEM`` tiles.
    """
    budget = max(len(kv_lengths), PROGRAMS_PER_PROCESSOR * processors // kv_heads)

    def fits(tiles: int) -> bool:
        return sum(-(-length // (tiles * keys)) for length in kv_lengths) <= budget

    longest = -(-max(kv_lengths) // keys)
    candidates = range(MIN_TILES_PER_ITEM, max(MIN_TILES_PER_ITEM, longest))
    # Items only get fewer as they get longer, so the first that fits can be bisected for.
    return keys * (MIN_TILES_PER_ITEM + bisect_left(candidates, True, key=fits))


def plan_decode(
    kv_lengths: Sequence[int],
    block_tables: npt.NDArray[np.int32],
    *,
    kv_heads: int,
    tile: DecodeTile,
    processors: int,
    device: torch.device | str,
) -> DecodePlan:
    """Cut KV lengths (new token included) into items of :func:`item_keys`."""
    step = item_keys(kv_lengths, kv_heads=kv_heads, keys=tile.keys, processors=processors)
    items = [
        (request, first, min(first + step, length))
        for request, length in enumerate(kv_lengths)
        for first in range(0, length, step)
    ]
    counts = [-(-length // step) for length in kv_lengths]

    def put(values: Sequence[int] | npt.NDArray[np.int32]) -> Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=device)

    return DecodePlan(
        tile=tile,
        item_request=put([request for request, _, _ in items]),
        item_first=put([first for _, first, _ in items]),
        item_last=put([last for _, _, last in items]),
        item_starts=put(list(accumulate(counts, initial=0))),
        kv_lengths=put(kv_lengths),
        block_tables=put(block_tables),
    )


def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, plan: DecodePlan
) -> None:
    """Attend ``q`` [requests, heads, head dim] to each request's pages, into ``out``.

    ``q`` may be a slice of a wider qkv (any stride between requests, heads contiguous); ``out`` is
    contiguous. Pages are [pages, KV heads, page tokens, head dim].
    """
    requests, heads, head_dim = q.shape
    _, kv_heads, page_tokens, _ = k_pages.shape
    items, group, tile = len(plan.item_request), heads // kv_heads, plan.tile
    split = items > requests
    partial = q.new_empty(items, heads, head_dim, dtype=torch.float32) if split else out
    log_weight = q.new_empty(items, heads, dtype=torch.float32) if split else out
    decode_attention_kernel[(kv_heads, items)](
        q,
        k_pages,
        v_pages,
        partial,
        log_weight,
        plan.item_request,
        plan.item_first,
        plan.item_last,
        plan.block_tables,
        q.stride(0),
        plan.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_tokens,
        ROWS=max(16, triton.next_power_of_2(group)),
        KEYS=tile.keys,
        SPLIT=split,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split:
        decode_reduce_kernel[(heads, requests)](
            partial,
            log_weight,
            plan.item_starts,
            out,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK=REDUCED_AT_ONCE,
            num_warps=4,
        )


def reference(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: DecodePlan) -> Tensor:
    """:func:`decode_attention` in float64: a decode is the last row of its sequence."""
    outputs = [
        attend_causally(
            row[None],
            gather_pages(k_pages, table, length),
            gather_pages(v_pages, table, length),
        )
        for row, table, length in zip(q, plan.block_tables, plan.kv_lengths.tolist(), strict=True)
    ]
    return torch.cat(outputs)
