"""What a request owns of the KV pool, and how it gets, shares and returns it (S-10, S-20 … S-27).

All amounts are tokens unless they are named pages. Only whole pages change hands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passtime.sched.contract import KvEvent
from passtime.sched.sglang.events import KvEventRecorder
from passtime.sched.sglang.radix import Node, RadixTree


@dataclass(slots=True, eq=False)
class Lease:
    """KV of one request (S-6): pages in order, shared prefix pages included.

    ``materialized`` leading tokens have KV; ``cached`` of them live in the tree, where their path
    ends at ``node``, on which the lease holds one lock. Without a node the lease is inactive.
    """

    pages: list[int] = field(default_factory=list)
    materialized: int = 0
    cached: int = 0
    node: Node | None = None


class KvCache:
    """The page pool of a rank together with the radix tree over it."""

    def __init__(
        self, *, pages: int, page_tokens: int, reuse: bool, recorder: KvEventRecorder | None
    ) -> None:
        """A pool of ``pages`` free pages; ``reuse`` off means that nothing is ever found (S-20)."""
        self.page_tokens = page_tokens
        self.reuse = reuse
        self.total_pages = pages
        self._free = list(range(pages))
        self._tree = RadixTree(page_tokens=page_tokens)
        self._recorder = recorder

    @property
    def available(self) -> int:
        """Tokens of pages that neither a lease nor the tree holds (S-10)."""
        return self.page_tokens * len(self._free)

    @property
    def attainable(self) -> int:
        """Tokens available now or by eviction."""
        return self.available + self._tree.evictable_tokens

    @property
    def occupied_pages(self) -> int:
        """Pages not free, idle cached ones included (S-56)."""
        return self.total_pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_tokens)

    def ceil(self, tokens: int) -> int:
        """``tokens`` rounded up to whole pages."""
        return self.pages_for(tokens) * self.page_tokens

    def floor(self, tokens: int) -> int:
        """``tokens`` rounded down to whole pages."""
        return tokens - tokens % self.page_tokens

    def owned(self, lease: Lease) -> int:
        """Tokens that the pages of ``lease`` can hold."""
        return len(lease.pages) * self.page_tokens

    def peek(self, tokens: list[int], end: int) -> int:
        """Cached prefix of the first ``end`` tokens, read only (S-14, S-20)."""
        return self._tree.peek(tokens, self.floor(end)) if self.reuse else 0

    # --- A lease's life -------------------------------------------------------------------------

    def acquire(self, lease: Lease, tokens: list[int], *, end: int, prefix: int) -> int | None:
        """Open ``lease`` for the first ``end`` tokens, matching at most ``prefix`` (S-21).

        Returns the matched prefix; None, with the lease still inactive, if the pool is short.
        """
        hit = self._lock_prefix(lease, tokens, prefix)
        if not self._take_pages(lease, self.pages_for(end) - hit // self.page_tokens):
            self._abandon(lease)
            return None
        lease.materialized = end
        self._announce(lease, tokens, hit, end)
        return hit

    def reserve(self, lease: Lease, tokens: list[int]) -> int | None:
        """Open ``lease`` for a prompt whose KV is to come: pages, nothing materialised (S-58).

        Returns the tokens of the fresh pages; None if the pool is short.
        """
        hit = self._lock_prefix(lease, tokens, self.floor(len(tokens)))
        fresh = self.pages_for(len(tokens)) - hit // self.page_tokens
        if not self._take_pages(lease, fresh):
            self._abandon(lease)
            return None
        return fresh * self.page_tokens

    def extend(self, lease: Lease, tokens: list[int], *, end: int) -> bool:
        """Grow an active lease to its first ``end`` tokens; False if the pool is short (S-23)."""
        before = lease.materialized
        if not self._take_pages(lease, max(0, self.pages_for(end) - len(lease.pages))):
            return False
        lease.materialized = end
        self._announce(lease, tokens, before, end)
        return True

    def publish(self, lease: Lease, tokens: list[int]) -> bool:
        """Make the lease's complete pages findable while it stays active (S-22).

        Where the tree has the same content already, its page replaces the lease's own. Returns
        whether that freed pages.
        """
        end = self.floor(lease.materialized)
        if not self.reuse or end <= lease.cached:
            return False
        node = self._active_node(lease)
        new_node, duplicates = self._insert(lease, node, tokens, end)
        if new_node is not node:
            self._tree.lock(new_node)
            self._tree.unlock(node)
        self._give_back(duplicates)
        lease.node, lease.cached = new_node, end
        return bool(duplicates)

    def finish(self, lease: Lease, tokens: list[int]) -> None:
        """Leave the complete pages in the tree, return everything else (S-24)."""
        node = self._active_node(lease)
        end = self.floor(min(len(tokens), lease.materialized)) if self.reuse else 0
        self._give_back(lease.pages[end // self.page_tokens :])
        if end:
            _, duplicates = self._insert(lease, node, tokens, end)
            self._give_back(duplicates)
        self._tree.unlock(node)
        self._close(lease)

    def release(self, lease: Lease) -> bool:
        """Give everything up that is not published (S-25); return whether capacity improved."""
        if lease.node is None:
            return False
        unpublished = lease.pages[lease.cached // self.page_tokens :]
        improved = bool(unpublished) or lease.node is not self._tree.root
        self._give_back(unpublished)
        self._abandon(lease)
        return improved

    # --- Decode slots ---------------------------------------------------------------------------

    def make_room(self, tokens: int) -> None:
        """Evict, as far as possible, until ``tokens`` are available."""
        if tokens > self.available:
            self._give_back(self._tree.evict(tokens - self.available))

    def reserve_slots(self, tokens: int) -> list[int] | None:
        """Take the pages of a growth of ``tokens`` at once and whole, or none (S-27)."""
        return self._take(tokens // self.page_tokens) if tokens <= self.available else None

    def take_slot(self, lease: Lease, reservation: list[int]) -> None:
        """Room for one more token, from the reservation where a page begins (S-26)."""
        if lease.materialized % self.page_tokens == 0:
            lease.pages.append(reservation.pop())
        lease.materialized += 1

    def return_slots(self, reservation: list[int]) -> None:
        """Give the unused rest of a reservation back."""
        self._give_back(reservation)

    def drain_events(self) -> list[KvEvent]:
        """KV events since the last call; none unless they were asked for."""
        return self._recorder.drain() if self._recorder else []

    # --- Parts ----------------------------------------------------------------------------------

    def _lock_prefix(self, lease: Lease, tokens: list[int], end: int) -> int:
        if self.reuse:
            lease.cached, lease.node = self._tree.match_and_lock(tokens, end)
        else:
            lease.cached, lease.node = 0, self._tree.root
        lease.pages = self._tree.path_pages(lease.node, lease.cached)
        return lease.cached

    def _take_pages(self, lease: Lease, pages: int) -> bool:
        """Append ``pages`` fresh pages to the lease, evicting what is missing."""
        needed = pages * self.page_tokens
        if needed > self.attainable:
            return False
        self.make_room(needed)
        lease.pages += self._take(pages)
        return True

    def _insert(
        self, lease: Lease, node: Node, tokens: list[int], end: int
    ) -> tuple[Node, list[int]]:
        """Offer pages ``cached`` … ``end`` to the tree and adopt the pages that it keeps.

        Returns the node where they end and the lease's own pages that the tree did not need.
        """
        self._announce(lease, tokens, lease.cached, end)
        first, last = lease.cached // self.page_tokens, end // self.page_tokens
        own = lease.pages[first:last]
        new_node = self._tree.insert(node, tokens[lease.cached : end], own)
        kept = self._tree.path_pages(new_node, end - lease.cached)
        lease.pages[first:last] = kept
        return new_node, [mine for mine, trees in zip(own, kept, strict=True) if mine != trees]

    def _active_node(self, lease: Lease) -> Node:
        assert lease.node is not None, "only an active lease holds KV"
        return lease.node

    def _abandon(self, lease: Lease) -> None:
        self._tree.unlock(self._active_node(lease))
        self._close(lease)

    def _close(self, lease: Lease) -> None:
        lease.pages = []
        lease.materialized = lease.cached = 0
        lease.node = None

    def _announce(self, lease: Lease, tokens: list[int], start: int, end: int) -> None:
        if self._recorder:
            pages = start // self.page_tokens, end // self.page_tokens
            self._recorder.stored(tokens, lease.pages, *pages)

    def _take(self, pages: int) -> list[int]:
        split = len(self._free) - pages
        taken = self._free[split:]
        del self._free[split:]
        return taken

    def _give_back(self, pages: list[int]) -> None:
        if self._recorder:
            self._recorder.removed(pages)
        self._free += pages
