"""Paged attention against float64: ragged chunks, cached prefixes, every kind of head grouping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from passtime.kernels import decode_attention, prefill_attention
from passtime.kernels.decode_attention import plan_decode
from passtime.kernels.prefill_attention import plan_prefill
from passtime.kernels.tiles import DecodeTile, PrefillTile

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp16"])
HEADS = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 64), (2, 2, 128), (7, 1, 64)],
    ids=["grouped", "one to one", "seven to one"],
)


class Pool:
    """Random pages, a shuffled table for each request, and q as a slice of a wider qkv."""

    def __init__(
        self,
        lengths: list[int],
        rows: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        rng = np.random.default_rng(0)
        counts = [-(-length // page_tokens) for length in lengths]
        order = rng.permutation(sum(counts) + 3).astype(np.int32)
        self.tables = np.zeros((len(lengths), max(counts)), np.int32)
        for index, table in enumerate(np.split(order[: sum(counts)], np.cumsum(counts)[:-1])):
            self.tables[index, : len(table)] = table
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        self.k = normal(len(order), kv_heads, page_tokens, head_dim)
        self.v = normal(len(order), kv_heads, page_tokens, head_dim)
        self.q = normal(rows, heads + 2 * kv_heads, head_dim)[:, :heads]
        self.out = torch.full(self.q.shape, torch.nan, dtype=dtype, device=device)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@DTYPES
@HEADS
@pytest.mark.parametrize(
    ("chunks", "page_tokens"),
    [
        ([(70, 30), (37, 0), (1, 64)], 16),
        ([(70, 33)], 1),  # a tile's last key is the first of a block of keys
        ([(5, 100), (64, 0)], 64),
    ],
    ids=["ragged", "pages of one", "long pages"],
)
def test_prefill_attention(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[tuple[int, int]],
    page_tokens: int,
) -> None:
    pool = Pool(
        [new + prefix for new, prefix in chunks],
        sum(new for new, _ in chunks),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
        device=device,
    )
    plan = plan_prefill(
        chunks,
        pool.tables,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        tiles=[PrefillTile(64, 32, warps=4, stages=2)],
        processors=1,
        device=device,
    )
    prefill_attention.prefill_attention(pool.q, pool.k, pool.v, pool.out, plan)
    wanted = prefill_attention.reference(pool.q, pool.k, pool.v, plan)
    assert relative_error(pool.out, wanted) <= LIMITS[dtype]


@DTYPES
@HEADS
@pytest.mark.parametrize(
    ("lengths", "processors"),
    [([130, 17, 64], 4), ([1, 33], 1), ([500], 64)],
    ids=["split unevenly", "not split", "split a lot"],
)
def test_decode_attention(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    processors: int,
) -> None:
    pool = Pool(
        lengths,
        len(lengths),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=16,
        dtype=dtype,
        device=device,
    )
    plan = plan_decode(
        lengths,
        pool.tables,
        kv_heads=kv_heads,
        tile=DecodeTile(16, warps=4, stages=2),
        processors=processors,
        device=device,
    )
    decode_attention.decode_attention(pool.q, pool.k, pool.v, pool.out, plan)
    wanted = decode_attention.reference(pool.q, pool.k, pool.v, plan)
    assert relative_error(pool.out, wanted) <= LIMITS[dtype]


def test_a_request_of_many_items_is_reduced_in_several_rounds(device: str) -> None:
    """More items than the reduction takes at once, so its own running maximum is exercised."""
    pool = Pool(
        [1200], 1, heads=2, kv_heads=1, head_dim=64, page_tokens=16, dtype=torch.float16,
        device=device,
    )  # fmt: skip
    tile = DecodeTile(16, warps=4, stages=2)
    plan = plan_decode([1200], pool.tables, kv_heads=1, tile=tile, processors=8, device=device)
    assert len(plan.item_request) > 2 * decode_attention.REDUCED_AT_ONCE
    decode_attention.decode_attention(pool.q, pool.k, pool.v, pool.out, plan)
    wanted = decode_attention.reference(pool.q, pool.k, pool.v, plan)
    assert relative_error(pool.out, wanted) <= LIMITS[torch.float16]
