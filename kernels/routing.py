"""MoE routing: each token's experts and their weights, and the tokens of each expert in a row.

A grouped product wants its rows sorted by expert and every expert's run padded to whole tiles.
All of it stays on the device and no shape depends on the data, so a CUDA graph can hold it: the
row list is as long as the worst case, and tiles past the last used one return at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def top_experts_kernel(
    logits,  # [tokens, EXPERTS]
    experts,  # [tokens, CHOSEN] int32
    weights,  # [tokens, CHOSEN] float32
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
):
    """One program per token: the CHOSEN largest logits, softmax over them alone."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOSEN_BLOCK)
    value = tl.load(
        logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")
    ).to(tl.float32)
    picked = tl.full((CHOSEN_BLOCK,), float("-inf"), tl.float32)
    indices = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    for rank in tl.static_range(CHOSEN):
        largest = tl.max(value, axis=0)
        index = tl.min(tl.where(value == largest, expert, BLOCK), axis=0)
        picked = tl.where(choice == rank, largest, picked)
        indices = tl.where(choice == rank, index, indices)
        value = tl.where(expert == index, float("-inf"), value)
    weight = tl.exp(picked - tl.max(picked, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    target = token * CHOSEN + choice
    tl.store(experts + target, indices, mask=choice < CHOSEN)
    tl.store(weights + target, weight, mask=choice < CHOSEN)


def top_experts(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Experts [tokens, chosen] int32, best first, and their float32 weights, which sum to 1.

    Softmax over the chosen equals softmax over all, renormalised (Mixtral; Qwen3-MoE with
    ``norm_topk_prob``). ``logits`` [tokens, experts], contiguous.
    """
    tokens, count = logits.shape
    experts = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    top_experts_kernel[(tokens,)](
        logits,
        experts,
        weights,
        EXPERTS=count,
        BLOCK=triton.next_power_of_2(count),
        CHOSEN=chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(chosen),
        num_warps=1,
    )
    return experts, weights


@triton.jit(do_not_specialize=["ROUTED"])
def count_kernel(experts, counts, ROUTED, BLOCK: tl.constexpr):
    """How many routed rows each expert has."""
    routed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = routed < ROUTED
    expert = tl.load(experts + routed, mask=inside, other=0)
    tl.atomic_add(counts + expert, 1, mask=inside)


@triton.jit
def ends_kernel(
    counts,  # [EXPERTS] int32
    cursors,  # [EXPERTS] int32: where each expert's run begins
    ends,  # [EXPERTS] int32: where its padded run ends
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: runs padded to whole tiles, one behind the other."""
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    count = tl.load(counts + expert, mask=inside, other=0)
    padded = (count + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, axis=0)
    tl.store(cursors + expert, end - padded, mask=inside)
    tl.store(ends + expert, end, mask=inside)


@triton.jit(do_not_specialize=["ROUTED"])
def place_kernel(experts, cursors, rows, ROUTED, BLOCK: tl.constexpr):
    """Write each routed row into its expert's run, in whatever order the device takes them."""
    routed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = routed < ROUTED
    expert = tl.load(experts + routed, mask=inside, other=0)
    place = tl.atomic_add(cursors + expert, 1, mask=inside)
    tl.store(rows + place, routed, mask=inside)


class Groups(NamedTuple):
    """Routed rows by expert: ``rows`` [capacity] int32, ``ends`` [experts] int32.

    A routed row r is choice r % chosen of token r // chosen. Expert e owns the places from
    ends[e − 1] to ends[e], a multiple of ``tile``; unused places hold −1.
    """

    rows: Tensor
    ends: Tensor
    tile: int


def capacity(routed: int, experts: int, tile: int) -> int:
    """Places that any routing of ``routed`` rows fits into: whole tiles, one partial per expert."""
    return (routed + min(routed, experts) * (tile - 1) + tile - 1) // tile * tile


def group_by_expert(experts: Tensor, count: int, *, tile: int) -> Groups:
    """Sort the routed rows of ``experts`` [tokens, chosen] int32 into runs of whole tiles."""
    routed = experts.numel()
    counts = torch.zeros(count, dtype=torch.int32, device=experts.device)
    cursors, ends = torch.empty_like(counts), torch.empty_like(counts)
    rows = counts.new_full((capacity(routed, count, tile),), -1)
    grid = (triton.cdiv(routed, 256),)
    count_kernel[grid](experts, counts, routed, BLOCK=256, num_warps=4)
    ends_kernel[(1,)](
        counts,
        cursors,
        ends,
        EXPERTS=count,
        BLOCK=triton.next_power_of_2(count),
        TILE=tile,
        num_warps=1,
    )
    place_kernel[grid](experts, cursors, rows, routed, BLOCK=256, num_warps=4)
    return Groups(rows, ends, tile)


def reference_top_experts(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """:func:`top_experts` by torch, weights in float64."""
    values, experts = logits.double().topk(chosen, dim=1)
    return experts.int(), values.softmax(dim=1)


def reference_groups(experts: Tensor, count: int, *, tile: int) -> Groups:
    """:func:`group_by_expert` with each run in ascending order."""
    flat, places, ends = experts.flatten().tolist(), [], []
    for expert in range(count):
        run = [row for row, chosen in enumerate(flat) if chosen == expert]
        places += run + [-1] * (-len(run) % tile)
        ends.append(len(places))
    places += [-1] * (capacity(len(flat), count, tile) - len(places))
    return Groups(
        torch.tensor(places, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), tile
    )
