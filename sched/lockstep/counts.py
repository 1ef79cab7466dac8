"""The KV pool with prefix caching off: a number."""

from __future__ import annotations

from passtime.sched.lockstep.pool import NO_HITS, Hits
from passtime.sched.lockstep.sequence import Sequence


class CountedPool:
    """Without caching nothing is ever found again: only the number of free blocks matters.

    Invariant: ``free`` + Σ ceil(computed / block_tokens) over the owners = the pool's size.
    """

    __slots__ = ("block_tokens", "evictable", "free")

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """All ``blocks`` are free."""
        self.block_tokens = block_tokens
        self.free = blocks
        self.evictable = 0

    def enter(self, sequence: Sequence) -> None:
        """Nothing to remember."""

    def lookup(self, sequence: Sequence) -> Hits:
        """Nothing is found."""
        return NO_HITS

    def admit(self, sequence: Sequence, hits: Hits, computed_tokens: int) -> None:
        """Take the blocks of the first chunk."""
        self.free -= -(-computed_tokens // self.block_tokens)

    def take(self, blocks: int) -> None:
        """Take free blocks."""
        self.free -= blocks

    def publish(self, sequence: Sequence, computed_tokens: int) -> None:
        """Nobody looks."""

    def release(self, sequence: Sequence, computed_tokens: int) -> None:
        """All blocks of a sequence are free again."""
        self.free += -(-computed_tokens // self.block_tokens)

    def preempt(self, sequence: Sequence, computed_tokens: int) -> None:
        """As when it ends."""
        self.free += -(-computed_tokens // self.block_tokens)
