"""The KV pool of a lock-step SGLang rank: what the rank asks of it, and the pool without reuse.

Amounts called pages are pages, all others tokens. A sequence owns ceil(computed / page) pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from passtime.sched.lockstep.steps import SteppedSequence


class PagePool(Protocol):
    """``free`` + ``evictable`` pages can be taken; everything else is owned or locked."""

    free: int
    evictable: int
    evicted_pages: int  # how many ever were

    def at(self, pass_number: int, *, step_is_over: bool = False) -> None:
        """What follows happens in that pass: before, or after, the tokens of its step."""
        ...

    def enter(self, sequence: SteppedSequence) -> None:
        """A request arrived."""
        ...

    def peek(self, sequence: SteppedSequence, end: int) -> int:
        """Cached prefix of the first ``end`` tokens, in tokens; changes nothing (S-14)."""
        ...

    def acquire(self, sequence: SteppedSequence, *, end: int, prefix: int) -> int | None:
        """Open a lease for the first ``end`` tokens: the matched prefix, or None (S-21)."""
        ...

    def extend(self, sequence: SteppedSequence, *, end: int) -> bool:
        """Grow a lease to ``end`` tokens, if there is room (S-23)."""
        ...

    def publish(self, sequence: SteppedSequence, tokens: int, *, order: int | None = None) -> None:
        """Make the whole pages of the first ``tokens`` findable (S-22).

        With ``order``: in the middle of a step, when members before that order had their token.
        """
        ...

    def finish(self, sequence: SteppedSequence, tokens: int) -> None:
        """Leave the whole pages of ``tokens`` to the tree, free the rest (S-24)."""
        ...

    def release(self, sequence: SteppedSequence, tokens: int) -> None:
        """Give everything unpublished of ``tokens`` up (S-25)."""
        ...

    def make_room(self, pages: int) -> None:
        """Evict, as far as possible, until so many pages are free."""
        ...

    def take(self, pages: int, feeds: Callable[[int], int] | None = None) -> None:
        """Take pages, free ones first; there is room.

        ``feeds(n)`` tells how many of the coming steps n pages can feed, where several are made.
        """
        ...

    def head_key(self, sequence: SteppedSequence, tokens: int) -> object:
        """Equal for sequences whose first ``tokens`` tokens are equal."""
        ...


class CountedPages:
    """Without reuse nothing is ever found again: only the number of free pages matters (S-20)."""

    __slots__ = ("evictable", "evicted_pages", "free", "page_tokens")

    def __init__(self, pages: int, page_tokens: int) -> None:
        """All ``pages`` are free."""
        self.page_tokens = page_tokens
        self.free = pages
        self.evictable = 0
        self.evicted_pages = 0

    def at(self, pass_number: int, *, step_is_over: bool = False) -> None:
        """Nothing depends on it."""

    def enter(self, sequence: SteppedSequence) -> None:
        """Nothing to remember."""

    def peek(self, sequence: SteppedSequence, end: int) -> int:
        """Nothing is found."""
        return 0

    def acquire(self, sequence: SteppedSequence, *, end: int, prefix: int) -> int | None:
        """Take all pages anew."""
        return 0 if self._grow(-(-end // self.page_tokens)) else None

    def extend(self, sequence: SteppedSequence, *, end: int) -> bool:
        """Take the pages that are missing."""
        size = self.page_tokens
        return self._grow(-(-end // size) - -(-sequence.computed_tokens // size))

    def _grow(self, pages: int) -> bool:
        if pages > self.free:
            return False
        self.free -= pages
        return True

    def publish(self, sequence: SteppedSequence, tokens: int, *, order: int | None = None) -> None:
        """Nobody looks."""

    def finish(self, sequence: SteppedSequence, tokens: int) -> None:
        """All pages are free again."""
        self.free += -(-tokens // self.page_tokens)

    release = finish

    def make_room(self, pages: int) -> None:
        """There is nothing to evict."""

    def take(self, pages: int, feeds: Callable[[int], int] | None = None) -> None:
        """Take free pages."""
        self.free -= pages

    def head_key(self, sequence: SteppedSequence, tokens: int) -> object:
        """Without reuse nobody asks."""
        return sequence.row
