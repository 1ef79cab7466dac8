"""The measurement log: JSON lines, append-only, one header and then one line per visit."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from passtime.profiles.shapes import ModelShape

Regime: TypeAlias = Literal["prefill", "prefix", "decode", "mixed"]
StopReason: TypeAlias = Literal[
    "converged", "max_samples", "max_time", "throttled", "failed", "oom"
]

SCHEMA = 1


class DeviceFacts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device as it was found. Peaks are per device and dense; None where unknown."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    peak_flops: float | None = None
    peak_bytes_per_s: float | None = None
    processors: int | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    details: dict[str, Any] = {}


class Batch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one pass computes: tokens per request.

    ``prefill``: (new tokens, prefix tokens) per prompt chunk. ``decode``: KV length per decoding
    request, before its new token.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()


class Point(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A batch to measure; ``held_out`` points are never fitted."""

    id: int
    regime: Regime
    batch: Batch
    held_out: bool = False


class Header(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="header"
):
    """First line: everything that was decided before the first sample."""

    schema: int
    device: DeviceFacts
    model: ModelShape
    software: dict[str, Any]
    policy: dict[str, Any]
    plan: tuple[Point, ...]
    seed: int
    started_at: str
    kernel_hash: str | None = None


class Visit(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="visit"
):
    """One visit of a point: every raw sample, in ms per pass, and its circumstances."""

    point: int
    round: int
    samples_ms: tuple[float, ...]
    stop: StopReason
    flags: tuple[str, ...] = ()
    clocks: dict[str, Any] = {}
    error: str | None = None
    started_at: str | None = None


class Note(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="note"
):
    """Anything measured beside the points: reference passes, drift, launch overhead."""

    topic: str
    values: dict[str, Any]


Line: TypeAlias = Header | Visit | Note
