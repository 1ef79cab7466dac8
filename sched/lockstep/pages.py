"""The KV pool of a lock-step SGLang rank: what the rank asks of it, and the pool without reuse.

Amounts called pages are pages, all others tokens. A sequence owns ceil(computed / page) pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from passtime.sched.lockstep.steps import SteppedSequence

if TYPE_CHECKING:
    from passtime.sched.lockstep.edges import Node

Edge: TypeAlias = "tuple[Node, int]"
"""A node of the tree, and the page up to which a sequence agrees with it."""


class Match(NamedTuple):
    """A cached prefix: its tokens, and the edges that hold it."""

    tokens: int
    edges: Sequence[Edge]


NO_MATCH = Match(0, ())


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

    def match(self, sequence: SteppedSequence, end: int) -> Match:
        """The cached prefix of the first ``end`` tokens; changes nothing (S-14)."""
        ...

    def acquire(self, sequence: SteppedSequence, match: Match, end: int) -> bool:
        """Open a lease for the first ``end`` tokens, after ``match``, if there is room (S-21).

        Nothing has changed since that match.
        """
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

    def match(self, sequence: SteppedSequence, end: int) -> Match:
        """Nothing is found."""
        return NO_MATCH

    def acquire(self, sequence: SteppedSequence, match: Match, end: int) -> bool:
        """Take all pages anew."""
        return self._grow(-(-end // self.page_tokens))

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

    def release(self, sequence: SteppedSequence, tokens: int) -> None:
        """All pages are free again."""
        self.free += -(-tokens // self.page_tokens)

    def make_room(self, pages: int) -> None:
        """There is nothing to evict."""

    def take(self, pages: int, feeds: Callable[[int], int] | None = None) -> None:
        """Take free pages."""
        self.free -= pages

    def head_key(self, sequence: SteppedSequence, tokens: int) -> object:
        """Without reuse nobody asks."""
        return sequence.row
