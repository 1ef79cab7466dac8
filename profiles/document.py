"""The timing-profile document, schema 2: what was measured, the law fitted to it, its errors."""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from passtime.errors import DocumentError
from passtime.profiles.device import DeviceFacts, DeviceKind
from passtime.profiles.reading import decode_json, read_bytes, write_atomically
from passtime.profiles.shapes import ModelShape

SCHEMA = 2  # 1 had tables over mean contexts

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_NUMBER_LIST = re.compile(
    rf'^( *)(?:"\w+": )?\[\s*({_NUMBER}(?:,\s+{_NUMBER})*)\s*\]', re.MULTILINE
)

ModelClass: TypeAlias = Literal["step", "affine", "roofline"]
Regime: TypeAlias = Literal["prefill", "decode", "mixed"]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(gt=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Log: TypeAlias = Annotated[float, Meta(ge=-3, le=3)]
AxisName: TypeAlias = Literal[
    "prompts", "new_tokens", "prompt_context", "decodes", "decode_context"
]

TimedPart: TypeAlias = Literal["pass", "attention"]
TableAxis: TypeAlias = Literal[
    "prefill_requests",
    "prefill_new_tokens",
    "prefill_pairs",
    "prompt_context",
    "decode_requests",
    "decode_kv_tokens",
    "decode_context",
]

# The axes of a box. ``new_tokens`` is the sum over the prompts;
# ``prompt_context`` is pairs / new tokens: how many tokens a new token attends to on average;
# ``decode_context`` is KV tokens / decodes.
REGIME_AXES: dict[Regime, tuple[AxisName, ...]] = {
    "prefill": ("prompts", "new_tokens", "prompt_context"),
    "decode": ("decodes", "decode_context"),
    "mixed": ("new_tokens", "prompt_context", "decodes", "decode_context"),
}

# The axes of a residual table. Of passes: sums, for whatever joins a pass or grows in it raises
# sums, where a mean would fall when a short request joins. Of attention alone: means as in the
# box, for the same KV split among more requests is often read faster.
TABLE_AXES: dict[TimedPart, dict[Regime, tuple[TableAxis, ...]]] = {
    "pass": {
        "prefill": ("prefill_requests", "prefill_new_tokens", "prefill_pairs"),
        "decode": ("decode_requests", "decode_kv_tokens"),
        "mixed": ("prefill_new_tokens", "prefill_pairs", "decode_requests", "decode_kv_tokens"),
    },
    "attention": {
        "prefill": ("prefill_requests", "prefill_new_tokens", "prompt_context"),
        "decode": ("decode_requests", "decode_context"),
        "mixed": ("prefill_new_tokens", "prompt_context", "decode_requests", "decode_context"),
    },
}


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
    """What of the timed engine decides times.

    ``timed_part``          a whole pass, or its attention alone (operator tables).
    ``attention``           whether attention computes the causal half or the whole rectangle.
    ``graph_sizes``         CUDA-graph sizes: a decode batch is padded up to the next of them.
    ``tile_tokens``         tokens per tile of the linear kernels, where they pad visibly.
    ``launch_overhead_ms``  host time of an empty pass, where it was measured apart.
    """

    timed_part: TimedPart = "pass"
    attention: Literal["causal", "rectangle"] = "causal"
    graph_sizes: tuple[Size, ...] = ()
    tile_tokens: Size | None = None
    launch_overhead_ms: NonNegative | None = None


class MeasuredPoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measured pass: sums over its requests in tokens, the median time, and its spread.

    ``prefill_pairs`` is Σ new·prefix + new·(new+1)/2, whatever the kernels computed.
    ``spread_percent`` is the samples' robust relative deviation (1.48 MAD over the median).
    """

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
    samples: Size = 1
    held_out: bool = False


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The law's coefficients, each with its physical meaning (:mod:`passtime.profiles.law`).

    ``launch_ms``                 of any pass: host and launches
    ``linear_flops_per_s``        rate of the linear layers
    ``weight_bytes_per_s``        rate at which weights stream
    ``linear_overlap``            visible share of the shorter of the two: 0 hidden, 1 added
    ``token_ms``                  norms, rotary embedding, activations, per token
    ``tile_share``                share of the linear work that is padded to whole tiles
    ``attention_flops_per_s``     rate of prefill attention
    ``prefill_kv_bytes_per_s``    rate at which prefill attention reads keys and values
    ``attention_overlap``         as linear_overlap, of prefill attention
    ``decode_kv_bytes_per_s``     rate at which decode attention reads keys and values
    ``decode_skew``               how far unequal decodes cost as if all were as long as the longest
    ``decode_ramp_ms``            latency that decode attention cannot hide, reached as KV grows
    ``decode_ramp_tokens``        KV tokens at which half of the ramp is reached
    ``prefill_request_ms``        per prompt of the pass
    ``decode_request_ms``         per decoding request
    ``row_ms_per_token``          the longest row of a pass with prompts, walked by one thread block
    ``row_overlap``               as linear_overlap, of that row and all other attention
    ``mixed_ms``                  of any pass with prompts and decodes, and in such a pass:
    ``mixed_request_ms``          per decoding request
    ``mixed_kv_ms``               per KV token
    ``mixed_request_kv_ms``       per decoding request and KV token
    """

    launch_ms: Positive
    linear_flops_per_s: Positive
    weight_bytes_per_s: Positive
    linear_overlap: Share
    token_ms: NonNegative
    tile_share: Share
    attention_flops_per_s: Positive
    prefill_kv_bytes_per_s: Positive
    attention_overlap: Share
    decode_kv_bytes_per_s: Positive
    decode_skew: Share = 0.0
    decode_ramp_ms: NonNegative
    decode_ramp_tokens: Positive
    prefill_request_ms: NonNegative
    decode_request_ms: NonNegative
    row_ms_per_token: NonNegative
    row_overlap: Share
    mixed_ms: NonNegative
    mixed_request_ms: NonNegative
    mixed_kv_ms: NonNegative
    mixed_request_kv_ms: NonNegative


class Axis(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One axis of a residual table: ascending nodes, from the box's smallest to its largest sum."""

    name: TableAxis
    nodes: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        """Nodes ascend strictly."""
        if not self.nodes or any(a >= b for a, b in itertools.pairwise(self.nodes)):
            raise DocumentError(f"axis {self.name}: expected nodes that ascend strictly")


class Residual(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The smooth residual of one regime: ln(measured / law) on a tensor grid, last axis fastest.

    ``log_spread`` is the uncertainty there that intervals go by, in the same units. Between nodes
    the factor is interpolated linearly; outside the grid it is held at the edge.
    """

    axes: tuple[Axis, ...]
    log_factor: tuple[Log, ...]
    log_spread: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        """One value per node of the grid."""
        nodes = math.prod(len(axis.nodes) for axis in self.axes)
        for name in ("log_factor", "log_spread"):
            if len(getattr(self, name)) != nodes:
                found = len(getattr(self, name))
                raise DocumentError(f"{name}: expected {nodes} values, found {found}")


class Range(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured range of one axis, in its tokens or requests."""

    low: NonNegative
    high: NonNegative


class Accuracy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Errors of predictions against measurements, relative, in percent."""

    points: Size
    mape_percent: NonNegative
    p90_percent: NonNegative
    max_percent: NonNegative
    bias_percent: float


class Errors(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How wrong the profile is.

    ``held_out`` pools five folds, each predicted by a fit that never saw it; ``planned`` are the
    points that the plan withheld; ``extrapolation`` names an axis and scores points beyond the
    half of its range that a fit was given. None: too few points to say.
    """

    in_sample: Accuracy
    held_out: Accuracy | None = None
    planned: Accuracy | None = None
    by_regime: dict[Regime, Accuracy] = {}
    worst_regime: Regime | None = None
    extrapolation: dict[str, Accuracy] = {}
    noise_floor_percent: NonNegative | None = None


class Intervals(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conformal intervals: a prediction times exp(± width · spread).

    ``width`` is the quantile of |ln(measured / predicted)| / spread over held-out points, per
    regime; beyond the box the width is multiplied by ``beyond``, from the extrapolation errors.
    """

    level_percent: Annotated[float, Meta(gt=0, lt=100)]
    width: dict[Regime, Positive]
    floor: NonNegative
    beyond: Annotated[float, Meta(ge=1)]


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
    box: dict[Regime, dict[AxisName, Range]]
    residual: dict[Regime, Residual] = {}
    errors: Errors
    intervals: Intervals | None = None
    points: tuple[MeasuredPoint, ...]

    def __post_init__(self) -> None:
        """The parts must agree with one another."""
        if self.device_kind != self.device.kind:
            raise DocumentError(f"device_kind: expected {self.device.kind!r} as in $.device.kind")
        if self.parallelism.tensor_parallel != self.model.tensor_parallel:
            raise DocumentError(
                f"parallelism.tensor_parallel: expected {self.model.tensor_parallel} as in "
                f"$.model.tensor_parallel, found {self.parallelism.tensor_parallel}"
            )
        for regime, residual in self.residual.items():
            wanted = TABLE_AXES[self.engine.timed_part][regime]
            found = tuple(axis.name for axis in residual.axes)
            if found != wanted:
                raise DocumentError(f"residual.{regime}: expected axes {wanted}, found {found}")


def is_profile(name_or_path: str | Path) -> bool:
    """Whether it names a shipped profile, or a file that means to be one."""
    if str(name_or_path) in shipped_profiles():
        return True
    try:
        document = json.loads(Path(name_or_path).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "coefficients" in document


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
    """The profile in ``data``; another schema and every fault are named."""
    try:
        schema = json.loads(data).get("schema")
    except (ValueError, AttributeError):
        schema = None
    if isinstance(schema, int) and schema != SCHEMA:
        written = "a newer passtime" if schema > SCHEMA else "an older passtime: fit its log anew"
        raise DocumentError(
            f"{source}: $.schema: expected {SCHEMA}, found {schema}: written by {written}"
        )
    return decode_json(data, Profile, source=source)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the document in one step (readers see the old file or the new one)."""
    write_atomically(Path(path), profile_text(profile).encode())


def profile_text(profile: Profile) -> str:
    """The document as text: indented, lists of numbers in filled lines."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2).decode()
    return _NUMBER_LIST.sub(_filled, text) + "\n"


def _filled(numbers: re.Match[str]) -> str:
    indent = numbers[1]
    inner = textwrap.fill(
        " ".join(numbers[2].split()),
        width=100,
        initial_indent=indent + "  ",
        subsequent_indent=indent + "  ",
    )
    one_line = f"{indent}{numbers[0][len(indent) : numbers[0].index('[')]}[{inner.strip()}]"
    if len(one_line) <= 100 and "\n" not in inner:
        return one_line
    return f"{numbers[0][: numbers[0].index('[')]}[\n{inner}\n{indent}]"


def shipped_profiles() -> list[str]:
    """Names that :func:`load_profile` knows without a file."""
    folder = files("passtime.profiles")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))
