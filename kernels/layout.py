"""A batch laid out for the kernels: rows, positions, pages and slots. NumPy only.

The rows of a pass are the new tokens of its prompt chunks, chunk after chunk, then one row per
decoding request, then padding up to a captured size where the engine pads. KV pages are handed
out in a permuted order, because an engine that has run for a while has no two pages in a row,
and each *rotation* takes other pages, so that repeats of one pass do not find theirs in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passtime.kernels.work import BatchLike, new_tokens

TABLE_ALIGNMENT = 16
"""Table widths are multiples of this: Triton compiles anew for widths that 16 does not divide."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PassLayout:
    """Where everything of one pass lies. ``rows`` = tokens + padding; requests: chunks, decodes."""

    chunks: tuple[tuple[int, int], ...]
    """(new, prefix) tokens of each prompt chunk."""
    decode_lengths: tuple[int, ...]
    """Keys that each decode attends to: its KV length and the new token."""
    positions: Int32
    """[rows] of each row within its request; 0 for padding."""
    slots: Int64
    """[rows] where each row's key and value go."""
    block_tables: Int32
    """[requests, width] page of each ``page_tokens`` tokens; width is padded, with zeros."""
    logit_rows: Int64
    """[requests] last row of each request, the one whose next token is wanted."""

    @property
    def rows(self) -> int:
        """Rows of every matrix of the pass."""
        return len(self.positions)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Rows of the chunks, of the decodes and of the padding."""
        prefill = sum(new for new, _ in self.chunks)
        tokens = prefill + len(self.decode_lengths)
        return slice(0, prefill), slice(prefill, tokens), slice(tokens, self.rows)

    @property
    def padding(self) -> int:
        """Rows that belong to no request."""
        return self.rows - sum(new for new, _ in self.chunks) - len(self.decode_lengths)


def kv_lengths(batch: BatchLike) -> list[int]:
    """Tokens that each request has in its pages once the pass is done, chunks first."""
    return [new + prefix for new, prefix in batch.prefill] + [kv + 1 for kv in batch.decode]


def pages_needed(batch: BatchLike, page_tokens: int) -> int:
    """Pages that the requests of ``batch`` fill."""
    return sum(-(-length // page_tokens) for length in kv_lengths(batch))


def permuted_tables(
    batch: BatchLike, *, pool_pages: int, page_tokens: int, rotation: int = 0, seed: int = 0
) -> list[Int32]:
    """A block table per request, no page twice, from a pool of ``pool_pages`` in random order.

    Rotation r takes the r-th run of that order (around its end), so rotations share pages only
    where the pool is smaller than all of them together.
    """
    order = np.random.default_rng(seed).permutation(pool_pages).astype(np.int32)
    counts = [-(-length // page_tokens) for length in kv_lengths(batch)]
    needed = sum(counts)
    assert needed <= pool_pages, f"a pool of {pool_pages} pages cannot hold {needed}"
    taken = order[(rotation * needed + np.arange(needed)) % pool_pages]
    return np.split(taken, np.cumsum(counts)[:-1])


def lay_out(
    batch: BatchLike,
    tables: Sequence[Int32],
    *,
    page_tokens: int,
    padded_rows: int | None = None,
    padding_slot: int = 0,
) -> PassLayout:
    """Lay ``batch`` out on the pages of ``tables``, one table per request, chunks first.

    ``padded_rows`` adds rows up to that number; what they write goes to ``padding_slot``.
    """
    chunks, decode = tuple(batch.prefill), tuple(batch.decode)
    ranges = [np.arange(prefix, prefix + new) for new, prefix in chunks]
    ranges += [np.arange(kv, kv + 1) for kv in decode]
    slots = [
        table[where // page_tokens].astype(np.int64) * page_tokens + where % page_tokens
        for where, table in zip(ranges, tables, strict=True)
    ]
    rows = new_tokens(batch)
    padding = max(padded_rows or 0, rows) - rows
    width = -(-max(map(len, tables)) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    block_tables = np.zeros((len(tables), width), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    return PassLayout(
        chunks=chunks,
        decode_lengths=tuple(kv + 1 for kv in decode),
        positions=np.concatenate([*ranges, np.zeros(padding)]).astype(np.int32),
        slots=np.concatenate([*slots, np.full(padding, padding_slot)]).astype(np.int64),
        block_tables=block_tables,
        logit_rows=np.cumsum([len(where) for where in ranges]).astype(np.int64) - 1,
    )


def padded_to(rows: int, sizes: Sequence[int]) -> int:
    """The next captured size; ``rows`` themselves past the largest, or without sizes."""
    return min((size for size in sizes if size >= rows), default=rows)
