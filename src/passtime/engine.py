"""From a profile to an engine configuration: the device decides how many KV blocks there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from passtime.errors import InputError
from passtime.memory import MemorySum, memory_sum
from passtime.profiles.document import Profile
from passtime.profiles.shapes import ModelShape
from passtime.sched.config import DEFAULT_BLOCK_SIZE, launch_config

_SIZES = (
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "tensor_parallel",
    "moe",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWish:
    """What the engine should be like; None leaves a field to the backend's default."""

    backend: str = "vllm"
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    composition: str = "calls"
    reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A launch-form configuration, and the sum behind its number of blocks."""

    document: dict[str, Any]
    memory: MemorySum

    def to_json(self) -> bytes:
        """The configuration as a file."""
        return msgspec.json.format(msgspec.json.encode(self.document), indent=2) + b"\n"


def engine_for(
    profile: Profile, named: str, wish: EngineWish, *, model: ModelShape | None = None
) -> Engine:
    """The engine that a profile's device can hold; ``named`` is how the configuration names it.

    ``model``: the model to be served; InputError if the profile was measured with another shape.
    """
    if model is not None:
        refuse_other_model(profile, model, named)
    default = DEFAULT_BLOCK_SIZE[wish.backend]
    block_size = default if wish.block_size is None else wish.block_size
    reserve = {} if wish.reserve_bytes is None else {"reserve_bytes": wish.reserve_bytes}
    memory = memory_sum(
        model or profile.model,
        device_bytes=profile.device.memory_bytes,
        utilization=wish.gpu_memory_utilization,
        block_size=block_size,
        max_num_batched_tokens=wish.max_num_batched_tokens,
        max_num_seqs=wish.max_num_seqs,
        **reserve,
    )
    engine: dict[str, Any] = {
        "backend": wish.backend,
        "num_gpu_blocks": memory.num_gpu_blocks,
        "block_size": block_size,
        "max_num_seqs": wish.max_num_seqs,
        "max_num_batched_tokens": wish.max_num_batched_tokens,
        "timing_model": {
            "type": "external",
            "provider": "passtime",
            "config": {"profile": named, "composition": wish.composition},
        },
    }
    if wish.max_model_len is not None:
        engine["max_model_len"] = wish.max_model_len
    document: dict[str, Any] = {
        "engine": engine,
        "tensor_parallel_size": profile.parallelism.tensor_parallel,
    }
    if wish.backend == "vllm":
        document["gpu_memory_utilization"] = wish.gpu_memory_utilization
    launch_config(document, source="engine")
    return Engine(document=document, memory=memory)


def refuse_other_model(profile: Profile, model: ModelShape, named: str) -> None:
    """InputError naming every size in which ``model`` differs from what was measured."""
    timed = profile.model
    if model.tensor_parallel == 1 and timed.tensor_parallel > 1:
        model = model.with_tensor_parallel(timed.tensor_parallel)
    differing = [
        f"{name} {getattr(model, name)} (measured: {getattr(timed, name)})"
        for name in _SIZES
        if getattr(model, name) != getattr(timed, name)
    ]
    if differing:
        raise InputError(
            f"profile {named} was measured with model {timed.name}, not {model.name}: "
            + ", ".join(differing)
        )


def memory_document(engine: Engine) -> str:
    """The sum behind the blocks, and the configuration, as JSON."""
    memory = engine.memory
    document = {
        "memory": {
            "device_bytes": memory.device_bytes,
            "utilization": memory.utilization,
            "usable_bytes": memory.usable_bytes,
            "weight_bytes": memory.weight_bytes,
            "activation_bytes": memory.activation_bytes,
            "reserve_bytes": memory.reserve_bytes,
            "kv_bytes": memory.kv_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "block_size": memory.block_size,
            "num_gpu_blocks": memory.num_gpu_blocks,
        },
        "launch": engine.document,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def profile_name(text: str) -> str:
    """How a configuration names a profile: a shipped name as it is, a file by its path."""
    return text if not Path(text).suffix else Path(text).as_posix()
