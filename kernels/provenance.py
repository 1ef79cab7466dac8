"""Which kernels these are: one hash over everything that decides what a launch does."""

from __future__ import annotations

import hashlib
from pathlib import Path


def kernel_hash() -> str:
    """``sha256:…`` over the sources of this package, tile table included, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256:{digest.hexdigest()}"
