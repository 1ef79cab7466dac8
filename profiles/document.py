"""The timing-profile document, schema 1: what was measured, the law fitted to it, its errors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from passtime.errors import DocumentError
from passtime.profiles.device import DeviceFacts, DeviceKind
from passtime.profiles.reading import decode_json, read_bytes, write_atomically
from passtime.profiles.shapes import ModelShape

SCHEMA = 1

ModelClass: TypeAlias = Literal["step", "affine", "roofline"]
Regime: TypeAlias = Literal["prefill", "decode", "mixed"]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(gt=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]


class Parallelism(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the timed model was split; required, for a profile of TP 2 is not one of TP 1."""

    tensor_parallel: Size
    pipeline_parallel: Size


class Provenance(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the numbers come from. ``timed`` names the kernels or the engine that ran."""

    made_by: str
    timed: str
    measured_at: str | None = None
    log_sha256: str | None = None
    kernel_hash: str | None = None
    software: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    notes: tuple[str, ...] = ()


class EngineFacts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of the timed engine decides times: CUDA-graph sizes (decode batches are padded up to
    them), launch overhead in ms, and whether attention computes the causal half or the rectangle.
    """

    attention: Literal["causal", "rectangle"] = "causal"
    graph_sizes: tuple[Size, ...] = ()
    launch_overhead_ms: NonNegative | None = None


class MeasuredPoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measured pass: sums over its requests in tokens, the median time, and its spread."""

    regime: Regime
    prefill_requests: Count = 0
    prefill_new_tokens: Count = 0
    prefill_prefix_tokens: Count = 0
    prefill_pairs: Count = 0
    decode_requests: Count = 0
    decode_kv_tokens: Count = 0
    decode_kv_max: Count = 0
    latency_ms: Positive
    spread_percent: NonNegative | None = None
    held_out: bool = False


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The law's coefficients; what each means is said in :mod:`passtime.profiles.law`."""

    launch_ms: NonNegative
    token_ms: NonNegative
    pair_ms: NonNegative
    prefill_request_ms: NonNegative
    decode_request_ms: NonNegative
    decode_kv_ms: NonNegative
    mixed_ms: NonNegative


class Box(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured range of one axis."""

    low: NonNegative
    high: NonNegative


class Accuracy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Errors of predictions against measurements, relative, in percent."""

    points: Count
    mape_percent: NonNegative
    p90_percent: NonNegative
    max_percent: NonNegative
    bias_percent: float


class Errors(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In-sample, pooled held-out (5 folds), and per axis beyond the trained range."""

    in_sample: Accuracy
    held_out: Accuracy | None = None
    planned: Accuracy | None = None
    extrapolation: dict[str, Accuracy] = {}
    noise_floor_percent: NonNegative | None = None
    worst_regime: Regime | None = None


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device, a model, and how long passes take: everything a timing model needs, as JSON."""

    schema: int
    name: str
    device_kind: DeviceKind
    device: DeviceFacts
    model: ModelShape
    parallelism: Parallelism
    provenance: Provenance
    engine: EngineFacts
    model_class: ModelClass
    coefficients: Coefficients
    box: dict[Regime, dict[str, Box]]
    errors: Errors
    points: tuple[MeasuredPoint, ...]


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or a profile file. DocumentError names fault and place."""
    if (name := str(name_or_path)) in shipped_profiles():
        return read_profile((files("passtime.profiles") / f"{name}.json").read_bytes(), source=name)
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        raise DocumentError(
            f"profile {name!r}: no shipped profile of that name and no such file; "
            f"shipped: {', '.join(shipped_profiles()) or 'none'}"
        )
    return read_profile(read_bytes(path), source=str(path))


def read_profile(data: bytes, *, source: str) -> Profile:
    """The profile in ``data``; a newer schema and every fault are named."""
    try:
        schema = json.loads(data).get("schema")
    except (ValueError, AttributeError):
        schema = None
    if isinstance(schema, int) and schema > SCHEMA:
        raise DocumentError(
            f"{source}: $.schema: expected {SCHEMA}, found {schema}: written by a newer passtime"
        )
    profile = decode_json(data, Profile, source=source)
    if profile.schema != SCHEMA:
        raise DocumentError(f"{source}: $.schema: expected {SCHEMA}, found {profile.schema}")
    return profile


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the document in one step (readers see the old file or the new one)."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    write_atomically(Path(path), text + b"\n")


def shipped_profiles() -> list[str]:
    """Names that :func:`load_profile` knows without a file."""
    folder = files("passtime.profiles")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))
