"""What ``kernels.py`` times: each kernel at the sizes of a served model, and its rival.

A case holds as many sets of inputs as it takes to be cold: more memory than the L2 cache. It is
made when it is reached, since the inputs of all cases do not fit side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from passtime.kernels import argmax, fp8, gemm, grouped_gemm, rmsnorm, rope, routing, work
from passtime.kernels import silu_mul as silu_mul_kernel
from passtime.kernels.decode_attention import decode_attention, plan_decode
from passtime.kernels.operators import TimedOperators
from passtime.kernels.prefill_attention import plan_prefill, prefill_attention
from passtime.kernels.work import Work
from passtime.profiles.shapes import ModelShape

PAGE_TOKENS = 16
MOST_ROTATIONS = 48


@dataclass(frozen=True)
class Grid:
    """Sizes to time. Attention: (new, prefix) chunks and (requests, KV length); the rest, rows."""

    prefill: Sequence[tuple[int, int]] = ((1024, 0), (4096, 0), (16384, 0), (512, 8192))
    decode: Sequence[tuple[int, int]] = ((1, 8192), (8, 8192), (32, 2048), (128, 2048))
    product_rows: Sequence[int] = (1, 16, 64, 512, 4096, 8192)
    rows: Sequence[int] = (16, 8192)
    expert_rows: Sequence[int] = (16, 4096)


@dataclass(frozen=True)
class Bench:
    """Where and with what: tiles, dtype, model, and how large a working set must be to be cold."""

    operators: TimedOperators
    model: ModelShape
    experts: ModelShape
    grid: Grid
    device: torch.device
    cold_bytes: int
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, std, generator=generator)

    def rotations(self, bytes_once: float) -> int:
        return max(1, min(MOST_ROTATIONS, ceil(self.cold_bytes / bytes_once)))


@dataclass(frozen=True)
class Case:
    """``run`` and ``baseline`` take the rotation's number and return comparable tensors."""

    kernel: str
    size: str
    work: Work
    rotations: int
    run: Callable[[int], Any]
    baseline: Callable[[int], Any] | None = None
    baseline_name: str = ""


def cases(bench: Bench) -> Iterator[Case]:
    """Every case, one after the other."""
    for chunk in bench.grid.prefill:
        yield prefill_case(bench, *chunk)
    for requests, length in bench.grid.decode:
        yield decode_case(bench, requests, length)
    d, model = bench.model.hidden_size, bench.model
    shapes = {
        "qkv": (model.query_size + 2 * model.kv_size, d),
        "gate_up": (2 * model.ffn_size, d),
        "down": (d, model.ffn_size),
    }
    for name, (outputs, inputs) in shapes.items():
        for rows in bench.grid.product_rows:
            yield from product_cases(bench, name, rows, outputs, inputs)
    for rows in bench.grid.rows:
        yield from elementwise_cases(bench, rows)
    for rows in bench.grid.expert_rows:
        yield experts_case(bench, rows)


def paged(bench: Bench, contiguous: Tensor) -> tuple[Tensor, np.ndarray]:
    """[requests, length, KV heads, head dim] as shuffled pages, and their block tables."""
    requests, length, heads, head_dim = contiguous.shape
    pages_each = ceil(length / PAGE_TOKENS)
    order = np.random.default_rng(0).permutation(requests * pages_each).astype(np.int32)
    tables = order.reshape(requests, pages_each)
    padded = torch.zeros(
        requests, pages_each * PAGE_TOKENS, heads, head_dim, dtype=bench.dtype, device=bench.device
    )
    padded[:, :length] = contiguous
    by_page = padded.view(requests * pages_each, PAGE_TOKENS, heads, head_dim).transpose(1, 2)
    pages = torch.empty_like(by_page, memory_format=torch.contiguous_format)
    pages[torch.tensor(order, device=bench.device).long()] = by_page
    return pages, tables


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Torch's flash attention, [requests, tokens, heads, head dim]; its math version on a CPU."""
    backend = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True, **options
        )
    return out.transpose(1, 2)


