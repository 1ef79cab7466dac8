"""How a batch is laid out and cut: every token once, no page twice, nothing idle or missed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.kernels.decode_attention import (
    MIN_TILES_PER_ITEM,
    PROGRAMS_PER_PROCESSOR,
    DecodePlan,
    item_keys,
    plan_decode,
)
from passtime.kernels.layout import (
    TABLE_ALIGNMENT,
    kv_lengths,
    lay_out,
    padded_to,
    pages_needed,
    permuted_tables,
)
from passtime.kernels.prefill_attention import PrefillPlan, plan_prefill
from passtime.kernels.provenance import kernel_hash
from passtime.kernels.tiles import INTERPRETED, TILES, DecodeTile, PrefillTile, tiles_for


@dataclass(frozen=True)
class Tokens:
    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()


CHUNKS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), max_size=4).map(tuple)
DECODES = st.lists(st.integers(1, 200), max_size=4).map(tuple)
BATCHES = st.builds(Tokens, prefill=CHUNKS, decode=DECODES).filter(
    lambda batch: batch.prefill or batch.decode
)


# --- Layout --------------------------------------------------------------------------------------


@given(batch=BATCHES, page_tokens=st.sampled_from([1, 4, 16]), spare=st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_every_new_token_has_a_slot_of_its_own_in_its_requests_pages(
    batch: Tokens, page_tokens: int, spare: int
) -> None:
    pool = pages_needed(batch, page_tokens) + spare
    tables = permuted_tables(batch, pool_pages=pool, page_tokens=page_tokens, rotation=3)
    layout = lay_out(batch, tables, page_tokens=page_tokens)
    used = np.concatenate(tables)
    assert len(set(used.tolist())) == len(used), "no page belongs to two requests"
    assert used.min() >= 0
    assert used.max() < pool
    assert len(set(layout.slots.tolist())) == layout.rows
    expected = [
        (request, position)
        for request, (first, last) in enumerate(
            [(prefix, prefix + new) for new, prefix in batch.prefill]
            + [(kv, kv + 1) for kv in batch.decode]
        )
        for position in range(first, last)
    ]
    for row, (request, position) in enumerate(expected):
        assert layout.positions[row] == position
        page, offset = divmod(int(layout.slots[row]), page_tokens)
        assert page == layout.block_tables[request, position // page_tokens]
        assert offset == position % page_tokens
    last_rows = [max(r for r, (q, _) in enumerate(expected) if q == i) for i in range(len(tables))]
    assert layout.logit_rows.tolist() == last_rows


@given(batch=BATCHES)
@settings(max_examples=30, deadline=None)
def test_parts_are_chunks_then_decodes_then_padding(batch: Tokens) -> None:
    tables = permuted_tables(batch, pool_pages=200, page_tokens=16)
    layout = lay_out(batch, tables, page_tokens=16, padded_rows=512, padding_slot=199 * 16)
    chunks, decodes, padding = layout.parts
    assert chunks.stop - chunks.start == sum(new for new, _ in batch.prefill)
    assert decodes.stop - decodes.start == len(batch.decode)
    assert (decodes.start, padding.start, padding.stop) == (chunks.stop, decodes.stop, 512)
    assert set(layout.slots[padding].tolist()) <= {199 * 16}
    assert layout.padding == padding.stop - padding.start


def test_rotations_use_other_pages_until_the_pool_is_used_up() -> None:
    batch = Tokens(decode=(31, 15))  # two pages and one
    sets = [
        set(np.concatenate(permuted_tables(batch, pool_pages=9, page_tokens=16, rotation=r)))
        for r in range(4)
    ]
    assert not sets[0] & sets[1]
    assert set.union(*sets[:3]) == set(range(9))
    assert sets[3] == sets[0]


def test_pages_of_a_request_are_not_in_a_row() -> None:
    (table,) = permuted_tables(Tokens(decode=(4095,)), pool_pages=1000, page_tokens=16)
    assert np.mean(np.diff(table) == 1) < 0.05


def test_table_widths_are_aligned() -> None:
    batch = Tokens(prefill=((16 * 17, 0),))
    tables = permuted_tables(batch, pool_pages=17, page_tokens=16)
    assert lay_out(batch, tables, page_tokens=16).block_tables.shape[1] % TABLE_ALIGNMENT == 0


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (8, 8), (9, 9)])
def test_rows_are_padded_to_the_next_captured_size(rows: int, padded: int) -> None:
    assert padded_to(rows, [1, 2, 4, 8]) == padded
    assert padded_to(rows, []) == rows


# --- Attention plans -----------------------------------------------------------------------------


def prefill_plan(
    chunks: tuple[tuple[int, int], ...], *, group: int, processors: int
) -> PrefillPlan:
    batch = Tokens(prefill=chunks)
    tables = permuted_tables(batch, pool_pages=pages_needed(batch, 16), page_tokens=16)
    layout = lay_out(batch, tables, page_tokens=16)
    return plan_prefill(
        chunks,
        layout.block_tables,
        group=group,
        kv_heads=2,
        tiles=[PrefillTile(64, 64, warps=4, stages=2), PrefillTile(16, 32, warps=4, stages=2)],
        processors=processors,
        device="cpu",
    )


@given(chunks=CHUNKS.filter(bool), group=st.sampled_from([1, 3, 8]), processors=st.integers(1, 99))
@settings(max_examples=50, deadline=None)
def test_tiles_cover_every_token_once_longest_first(
    chunks: tuple[tuple[int, int], ...], group: int, processors: int
) -> None:
    plan = prefill_plan(chunks, group=group, processors=processors)
    step = plan.tile.rows // group
    covered, keys = [], []
    tiles = zip(plan.tile_chunk.tolist(), plan.tile_token.tolist(), strict=True)
    for chunk, token in tiles:
        new, prefix = chunks[chunk]
        covered += [(chunk, t) for t in range(token, min(token + step, new))]
        keys.append(prefix + min(token + step, new))
    assert sorted(covered) == [(c, t) for c, (new, _) in enumerate(chunks) for t in range(new)]
    assert keys == sorted(keys, reverse=True)


def test_a_small_chunk_takes_small_tiles_to_fill_the_device() -> None:
    assert prefill_plan(((640, 0),), group=1, processors=20).tile.rows == 64
    assert prefill_plan(((640, 0),), group=1, processors=21).tile.rows == 16


def decode_plan(lengths: list[int], *, processors: int) -> DecodePlan:
    batch = Tokens(decode=tuple(length - 1 for length in lengths))
    assert kv_lengths(batch) == lengths
    tables = permuted_tables(batch, pool_pages=pages_needed(batch, 16), page_tokens=16)
    return plan_decode(
        lengths,
        lay_out(batch, tables, page_tokens=16).block_tables,
        kv_heads=2,
        tile=DecodeTile(16, warps=4, stages=2),
        processors=processors,
        device="cpu",
    )


@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=6), processors=st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_items_cover_every_key_once_and_lie_by_request(lengths: list[int], processors: int) -> None:
    plan = decode_plan(lengths, processors=processors)
    starts = plan.item_starts.tolist()
    assert plan.item_request.tolist() == sorted(plan.item_request.tolist())
    for request, length in enumerate(lengths):
        items = slice(starts[request], starts[request + 1])
        assert set(plan.item_request[items].tolist()) == {request}
        firsts, lasts = plan.item_first[items].tolist(), plan.item_last[items].tolist()
        assert firsts == [0, *lasts[:-1]]
        assert lasts[-1] == length
        assert all(first < last for first, last in zip(firsts, lasts, strict=True))


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=9), processors=st.integers(1, 99)
)
@settings(max_examples=50, deadline=None)
def test_items_are_as_short_as_the_device_has_room_for(lengths: list[int], processors: int) -> None:
    keys, kv_heads = 64, 8
    found = item_keys(lengths, kv_heads=kv_heads, keys=keys, processors=processors)
    budget = max(len(lengths), PROGRAMS_PER_PROCESSOR * processors // kv_heads)

    def items(step: int) -> int:
        return sum(-(-length // step) for length in lengths)

    assert found % keys == 0
    assert items(found) <= budget
    assert found == MIN_TILES_PER_ITEM * keys or items(found - keys) > budget


# --- Tiles and provenance ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "row"),
    [(75, 80), (80, 80), (86, 80), (89, 89), (90, 90), (103, 100), (121, 120)],
)
def test_an_architecture_takes_the_row_of_the_newest_that_is_not_newer(
    capability: int, row: int
) -> None:
    assert tiles_for(capability) == TILES[row]
    assert tiles_for(None) == INTERPRETED


def test_few_rows_take_a_small_tile() -> None:
    for tiles in TILES.values():
        assert tiles.gemm_for(1).m == 16
        assert tiles.gemm_for(17).m == 32
        assert tiles.gemm_for(100_000) == tiles.gemm[0]


def test_the_kernel_hash_is_that_of_the_sources() -> None:
    assert kernel_hash() == kernel_hash()
    assert kernel_hash().startswith("sha256:")
