"""What a pass computes besides decoding: prompts, their parts, and recomputations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.timing import PassShape

Chunk: TypeAlias = tuple[Sequence, int, int]
"""A sequence, its tokens computed before, and those computed in this pass (V-40.9)."""


def pass_shape(
    chunks: Iterable[Chunk], batch: int, kv_tokens: int, longest_tokens: int, total_kv_tokens: int
) -> PassShape:
    """The whole pass, given the decodes in step.

    A chunk is a prefill, a recomputation too, unless it is one produced token's decode step.
    """
    requests = new_tokens = prefix_tokens = pairs = 0
    for sequence, before, used in chunks:
        known = sequence.known_tokens
        emits = before + used == known and sequence.output_limit > 0
        if emits and used == 1 and before >= sequence.prompt_tokens:
            batch += 1
            kv_tokens += known
            longest_tokens = max(longest_tokens, known)
        elif used:
            requests += 1
            new_tokens += used
            prefix_tokens += before
            pairs += used * before + used * (used + 1) // 2
    return PassShape(
        prefill_requests=requests,
        prefill_new_tokens=new_tokens,
        prefill_prefix_tokens=prefix_tokens,
        prefill_pairs=pairs,
        decode_requests=batch,
        decode_kv_tokens=kv_tokens,
        decode_kv_max=longest_tokens,
        total_kv_tokens=total_kv_tokens,
    )
