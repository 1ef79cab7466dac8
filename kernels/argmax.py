"""Greedy sampling: the largest logit of each row, split over the vocabulary, then joined.

A row of 128k logits is a quarter of a megabyte; one program a row would leave a decode of a few
requests to a few processors. So each row is cut into up to ``MAX_SPLITS`` pieces of whole blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MAX_SPLITS = 32

NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def argmax_kernel(
    logits,  # [rows, COLUMNS]
    values,  # [rows, SPLITS] float32
    columns,  # [rows, SPLITS] int32
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per piece and row; of equal logits the first wins."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    PIECE: tl.constexpr = (COLUMNS + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), NO_COLUMN, tl.int32)
    for start in range(split * PIECE, split * PIECE + PIECE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        source = logits + row * COLUMNS + column
        value = tl.load(source, mask=column < COLUMNS, other=float("-inf")).to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, column, where)
    largest = tl.max(best, axis=0)
    slot = row * SPLITS + split
    tl.store(values + slot, largest)
    tl.store(columns + slot, tl.min(tl.where(best == largest, where, NO_COLUMN), axis=0))


@triton.jit
def argmax_join_kernel(values, columns, out, SPLITS: tl.constexpr):
    """One program per row: the first column among the pieces' largest."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    value = tl.load(values + row * SPLITS + split)
    column = tl.load(columns + row * SPLITS + split)
    largest = tl.max(value, axis=0)
    tl.store(out + row, tl.min(tl.where(value == largest, column, NO_COLUMN), axis=0))


def argmax(logits: Tensor) -> Tensor:
    """Column of the largest of each row, [rows] int32; ``logits`` [rows, columns], contiguous."""
    rows, width = logits.shape
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(width, BLOCK)))
    values = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    columns = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    argmax_kernel[(splits, rows)](
        logits, values, columns, COLUMNS=width, BLOCK=BLOCK, SPLITS=splits, num_warps=4
    )
    argmax_join_kernel[(rows,)](values, columns, out, SPLITS=splits, num_warps=1)
    return out


def reference(logits: Tensor) -> Tensor:
    """The first column that holds the row's largest logit."""
    wide = logits.double()
    return (wide == wide.amax(dim=1, keepdim=True)).int().argmax(dim=1).int()
