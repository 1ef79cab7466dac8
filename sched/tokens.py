"""Token values and their hashes (V-56, V-66).

Inside a rank any injective identity gives the same times; these exact values are what KV events
and outputs show.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from uuid import UUID

from xxhash import xxh3_64_intdigest

_HASH_SEED = 1337


def output_token_id(request_id: UUID, index: int) -> int:
    """Token of a request's output ``index`` (from 0) where no planned id is given (V-66)."""
    return xxh3_64_intdigest(request_id.bytes + index.to_bytes(8, "little")) & 0xFFFFFFFF


def local_block_hash(tokens: Sequence[int]) -> int:
    """Hash of a block by its own tokens (uint32 each), whatever comes before it (V-56)."""
    return xxh3_64_intdigest(struct.pack(f"<{len(tokens)}I", *tokens), seed=_HASH_SEED)


def sequence_hash(parent: int | None, local_hash: int) -> int:
    """Hash of a block with its history; ``parent`` is None for a block that starts one (V-56)."""
    if parent is None:
        return local_hash
    return xxh3_64_intdigest(struct.pack("<QQ", parent, local_hash), seed=_HASH_SEED)
