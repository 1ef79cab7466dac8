"""How many KV blocks a device holds: its memory, less weights, activations and a reserve."""

from __future__ import annotations

from dataclasses import dataclass

from passtime.errors import InputError
from passtime.profiles.shapes import BYTES, ModelShape

GIB = 2**30
RESERVE_BYTES = 7 * GIB // 10  # driver context, libraries, captured graphs
_LOGIT_COPIES = 2  # float32 logits and their softmax
_HIDDEN_COPIES = 4  # residual stream, normed input, attention output, projection


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySum:
    """The sum behind ``num_gpu_blocks``, in bytes of one rank's device."""

    device_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    block_size: int

    @property
    def usable_bytes(self) -> int:
        """What the engine may take of the device."""
        return int(self.device_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values."""
        taken = self.weight_bytes + self.activation_bytes + self.reserve_bytes
        return max(0, self.usable_bytes - taken)

    @property
    def num_gpu_blocks(self) -> int:
        """Whole blocks that fit."""
        return self.kv_bytes // (self.kv_bytes_per_token * self.block_size)


def memory_sum(
    model: ModelShape,
    *,
    device_bytes: int,
    utilization: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    reserve_bytes: int = RESERVE_BYTES,
) -> MemorySum:
    """The memory of one rank. InputError for a number out of range, or, with the sum, if no
    single block fits.
    """
    if not 0.0 < utilization <= 1.0:
        raise InputError(f"gpu_memory_utilization: expected 0 < x <= 1, found {utilization}")
    if block_size < 1:
        raise InputError(f"block_size: expected tokens >= 1, found {block_size}")
    found = MemorySum(
        device_bytes=device_bytes,
        utilization=utilization,
        weight_bytes=model.weight_bytes,
        activation_bytes=activation_bytes(model, max_num_batched_tokens, max_num_seqs),
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        block_size=block_size,
    )
    if found.num_gpu_blocks < 1:
        raise InputError(
            f"no KV block fits: {utilization:g} × {device_bytes / GIB:.2f} GiB of memory, less "
            f"{found.weight_bytes / GIB:.2f} GiB of weights, "
            f"{found.activation_bytes / GIB:.2f} GiB of activations and "
            f"{reserve_bytes / GIB:.2f} GiB in reserve"
        )
    return found


def activation_bytes(model: ModelShape, tokens: int, requests: int) -> int:
    """Largest activations of a pass: one layer's, and the logits of every request."""
    moe = model.moe
    ffn = model.ffn_size if moe is None else moe.experts_per_token * moe.expert_ffn_size
    per_token = _HIDDEN_COPIES * model.hidden_size + 3 * ffn + model.query_size + 2 * model.kv_size
    logits = _LOGIT_COPIES * BYTES["float32"] * min(requests, tokens) * model.vocab_size
    return tokens * per_token * BYTES[model.dtype] + logits
