"""Engine and launch configuration (C-1 … C-5): the reference's JSON, read strictly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from passtime.errors import ConfigError
from passtime.sched.timing import FixedTiming, PolynomialTiming, TimingModel

Backend: TypeAlias = Literal["vllm", "sglang", "trtllm"]
WorkerType: TypeAlias = Literal["aggregated", "prefill", "decode"]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]

DEFAULT_BLOCK_SIZE: dict[str, int] = {"vllm": 64, "sglang": 1, "trtllm": 32}


class PolynomialConfig(Struct, frozen=True, tag_field="type", tag="polynomial"):
    """``{"type": "polynomial"}``: the reference's default (C-45)."""


class FixedConfig(Struct, frozen=True, tag_field="type", tag="fixed"):
    """``{"type": "fixed", "prefill_ms": …, "decode_ms": …}`` (C-44)."""

    prefill_ms: float
    decode_ms: float


class ExternalConfig(Struct, frozen=True, tag_field="type", tag="external"):
    """``{"type": "external", "provider": …, "config": …}`` (C-44)."""

    provider: str
    config: Any = None


TimingModelConfig: TypeAlias = PolynomialConfig | FixedConfig | ExternalConfig


def builtin_timing(config: TimingModelConfig) -> TimingModel:
    """The live model of a built-in configuration.

    Raises ConfigError for an external one: it only names a provider (C-44).
    """
    match config:
        case PolynomialConfig():
            return PolynomialTiming()
        case FixedConfig(prefill_ms, decode_ms):
            return FixedTiming(prefill_ms=prefill_ms, decode_ms=decode_ms)
        case ExternalConfig(provider):
            raise ConfigError(
                f"timing provider '{provider}' requires a live model: "
                "build the rank by SchedulerRank.with_timing_model"
            )


class SglangConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``sglang`` block (C-2)."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    max_prefill_tokens: Count = 16384
    chunked_prefill_size: Count = 8192
    clip_max_new_tokens: Count = 4096
    schedule_conservativeness: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers beyond 64 bits; what else is wrong depends on the backend."""
        for fault in _beyond_64_bits(self):
            raise ConfigError(fault)


class TrtllmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``trtllm`` block (T-1)."""

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] = "guaranteed_no_evict"


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's configuration (C-1). Checked as a whole when built, in the order of C-3."""

    backend: Backend = "vllm"
    num_gpu_blocks: Count = 16384
    block_size: Count | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = 256
    max_num_batched_tokens: Count | None = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefill_schedule_interval: Count = 1
    prefill_decode_interval: Count = 0
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    aic_nextn: Count | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: Count = 42
    worker_type: WorkerType = "aggregated"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    emit_kv_events: bool = False
    emit_kv_token_ids: bool = False
    kv_bytes_per_token: Count | UnsetType | None = UNSET
    kv_transfer_bytes_per_token: Count | UnsetType | None = UNSET
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    timing_model: TimingModelConfig = msgspec.field(default_factory=PolynomialConfig)
    sglang: SglangConfig = msgspec.field(default_factory=SglangConfig)
    trtllm: TrtllmConfig = msgspec.field(default_factory=TrtllmConfig)

    UNLIMITED: ClassVar[int] = 2**62
    MAX_NEXTN: ClassVar[int] = 64

    def __post_init__(self) -> None:
        """Refuse what no rank can run, first failure of C-3's order first."""
        for fault in self._faults():
            raise ConfigError(fault)

    def _faults(self) -> Iterator[str]:
        yield from _beyond_64_bits(self)
        if self.num_gpu_blocks == 0:
            yield "num_gpu_blocks must be positive, found 0"
        if self.block_size == 0:
            yield "block_size must be positive, found 0"
        if self.block_size == 1 and self.backend != "sglang":
            yield "block_size must be at least two for vLLM and TensorRT-LLM, found 1"
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) == 0:
                yield f"{name} must be positive, found 0"
        yield from self._interval_faults()
        if self.max_model_len == 0:
            yield "max_model_len must be positive, found 0"
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            if not _finite_and_non_negative(getattr(self, name)):
                yield f"{name} must be finite and non-negative, found {getattr(self, name)}"
        if not math.isfinite(self.decode_ratio):
            yield f"speedup_ratio x decode_speedup_ratio must be finite, found {self.decode_ratio}"
        yield from self._mtp_faults()
        if self.backend == "sglang":
            yield from self._sglang_faults()
        if self.emit_kv_token_ids and not self.emit_kv_events:
            yield "emit_kv_token_ids requires emit_kv_events"
        if self.kv_bytes_per_token is not UNSET and self.kv_transfer_bytes_per_token is not UNSET:
            yield (
                "kv_bytes_per_token and kv_transfer_bytes_per_token are one field: give one of them"
            )
        if self.transfer_bytes_per_token == 0:
            yield "kv_transfer_bytes_per_token must be positive, found 0"
        bandwidth = self.kv_transfer_bandwidth
        if bandwidth is not None and not _finite_and_non_negative(bandwidth):
            yield f"kv_transfer_bandwidth must be finite and non-negative, found {bandwidth}"
        match self.timing_model:
            case FixedConfig(prefill_ms, decode_ms):
                if not _finite_and_non_negative(prefill_ms):
                    yield f"fixed prefill latency must be finite and non-negative: {prefill_ms}"
                if not _finite_and_non_negative(decode_ms):
                    yield f"fixed decode latency must be finite and non-negative: {decode_ms}"
            case ExternalConfig(provider) if not provider.strip():
                yield "timing_model.provider: the timing provider cannot be empty"

    def _mtp_faults(self) -> Iterator[str]:
        if self.aic_nextn is not None and not 1 <= self.aic_nextn <= self.MAX_NEXTN:
            yield f"aic_nextn must be 1 … {self.MAX_NEXTN}, found {self.aic_nextn}"
        if self.aic_nextn is None:
            if self.aic_nextn_accept_rates is not None:
                yield "aic_nextn_accept_rates requires aic_nextn"
            return
        if self.decode_speedup_ratio != 1.0:
            yield (
                "aic_nextn requires decode_speedup_ratio=1.0: speculation speeds decode up by "
                f"sampled bursts, found {self.decode_speedup_ratio}"
            )
        _ = self.acceptance_rates

    def _interval_faults(self) -> Iterator[str]:
        interval = self.prefill_schedule_interval
        if interval == 0:
            yield "prefill_schedule_interval must be positive, found 0"
        if interval != 1 and self.backend != "vllm":
            yield f"prefill_schedule_interval is supported only for backend=vllm, found {interval}"
        if self.prefill_decode_interval != 0 and self.backend != "sglang":
            yield (
                "prefill_decode_interval is supported only for backend=sglang, "
                f"found {self.prefill_decode_interval}"
            )

    def _sglang_faults(self) -> Iterator[str]:
        sglang = self.sglang
        if not self.enable_chunked_prefill:
            yield "enable_chunked_prefill=false is not supported for backend=sglang"
        if sglang.max_prefill_tokens == 0:
            yield "sglang.max_prefill_tokens must be positive, found 0"
        if sglang.chunked_prefill_size == 0:
            yield "sglang.chunked_prefill_size must be positive, found 0"
        if sglang.chunked_prefill_size % self.block_tokens:
            yield (
                f"sglang.chunked_prefill_size must be divisible by block_size {self.block_tokens}, "
                f"found {sglang.chunked_prefill_size}"
            )
        if not _finite_and_non_negative(sglang.schedule_conservativeness):
            yield (
                "sglang.schedule_conservativeness must be finite and non-negative, "
                f"found {sglang.schedule_conservativeness}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block: what is given, else the backend's default (C-1)."""
        return DEFAULT_BLOCK_SIZE[self.backend] if self.block_size is None else self.block_size

    @property
    def total_kv_tokens(self) -> int:
        """Capacity of the KV pool in tokens."""
        return self.num_gpu_blocks * self.block_tokens

    @property
    def seqs_limit(self) -> int:
        """``max_num_seqs`` with null as "no limit" (C-1a)."""
        return self.UNLIMITED if self.max_num_seqs is None else self.max_num_seqs

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens`` with null as "no limit" (C-1a)."""
        limit = self.max_num_batched_tokens
        return self.UNLIMITED if limit is None else limit

    @property
    def decode_ratio(self) -> float:
        """The divisor of decode times (V-70)."""
        return self.speedup_ratio * self.decode_speedup_ratio

    @property
    def transfer_bytes_per_token(self) -> int | None:
        """Bytes a handoff moves per prompt token, by either of its two names."""
        for value in (self.kv_transfer_bytes_per_token, self.kv_bytes_per_token):
            if isinstance(value, int):
                return value
        return None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Conditional acceptance rates, exactly ``aic_nextn`` of them (C-4)."""
        given = (self.aic_nextn_accept_rates or "").strip()
        rates = [0.85, 0.3, 0.0, 0.0, 0.0]
        if given:
            rates = []
            for index, part in enumerate(given.split(",")):
                try:
                    rate = _plain_float(part.strip())
                except ValueError:
                    raise ConfigError(
                        f"aic_nextn_accept_rates[{index}]: expected a number, found {part!r}"
                    ) from None
                if not 0.0 <= rate <= 1.0:
                    raise ConfigError(
                        f"aic_nextn_accept_rates[{index}]: expected 0 … 1, found {rate}"
                    )
                rates.append(rate)
        nextn = self.aic_nextn or 0
        return tuple((rates + [0.0] * nextn)[:nextn])


class RuntimeOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``dynamo`` block: options of the reference's live server, which no simulation reads."""

    enable_local_indexer: Any = None
    bootstrap_port: Any = None
    handoff_session_timeout_ms: Any = None
    reasoning: Any = None
    response_replay_trace_path: Any = None
    zmq_kv_events_port: Any = None
    zmq_replay_port: Any = None
    router_queue_policy: Any = None


class LaunchConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The mapping in which engine configurations travel (C-5)."""

    engine: EngineConfig
    dp_size: Size = 1
    tensor_parallel_size: Size = 1
    startup_time: float | None = None
    num_gpu_blocks_is_explicit: bool | None = None
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    free_gpu_memory_fraction: float | None = None
    cuda_graph_reserved_bytes: Count | None = None
    dynamo: RuntimeOptions | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one and fractions outside [0, 1]."""
        for fault in _beyond_64_bits(self):
            raise ConfigError(fault)
        for name in ("dp_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, found {getattr(self, name)}")
        if self.startup_time is not None and not _finite_and_non_negative(self.startup_time):
            raise ConfigError(
                f"startup_time must be finite and non-negative, found {self.startup_time}"
            )
        for name in ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} must be finite and in [0, 1], found {value}")
        chunk = self.engine.sglang.chunked_prefill_size
        if self.engine.backend == "sglang" and chunk // self.dp_size == 0:
            raise ConfigError(
                f"dp_size {self.dp_size} reduces sglang.chunked_prefill_size={chunk} to zero"
            )

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that one worker occupies (R-55)."""
        return self.tensor_parallel_size * self.dp_size


# Keys of the reference's record that name features which are not modelled: only the default, null
# or an empty block, is accepted (C-1).
_NOT_MODELLED = (
    "kv_cache_bytes_per_token",
    "kv_cache_groups",
    "kv_cache_capacity_bytes",
    "native_host_offload",
    "g3_offload",
    "state_cache",
    "prefix_match_unit",
)


def _plain_float(text: str) -> float:
    """``float`` without what only Python writes: digit groups and other scripts' digits."""
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def _beyond_64_bits(record: Struct) -> Iterator[str]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, int) and value >= 2**64:
            yield f"{name} must fit 64 bits, found one of {value.bit_length()}"