def prefill_case(bench: Bench, new: int, prefix: int) -> Case:
    model, length = bench.model, new + prefix
    todo = work.prefill_attention(model, [(new, prefix)])
    rotations = bench.rotations(todo.bytes)
    sets = []
    for seed in range(rotations):
        q = bench.normal(1, new, model.heads, model.head_dim, seed=3 * seed)
        k, v = (
            bench.normal(1, length, model.kv_heads, model.head_dim, seed=3 * seed + part)
            for part in (1, 2)
        )
        (k_pages, tables), (v_pages, _) = paged(bench, k), paged(bench, v)
        sets.append((q, k, v, k_pages, v_pages, torch.empty_like(q[0])))
    plan = plan_prefill(
        [(new, prefix)],
        tables,
        group=model.heads // model.kv_heads,
        kv_heads=model.kv_heads,
        tiles=bench.operators.tiles.prefill,
        processors=bench.operators.processors,
        device=bench.device,
    )

    def run(rotation: int) -> Tensor:
        q, _, _, k_pages, v_pages, out = sets[rotation]
        prefill_attention(q[0], k_pages, v_pages, out, plan)
        return out

    def baseline(rotation: int) -> Tensor:
        q, k, v, *_ = sets[rotation]
        if prefix:
            return flash(q, k, v, attn_mask=causal_lower_right(new, length))[0]
        return flash(q, k, v, is_causal=True)[0]

    name = f"{new} new, {prefix} cached"
    return Case("prefill attention", name, todo, rotations, run, baseline, "SDPA flash")


def decode_case(bench: Bench, requests: int, length: int) -> Case:
    model = bench.model
    todo = work.decode_attention(model, [length] * requests)
    rotations = bench.rotations(todo.bytes)
    sets = []
    for seed in range(rotations):
        q = bench.normal(requests, 1, model.heads, model.head_dim, seed=3 * seed)
        k, v = (
            bench.normal(requests, length, model.kv_heads, model.head_dim, seed=3 * seed + part)
            for part in (1, 2)
        )
        (k_pages, tables), (v_pages, _) = paged(bench, k), paged(bench, v)
        sets.append((q, k, v, k_pages, v_pages, torch.empty_like(q[:, 0])))
    plan = plan_decode(
        [length] * requests,
        tables,
        kv_heads=model.kv_heads,
        tile=bench.operators.tiles.decode,
        processors=bench.operators.processors,
        device=bench.device,
    )

    def run(rotation: int) -> Tensor:
        q, _, _, k_pages, v_pages, out = sets[rotation]
        decode_attention(q[:, 0], k_pages, v_pages, out, plan)
        return out

    def baseline(rotation: int) -> Tensor:
        q, k, v, *_ = sets[rotation]
        return flash(q, k, v)[:, 0]

    name = f"{requests} × {length} keys"
    return Case("decode attention", name, todo, rotations, run, baseline, "SDPA flash")


def product_cases(bench: Bench, name: str, m: int, n: int, k: int) -> Iterator[Case]:
    todo = work.gemm(m, n, k, input_bytes=2, weight_bytes=2, output_bytes=2)
    rotations = bench.rotations(todo.bytes)
    sets = [
        (bench.normal(m, k, seed=2 * seed), bench.normal(n, k, seed=2 * seed + 1, std=0.02))
        for seed in range(rotations)
    ]
    tiles, size = bench.operators.tiles, f"{name} {m} × {n} × {k}"

    def cublas(rotation: int) -> Tensor:
        a, b = sets[rotation]
        return torch.mm(a, b.t())

    def triton_product(descriptors: bool) -> Callable[[int], Tensor]:
        tile = tiles.gemm_for(m)
        return lambda rotation: gemm.gemm(*sets[rotation], tile=tile, descriptors=descriptors)

    yield Case("product", size, todo, rotations, triton_product(False), cublas, "cuBLAS")
    if bench.device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0):
        run = triton_product(True)
        yield Case("product, descriptors", size, todo, rotations, run, cublas, "cuBLAS")
    if tiles.gemm_fp8:
        narrow = work.gemm(m, n, k, input_bytes=2, weight_bytes=1, output_bytes=2)
        yield fp8_case(bench, size, narrow, sets, cublas)


def fp8_case(
    bench: Bench,
    size: str,
    todo: Work,
    sets: Sequence[tuple[Tensor, Tensor]],
    cublas: Callable[[int], Tensor],
) -> Case:
    tile = bench.operators.tiles.gemm_for(len(sets[0][0]), fp8=True)
    narrow = [fp8.fp8_weight(b) for _, b in sets]

    def run(rotation: int) -> Tensor:
        return fp8.fp8_linear(sets[rotation][0], narrow[rotation], tile=tile)

    return Case("fp8 product", size, todo, len(sets), run, cublas, "cuBLAS bf16")


