"""What the lock-step core needs of a KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from passtime.sched.lockstep.sequence import Sequence

if TYPE_CHECKING:
    from passtime.sched.lockstep.runs import Run


class Hits(NamedTuple):
    """What a lookup found of a sequence, in blocks.

    ``blocks``         leading blocks that it may start from, reduced by V-51.
    ``active_blocks``  those of them that somebody references: they need no room.
    ``depth``, ``run`` how many blocks of its prompt are resident, and the run where they end.
    """

    blocks: int
    active_blocks: int
    depth: int
    run: Run | None


NO_HITS = Hits(0, 0, 0, None)


class Pool(Protocol):
    """``free`` + ``evictable`` blocks can be taken; the rest is referenced.

    A sequence owns ceil(computed / block_tokens) blocks: allocation follows computation (V-41).
    """

    free: int
    evictable: int

    def enter(self, sequence: Sequence) -> None:
        """A request arrived."""
        ...

    def lookup(self, sequence: Sequence) -> Hits:
        """Blocks of a waiting sequence that are resident (V-50, V-51); changes nothing."""
        ...

    def admit(self, sequence: Sequence, hits: Hits, computed_tokens: int) -> None:
        """Hold ``hits``, just looked up; take and publish what the first chunk computes."""
        ...

    def take(self, blocks: int) -> None:
        """Take blocks, free ones first, then the least recently used; there is room (V-53)."""
        ...

    def publish(self, sequence: Sequence, computed_tokens: int) -> None:
        """The whole prompt blocks up to ``computed_tokens`` can be found from now on (V-54)."""
        ...

    def release(self, sequence: Sequence, computed_tokens: int) -> None:
        """A sequence ended: its blocks go back, deepest first (V-55)."""
        ...

    def preempt(self, sequence: Sequence, computed_tokens: int) -> None:
        """As ``release``, but the sequence will look for its produced blocks again (V-44)."""
        ...