def _finite_and_non_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def launch_config(document: Mapping[str, Any], *, source: str, strict: bool = True) -> LaunchConfig:
    """Read a configuration already parsed from JSON.

    ``source`` is named in errors. With ``strict`` only the launch form is taken; without, a bare
    engine record is too (the command line's leniency, C-5). Raises ConfigError.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, found {type(document).__name__}")
    if not document:
        document = {"engine": {}}  # the reference takes "no configuration" as all defaults
    if not strict and "engine" not in document and not set(document) & _launch_keys():
        document = {"engine": document}
    document = _without_unmodelled(document, source)
    _refuse_unknown_keys(document, source)
    try:
        return msgspec.convert(document, LaunchConfig)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{source}: {_one_line(str(error))}") from None


def unknown_timing_keys(document: Mapping[str, Any]) -> list[str]:
    """Keys inside ``timing_model`` that nothing reads: tolerated, worth a warning (C-44)."""
    engine = document.get("engine", document)
    timing = engine.get("timing_model") if isinstance(engine, Mapping) else None
    if not isinstance(timing, Mapping):
        return []
    known = {
        "polynomial": {"type"},
        "fixed": {"type", "prefill_ms", "decode_ms"},
        "external": {"type", "provider", "config"},
    }.get(str(timing.get("type")), set(timing))
    return sorted(set(timing) - known)


def _launch_keys() -> set[str]:
    return set(LaunchConfig.__struct_fields__) - {"engine"}


def _without_unmodelled(document: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    engine = document.get("engine")
    if not isinstance(engine, Mapping):
        return document
    for key in _NOT_MODELLED:
        if engine.get(key) not in (None, {}):
            raise ConfigError(
                f"{source}: $.engine.{key}: this feature is not modelled, only null is accepted"
            )
    kept = {key: value for key, value in engine.items() if key not in _NOT_MODELLED}
    return {**document, "engine": kept}


def _refuse_unknown_keys(document: Mapping[str, Any], source: str) -> None:
    """Name every unknown key at once, each with the nearest known one."""
    levels: list[tuple[str, Any, type[Struct]]] = [
        ("$", document, LaunchConfig),
        ("$.dynamo", document.get("dynamo"), RuntimeOptions),
    ]
    engine = document.get("engine")
    if isinstance(engine, Mapping):
        levels.append(("$.engine", engine, EngineConfig))
        levels.append(("$.engine.sglang", engine.get("sglang"), SglangConfig))
        levels.append(("$.engine.trtllm", engine.get("trtllm"), TrtllmConfig))
    faults = []
    for place, level, struct in levels:
        if not isinstance(level, Mapping):
            continue
        for key in level:
            if key not in struct.__struct_fields__:
                hint = _hint(str(key), struct)
                faults.append(f"{source}: {place}.{_one_line(str(key))}: unknown key{hint}")
    if faults:
        raise ConfigError("\n".join(faults))


def _one_line(text: str) -> str:
    """What a document says may hold anything; a message about it is one line."""
    return text if text.isprintable() else repr(text)[1:-1]


def _hint(key: str, struct: type[Struct]) -> str:
    known = struct.__struct_fields__
    if struct is LaunchConfig and key in EngineConfig.__struct_fields__:
        return ", it belongs in the object under 'engine'"
    near = get_close_matches(key, known, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


__all__ = [
    "EngineConfig",
    "ExternalConfig",
    "FixedConfig",
    "LaunchConfig",
    "PolynomialConfig",
    "SglangConfig",
    "TrtllmConfig",
    "builtin_timing",
    "launch_config",
    "unknown_timing_keys",
]
