"""The device that a profile was measured on, as it was found."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

DeviceKind: TypeAlias = Literal["cpu", "cuda"]


class DeviceFacts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device as it was found. Peaks are per device and dense; None where unknown."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    peak_flops: float | None = None
    peak_bytes_per_s: float | None = None
    processors: int | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    details: dict[str, Any] = {}
