"""Every kernel, compiled ahead of time for GPUs that are not here, exactly as it is launched.

The launchers run on tensors without storage (device "meta") while ``JITFunction.run`` only records
its arguments; each record is then specialised as Triton would do it and compiled to a cubin, whose
registers, spills, shared memory and instructions are read back with the tools in Triton's wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from passtime.kernels import (
    argmax,
    decode_attention,
    fp8,
    gemm,
    grouped_gemm,
    prefill_attention,
    rmsnorm,
    rope,
    routing,
    silu_mul,
)
from passtime.kernels.decode_attention import plan_decode
from passtime.kernels.prefill_attention import plan_prefill
from passtime.kernels.tiles import (
    SHARED_MEMORY_LIMIT_BYTES,
    TILES,
    DecodeTile,
    GemmTile,
    PrefillTile,
)

if not isinstance(gemm.gemm_kernel, JITFunction):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITIES = [80, 90, 100]
MATRIX_INSTRUCTION = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
REGISTERS_PER_BLOCK = 65_536
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
META: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of one launch, options of the compiler among them."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Binary:
    """What the assembler made of a launch."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    cubin: bytes

    @cached_property
    def sass(self) -> str:
        return _tool("nvdisasm", "-c", self.cubin)

    def count(self, instruction: str) -> int:
        """Instructions of that name, whatever their modifiers."""
        return len(re.findall(rf"\b{instruction}\b", self.sass))

    @property
    def load_widths(self) -> set[str]:
        """Widths in bits of the global loads: single elements (U16, U8) are uncoalesced ones."""
        loads = re.findall(r"\bLDG(?:STS)?\.E[\w.]*", self.sass)
        widths = (re.search(r"\b(U8|U16|S16|64|128)\b", load) for load in loads)
        return {width[1] if width else "32" for width in widths}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    recorded: list[Launch] = []

    def record(
        self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any
    ) -> None:
        assert all(0 < size < 2**31 for size in grid)
        assert all(size < 2**16 for size in grid[1:])
        named = dict(zip(self.arg_names, args, strict=False))
        named |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        assert set(named) == set(self.arg_names)
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        recorded.append(Launch(self, named, options))

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(triton, "set_allocator", lambda allocator: None)
    return recorded


