"""Tile shapes, frozen per compute capability.

A calibration must not tune: a tuner that changes its mind between two runs moves the numbers by
more than the model's error. So every launch takes its tile from this table, which is part of the
kernel hash of a profile, and the compile-time tests hold each row to no spills and to the shared
memory of its architecture.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillTile:
    """``rows`` query rows (token × head of a group) against ``keys`` keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeTile:
    """``keys`` keys at a time for all query heads of one KV head."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class GemmTile:
    """An ``m`` × ``n`` tile of the product, ``k`` deep; ``group`` rows of tiles share B in L2."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


@dataclass(frozen=True)
class Tiles:
    """What one architecture runs with. Lists go from the largest tile to the smallest."""

    prefill: tuple[PrefillTile, ...]
    decode: DecodeTile
    gemm: tuple[GemmTile, ...]
    gemm_fp8: tuple[GemmTile, ...] = ()

    def gemm_for(self, rows: int, *, fp8: bool = False) -> GemmTile:
        """The tile for a product of ``rows`` rows: the smallest that covers them, or the largest.

        Fewer rows than a tile has would be padding that is multiplied all the same.
        """
        tiles = self.gemm_fp8 if fp8 else self.gemm
        fitting = [tile for tile in tiles if tile.m >= rows]
        return fitting[-1] if fitting else tiles[0]


_GEMM_80 = (
    GemmTile(128, 128, 32, warps=8, stages=4),
    GemmTile(64, 128, 64, warps=4, stages=3),
    GemmTile(32, 64, 64, warps=4, stages=5),
    GemmTile(16, 64, 128, warps=4, stages=4),
)
_GEMM_90 = (
    GemmTile(128, 256, 64, warps=8, stages=4),
    GemmTile(128, 128, 64, warps=8, stages=4),
    GemmTile(64, 128, 128, warps=4, stages=3),
    GemmTile(32, 64, 64, warps=4, stages=6),
    GemmTile(16, 64, 128, warps=4, stages=5),
)
_FP8_89 = (
    GemmTile(128, 128, 64, warps=8, stages=3),
    GemmTile(64, 64, 128, warps=4, stages=3),
    GemmTile(16, 64, 128, warps=4, stages=4),
)
_FP8_90 = (
    GemmTile(128, 128, 128, warps=8, stages=3),
    GemmTile(64, 128, 128, warps=4, stages=3),
    GemmTile(16, 64, 256, warps=4, stages=3),
)

# Attention reads a page number before it can load a key, and Triton spreads its pipeline stages
# over that chain: three stages prefetch the page only, five keep a second tile of keys in flight.
# Where stages are three the second tile is there already (wgmma needs it) or would not fit.
_ATTENTION_89 = (PrefillTile(128, 32, warps=8, stages=5), PrefillTile(64, 32, warps=4, stages=5))

TILES: dict[int, Tiles] = {
    80: Tiles(
        prefill=(PrefillTile(128, 64, warps=8, stages=5), PrefillTile(64, 32, warps=4, stages=5)),
        decode=DecodeTile(64, warps=4, stages=5),
        gemm=_GEMM_80,
    ),
    89: Tiles(
        prefill=_ATTENTION_89,
        decode=DecodeTile(32, warps=4, stages=5),
        gemm=(GemmTile(128, 128, 32, warps=8, stages=3), *_GEMM_80[1:]),
        gemm_fp8=_FP8_89,
    ),
    90: Tiles(
        prefill=(PrefillTile(128, 128, warps=8, stages=3), PrefillTile(64, 64, warps=4, stages=3)),
        decode=DecodeTile(64, warps=4, stages=5),
        gemm=_GEMM_90,
        gemm_fp8=_FP8_90,
    ),
    100: Tiles(
        prefill=(PrefillTile(128, 128, warps=8, stages=3), PrefillTile(64, 64, warps=4, stages=5)),
        decode=DecodeTile(64, warps=4, stages=5),
        gemm=_GEMM_90,
        gemm_fp8=_FP8_90,
    ),
    120: Tiles(
        prefill=_ATTENTION_89,
        decode=DecodeTile(32, warps=4, stages=5),
        gemm=(GemmTile(128, 128, 32, warps=8, stages=3), *_GEMM_80[1:]),
        gemm_fp8=_FP8_89,
    ),
}

INTERPRETED = Tiles(
    prefill=(PrefillTile(32, 32, warps=4, stages=1), PrefillTile(16, 32, warps=4, stages=1)),
    decode=DecodeTile(32, warps=4, stages=1),
    gemm=(GemmTile(64, 64, 64, warps=4, stages=1), GemmTile(16, 64, 64, warps=4, stages=1)),
    gemm_fp8=(GemmTile(32, 64, 64, warps=4, stages=1),),
)
"""Small tiles for the interpreter, whose cost is the number of elements."""

SHARED_MEMORY_LIMIT_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Opt-in shared memory per thread block (CUDA C++ Programming Guide, compute capabilities)."""


def tiles_for(capability: int | None) -> Tiles:
    """The row of the newest architecture not newer than ``capability`` (90 for sm_90).

    None stands for the interpreter. Architectures older than the table take its first row.
    """
    if capability is None:
        return INTERPRETED
    known = [row for row in sorted(TILES) if row <= capability]
    return TILES[known[-1] if known else min(TILES)]