def elementwise_cases(bench: Bench, rows: int) -> Iterator[Case]:
    model = bench.model
    d, f = model.hidden_size, model.ffn_size
    weight = bench.normal(d, seed=99)

    todo = work.rmsnorm(rows, d, 2)
    rotations = bench.rotations(todo.bytes)
    pairs = [
        (bench.normal(rows, d, seed=2 * s), bench.normal(rows, d, seed=2 * s + 1))
        for s in range(rotations)
    ]

    others = [residual.clone() for _, residual in pairs]  # both sides add in place

    def norm(rotation: int) -> Tensor:
        x, residual = pairs[rotation]
        return rmsnorm.rmsnorm(x, weight, eps=1e-5, residual=residual)

    def torch_norm(rotation: int) -> Tensor:
        residual = others[rotation]
        residual += pairs[rotation][0]
        return rms_norm(residual, (d,), weight, eps=1e-5)

    yield Case("RMSNorm + residual", f"{rows} × {d}", todo, rotations, norm, torch_norm, "torch")

    todo = work.silu_mul(rows, f, 2)
    gates = [bench.normal(rows, 2 * f, seed=s) for s in range(bench.rotations(todo.bytes))]

    def torch_silu_mul(rotation: int) -> Tensor:
        gate, up = gates[rotation].chunk(2, dim=-1)
        return silu(gate) * up

    yield Case(
        "SiLU · up",
        f"{rows} × {f}",
        todo,
        len(gates),
        lambda rotation: silu_mul_kernel.silu_mul(gates[rotation]),
        torch_silu_mul,
        "torch",
    )
    yield rope_case(bench, rows)

    logits_rows = min(rows, 256)
    todo = work.argmax(logits_rows, model.vocab_size, 2)
    logits = [
        bench.normal(logits_rows, model.vocab_size, seed=s)
        for s in range(bench.rotations(todo.bytes))
    ]
    yield Case(
        "argmax",
        f"{logits_rows} × {model.vocab_size}",
        todo,
        len(logits),
        lambda rotation: _at(logits[rotation], argmax.argmax(logits[rotation])),
        lambda rotation: _at(logits[rotation], logits[rotation].argmax(dim=1)),
        "torch",
    )


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    """The logits that were chosen: of equal ones the two sides may choose either."""
    return logits.gather(1, columns.long()[:, None])


def rope_case(bench: Bench, rows: int) -> Case:
    model = bench.model
    todo = work.rope_kv_write(rows, model)
    all_heads = model.heads + 2 * model.kv_heads
    cos, sin = (table.to(bench.device) for table in rope.rotation_table(rows, model.head_dim))
    positions = torch.arange(rows, dtype=torch.int32, device=bench.device)
    pages_each = ceil(rows / PAGE_TOKENS)
    slots = torch.randperm(
        pages_each * PAGE_TOKENS, generator=torch.Generator(bench.device).manual_seed(0),
        device=bench.device,
    )[:rows]  # fmt: skip
    sets = [
        (
            bench.normal(rows, all_heads, model.head_dim, seed=s),
            bench.normal(pages_each, model.kv_heads, PAGE_TOKENS, model.head_dim),
            bench.normal(pages_each, model.kv_heads, PAGE_TOKENS, model.head_dim),
        )
        for s in range(bench.rotations(todo.bytes))
    ]

    def run(rotation: int) -> None:
        qkv, k_pages, v_pages = sets[rotation]
        rope.rope_kv_write(qkv, cos, sin, positions, slots, k_pages, v_pages)

    return Case("RoPE + KV write", f"{rows} tokens", todo, len(sets), run)


def experts_case(bench: Bench, rows: int) -> Case:
    model = bench.experts
    assert model.moe is not None
    experts, chosen = model.moe.experts, model.moe.experts_per_token
    size, d = model.moe.expert_ffn_size, model.hidden_size
    routed = rows * chosen
    hit = work.experts_hit(rows, experts, chosen)
    todo = Work(2.0 * routed * 2 * size * d, 2.0 * (routed * (d + 2 * size) + hit * 2 * size * d))
    x, weights = bench.normal(rows, d), bench.normal(experts, 2 * size, d, seed=1, std=0.02)
    choice, _ = routing.top_experts(bench.normal(rows, experts, seed=2), chosen)
    tile = bench.operators.tiles.gemm_for(-(-routed // experts))

    def run(rotation: int) -> Tensor:
        groups = routing.group_by_expert(choice, experts, tile=tile.m)
        return grouped_gemm.grouped_gemm(x, weights, groups, routed=routed, tile=tile)

    def one_by_one(rotation: int) -> Tensor:
        flat = choice.flatten().long()
        out = x.new_zeros(routed, 2 * size)
        for expert in range(experts):
            mine = flat == expert
            product = x.repeat_interleave(chosen, dim=0) @ weights[expert].t()
            out = torch.where(mine[:, None], product, out)
        return out

    # Every expert over every row is a check, not a rival.
    name = f"{rows} tokens, {chosen} of {experts}"
    return Case("experts, gate and up", name, todo, 1, run, one_by_one, "")