def compiled(launch: Launch, capability: int) -> Binary:
    """Specialise as Triton does: 1 becomes a constant, multiples of 16 are known to be ones."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or (free and type(value) is int and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            hints[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if free and value % 16 == 0:
                hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, hints)
    kernel = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch.options
    )
    return inspected(kernel, capability)


def inspected(kernel: Any, capability: int) -> Binary:
    usage = _tool("cuobjdump", "-res-usage", kernel.asm["cubin"])
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert match is not None, usage
    registers, stack, static = map(int, match.groups())
    return Binary(
        registers=registers,
        # Only the assembler tells a spill from another use of the stack.
        spilled_bytes=_spilled(kernel.asm["ptx"], capability) if stack else 0,
        shared_bytes=max(static, kernel.metadata.shared),
        warps=kernel.metadata.num_warps,
        cubin=kernel.asm["cubin"],
    )


def _tool(name: str, option: str, cubin: bytes) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), option, file.name]
        return str(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _spilled(ptx: str, capability: int) -> int:
    architecture = f"--gpu-name={sm_arch_from_capability(capability)}"
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", architecture, file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills is not None, report
    return int(spills[1]) + int(spills[2])


def check(binary: Binary, capability: int) -> None:
    assert binary.spilled_bytes == 0
    assert binary.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES[capability]
    assert binary.registers * binary.warps * 32 <= REGISTERS_PER_BLOCK


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def pages() -> Tensor:
    return empty(1000, KV_HEADS, PAGE, HEAD_DIM)


def attention_rows(rows: int) -> tuple[Tensor, Tensor]:
    return empty(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS], empty(rows, HEADS, HEAD_DIM)


def launch_prefill(tile: PrefillTile) -> None:
    plan = plan_prefill(
        [(512, 512)],
        np.zeros((1, 64), np.int32),
        group=HEADS // KV_HEADS,
        kv_heads=KV_HEADS,
        tiles=[tile],
        processors=132,
        device="meta",
    )
    q, out = attention_rows(512)
    prefill_attention.prefill_attention(q, pages(), pages(), out, plan)


def launch_decode(tile: DecodeTile) -> None:
    plan = plan_decode(
        [4096] * 2,
        np.zeros((2, 256), np.int32),
        kv_heads=KV_HEADS,
        tile=tile,
        processors=132,
        device="meta",
    )
    q, out = attention_rows(2)
    decode_attention.decode_attention(q, pages(), pages(), out, plan)


def launch_elementwise() -> None:
    x = empty(64, 4096)
    rmsnorm.rmsnorm(x, empty(4096), eps=1e-5, residual=x)
    silu_mul.silu_mul(empty(64, 2 * 14336))
    positions, slots = empty(64, dtype=torch.int32), empty(64, dtype=torch.int64)
    table = empty(8192, HEAD_DIM // 2, dtype=torch.float32)
    qkv, gain = empty(64, HEADS + 2 * KV_HEADS, HEAD_DIM), empty(HEAD_DIM)
    for gains in (None, (gain, gain)):
        rope.rope_kv_write(qkv, table, table, positions, slots, pages(), pages(), qk_gains=gains)
    argmax.argmax(empty(64, 128_256))
    grouped_gemm.combine(empty(512, 2048), empty(64, 8, dtype=torch.float32))


def launch_product(tile: GemmTile, *, descriptors: bool = False) -> None:
    gemm.gemm(empty(4096, 4096), empty(6144, 4096), tile=tile, descriptors=descriptors)


def launch_fp8(tile: GemmTile) -> None:
    values, scales = empty(6144, 4096, dtype=torch.float8_e4m3fn), empty(6144, dtype=torch.float32)
    fp8.fp8_linear(empty(4096, 4096), fp8.Fp8Weight(values, scales), tile=tile)


def launch_experts(tile: GemmTile) -> None:
    experts, _ = routing.top_experts(empty(64, 128), 8)
    groups = routing.group_by_expert(experts, 128, tile=tile.m)
    x, weights = empty(64, 2048), empty(128, 1536, 2048)
    grouped_gemm.grouped_gemm(x, weights, groups, routed=512, tile=tile)


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89, 120])
def test_prefill_attention(launches: list[Launch], capability: int) -> None:
    for tile in TILES[capability].prefill:
        launch_prefill(tile)
        binary = compiled(launches.pop(), capability)
        check(binary, capability)
        assert binary.count(MATRIX_INSTRUCTION[capability]) > 0
        assert binary.load_widths <= {"32", "128"}, "page numbers, and 16 bytes of anything else"


@pytest.mark.parametrize("capability", [*CAPABILITIES, 89, 120])
def test_decode_attention(launches: list[Launch], capability: int) -> None:
    launch_decode(TILES[capability].decode)
    split, reduction = (compiled(launch, capability) for launch in launches)
    check(split, capability)
    check(reduction, capability)
    # Sixteen rows are too few for wgmma and tcgen05, which begin at 64: mma everywhere.
    assert split.count("HMMA") > 0
    assert split.load_widths <= {"32", "128"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_matrix_products(launches: list[Launch], capability: int) -> None:
    for tile in TILES[capability].gemm:
        launch_product(tile)
        binary = compiled(launches.pop(), capability)
        check(binary, capability)
        assert binary.count(MATRIX_INSTRUCTION[capability] if tile.m >= 64 else "HMMA") > 0
        assert binary.load_widths == {"128"}


@pytest.mark.parametrize("capability", [90, 100])
def test_descriptors_become_bulk_copies(launches: list[Launch], capability: int) -> None:
    launch_product(TILES[capability].gemm[0], descriptors=True)
    binary = compiled(launches.pop(), capability)
    check(binary, capability)
    assert binary.count("UTMALDG") > 0
    assert binary.count("UTMASTG") > 0
    assert binary.count(MATRIX_INSTRUCTION[capability]) > 0


@pytest.mark.parametrize(
    ("capability", "instruction"), [(89, "QMMA"), (90, "QGMMA"), (100, "UTCQMMA")]
)
def test_fp8_products(launches: list[Launch], capability: int, instruction: str) -> None:
    for tile in TILES[capability].gemm_fp8:
        launch_fp8(tile)
        quantiser, product = (compiled(launch, capability) for launch in launches)
        launches.clear()
        check(quantiser, capability)
        check(product, capability)
        assert tile.m < 64 or product.count(instruction) > 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_elementwise_kernels(launches: list[Launch], capability: int) -> None:
    launch_elementwise()
    for launch in launches:
        binary = compiled(launch, capability)
        check(binary, capability)
        assert not binary.load_widths & {"U8", "U16", "S16"}, launch.kernel


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_mixture_of_experts(launches: list[Launch], capability: int) -> None:
    for tile in (TILES[capability].gemm[0], TILES[capability].gemm[-1]):
        launch_experts(tile)
        *routing_kernels, product = launches
        for launch in routing_kernels if tile == TILES[capability].gemm[0] else []:
            check(compiled(launch, capability), capability)
        check(compiled(product, capability), capability)
        launches.clear()


def test_a_tile_that_is_too_large_is_seen_to_spill(launches: list[Launch]) -> None:
    """The checks above can fail: four warps cannot hold what eight do."""
    launch_prefill(PrefillTile(128, 64, warps=4, stages=2))
    assert compiled(launches.pop(), 90).spilled_bytes > 100


def test_shared_memory_over_the_limit_is_seen(launches: list[Launch]) -> None:
    """Triton compiles it without a word; it would fail at its first launch."""
    launch_product(GemmTile(128, 256, 128, warps=8, stages=4))
    assert compiled(launches.pop(), 90).shared_bytes > SHARED_MEMORY_LIMIT_BYTES[90]
