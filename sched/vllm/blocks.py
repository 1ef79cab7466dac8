"""The KV block pool (V-52 … V-55): copies, the prefix index, and the LRU of unreferenced ones."""

from __future__ import annotations

from collections.abc import Iterable


class BlockCopy:
    """One physical block. Private while ``identity`` is None, findable once it is cached.

    Cached and unreferenced and unpinned ⇔ in the pool's LRU.
    """

    __slots__ = ("identity", "pins", "references")

    def __init__(self) -> None:
        """A private copy, owned by the request that gets it."""
        self.identity: int | None = None
        self.references = 1
        self.pins = 0


class BlockPool:
    """``capacity`` block copies; free = capacity − copies − reserved (V-52).

    Invariant: referenced or pinned or private copies + LRU + reserved + free = capacity.
    """

    def __init__(self, capacity: int) -> None:
        """An empty pool of ``capacity`` blocks."""
        self.capacity = capacity
        self.copies = 0
        self.reserved = 0
        self.index: dict[int, list[BlockCopy]] = {}
        self._lru: dict[BlockCopy, None] = {}
        self.evicted: list[int] = []  # hashes that lost their last copy since last drained

    @property
    def free(self) -> int:
        """Blocks that hold nothing and are promised to nobody."""
        return self.capacity - self.copies - self.reserved

    @property
    def unreferenced(self) -> int:
        """Cached blocks that nobody holds: the length of the LRU."""
        return len(self._lru)

    @property
    def active(self) -> int:
        """Blocks referenced by requests or holds, and reserved ones (C-24)."""
        return self.copies - len(self._lru) + self.reserved

    def first_copy(self, identity: int) -> BlockCopy | None:
        """The copy that a lookup finds: the one cached first (V-52)."""
        copies = self.index.get(identity)
        return copies[0] if copies else None

    def is_active(self, copy: BlockCopy) -> bool:
        """Referenced or pinned."""
        return copy.references > 0 or copy.pins > 0

    def allocate(self, hits: list[BlockCopy], fresh: int) -> list[BlockCopy] | None:
        """Reference ``hits`` and make ``fresh`` private copies; None and no change if short (V-53).

        Hits leave the LRU first, then free blocks are used, then the LRU is evicted from its head.
        """
        if not self._make_room(hits, fresh):
            return None
        for copy in hits:
            copy.references += 1
        self.copies += fresh
        return [BlockCopy() for _ in range(fresh)]

    def reserve(self, hits: list[BlockCopy], fresh: int) -> bool:
        """Pin ``hits`` and promise ``fresh`` blocks; False and no change if short (V-75, V-81)."""
        if not self._make_room(hits, fresh):
            return False
        for copy in hits:
            copy.pins += 1
        self.reserved += fresh
        return True

    def _make_room(self, hits: list[BlockCopy], fresh: int) -> bool:
        wanted_in_lru = {copy for copy in hits if copy in self._lru}
        evictions = max(0, fresh - self.free)
        if evictions > len(self._lru) - len(wanted_in_lru):
            return False
        for copy in wanted_in_lru:
            del self._lru[copy]
        for _ in range(evictions):
            self._evict_oldest()
        return True

    def _evict_oldest(self) -> None:
        copy = next(iter(self._lru))
        del self._lru[copy]
        assert copy.identity is not None
        copies = self.index[copy.identity]
        copies.remove(copy)
        if not copies:
            del self.index[copy.identity]
            self.evicted.append(copy.identity)
        self.copies -= 1

    def take_reserved(self) -> BlockCopy:
        """Turn one promised block into a private copy (V-77, V-84)."""
        assert self.reserved > 0
        self.reserved -= 1
        self.copies += 1
        return BlockCopy()

    def unreserve(self, count: int) -> None:
        """Give promised blocks back."""
        assert 0 <= count <= self.reserved
        self.reserved -= count

    def publish(self, copy: BlockCopy, identity: int) -> bool:
        """Make a private copy findable (V-54); True if it is the first of its hash."""
        assert copy.identity is None
        copy.identity = identity
        copies = self.index.setdefault(identity, [])
        copies.append(copy)
        return len(copies) == 1

    def release(self, copies: Iterable[BlockCopy]) -> None:
        """Drop one reference of each, in the order given: the caller's is deepest first (V-55)."""
        for copy in copies:
            copy.references -= 1
            if copy.identity is None:
                self.copies -= 1
            elif not self.is_active(copy):
                self._lru[copy] = None

    def pins_to_references(self, copies: Iterable[BlockCopy]) -> None:
        """A reservation was activated: its pins become ordinary references (V-77)."""
        for copy in copies:
            copy.pins -= 1
            copy.references += 1

    def unpin(self, copies: Iterable[BlockCopy]) -> None:
        """Drop one pin of each, in the order given (V-79)."""
        for copy in copies:
            copy.pins -= 1
            if not self.is_active(copy):
                self._lru[copy] = None

    def drain_evicted(self) -> tuple[int, ...]:
        """Hashes whose last copy was evicted since the last call, in eviction order (V-91)."""
        evicted, self.evicted = tuple(self.evicted), []
        return evicted
