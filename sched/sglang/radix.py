"""The radix tree: cached prefixes, page by page (S-12 … S-19).

Two pages are the same when their tokens and all tokens before them are, so an edge simply holds
the tokens themselves: a whole number of pages, with one physical page each. Positions and lengths
are tokens and multiples of the page size throughout.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count


class Node:
    """A run of pages below its parent; ``locks`` counts the leases at or below it (S-12)."""

    __slots__ = ("children", "key", "last_access", "locks", "pages", "parent")

    def __init__(
        self,
        *,
        parent: Node | None,
        key: list[int],
        pages: list[int],
        last_access: int,
        locks: int = 0,
    ) -> None:
        """An edge of ``key`` tokens held by ``pages``."""
        self.parent = parent
        self.key = key
        self.pages = pages
        self.last_access = last_access
        self.locks = locks
        self.children: dict[tuple[int, ...], Node] = {}


class RadixTree:
    """A compressed trie of token pages with least-recently-used eviction of unlocked leaves."""

    def __init__(self, *, page_tokens: int) -> None:
        """An empty tree of pages of ``page_tokens`` tokens."""
        self.root = Node(parent=None, key=[], pages=[], last_access=0)
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self._page_tokens = page_tokens
        self._clock = count(1)  # S-13
        self._entries = count()
        # Unlocked leaves by stamp. Entries of nodes that changed since are skipped when they
        # come up; every change that makes a node a candidate pushes a new one.
        self._candidates: list[tuple[int, int, Node]] = []

    # --- Looking up -----------------------------------------------------------------------------

    def peek(self, tokens: list[int], end: int) -> int:
        """How many of the first ``end`` tokens are cached; changes nothing (S-14)."""
        return sum(matched for _, matched, _ in self._walk(tokens, end))

    def match_and_lock(self, tokens: list[int], end: int) -> tuple[int, Node]:
        """The cached prefix of the first ``end`` tokens and the node where it ends, locked (S-15).

        A node split off by this match keeps the stamp of its edge.
        """
        stamp = next(self._clock)
        length, node = 0, self.root
        for child, matched, whole in self._walk(tokens, end):
            length += matched
            if whole:
                self._touch(child, stamp)
                node = child
            else:
                node = self._split(child, matched)
        self.lock(node)
        return length, node

    def path_pages(self, node: Node, tokens: int) -> list[int]:
        """Pages of the last ``tokens`` tokens on the path that ends at ``node``."""
        missing = tokens // self._page_tokens
        pieces: list[list[int]] = []
        current: Node | None = node
        while missing:
            assert current is not None, "a path is as long as what was matched or inserted"
            pieces.append(current.pages[-missing:])
            missing -= len(pieces[-1])
            current = current.parent
        return [page for piece in reversed(pieces) for page in piece]

    # --- Locks (S-17) ---------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protect ``node`` and its ancestors from eviction."""
        for member in self._path(node):
            if member.locks == 0:
                self.evictable_tokens -= len(member.key)
                self.protected_tokens += len(member.key)
            member.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        for member in self._path(node):
            member.locks -= 1
            if member.locks == 0:
                self.protected_tokens -= len(member.key)
                self.evictable_tokens += len(member.key)
                self._consider(member)

    # --- Changing -------------------------------------------------------------------------------

    def insert(self, start: Node, suffix: list[int], pages: list[int]) -> Node:
        """Make ``suffix`` findable after ``start``; return the node where it ends (S-18).

        ``pages`` hold the suffix. Those whose content was in the tree already are not stored:
        :meth:`path_pages` tells which pages the tree keeps.
        """
        if not suffix:
            return start
        stamp = next(self._clock)
        for member in self._path(start):
            self._touch(member, stamp)
        node, position = start, 0
        while position < len(suffix):
            rest = pages[position // self._page_tokens :]
            if self._may_grow(node, start):
                self._append(node, suffix[position:], rest, stamp)
                return node
            child = node.children.get(self._first_page(suffix, position))
            if child is None:
                return self._add_leaf(node, suffix[position:], rest)
            matched = self._common_tokens(child.key, suffix, position, len(suffix))
            if matched == len(child.key):
                self._touch(child, stamp)
                node = child
            else:
                node = self._split(child, matched)
            position += matched
        return node

    def evict(self, tokens: int) -> list[int]:
        """Drop at least ``tokens`` tokens, oldest leaf first and from its tail (S-19).

        Returns the pages that nobody holds any more; fewer than asked for when leaves run out.
        """
        freed: list[int] = []
        wanted = -(-tokens // self._page_tokens)
        while len(freed) < wanted:
            leaf = self._oldest_leaf()
            if leaf is None:
                break
            taken = min(wanted - len(freed), len(leaf.pages))
            freed += leaf.pages[-taken:]
            del leaf.pages[-taken:]
            self.evictable_tokens -= taken * self._page_tokens
            if leaf.pages:
                del leaf.key[-taken * self._page_tokens :]
            else:
                self._remove(leaf)
        return freed

    # --- Parts ----------------------------------------------------------------------------------

    def _walk(self, tokens: list[int], end: int) -> Iterator[tuple[Node, int, bool]]:
        """Edges along the first ``end`` tokens: node, tokens matched on it, whether all of it."""
        node, position = self.root, 0
        while position < end:
            child = node.children.get(self._first_page(tokens, position))
            if child is None:
                return
            matched = self._common_tokens(child.key, tokens, position, end)
            whole = matched == len(child.key)
            yield child, matched, whole
            if not whole:
                return
            node = child
            position += matched

    def _first_page(self, tokens: list[int], position: int) -> tuple[int, ...]:
        return tuple(tokens[position : position + self._page_tokens])

    def _common_tokens(self, key: list[int], tokens: list[int], start: int, end: int) -> int:
        """Whole pages, in tokens, on which ``key`` and ``tokens[start:end]`` agree."""
        same, different = 0, min(len(key), end - start)
        if key[:different] == tokens[start : start + different]:
            return different
        while different - same > 1:  # key[:same] agrees, key[:different] does not
            middle = (same + different) // 2
            if key[same:middle] == tokens[start + same : start + middle]:
                same = middle
            else:
                different = middle
        return same - same % self._page_tokens

    def _path(self, node: Node) -> Iterator[Node]:
        """``node`` and its ancestors without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut ``node`` after ``tokens`` tokens; leases keep the lower half (S-16)."""
        assert node.parent is not None, "the root has no edge to split"
        pages = tokens // self._page_tokens
        upper = Node(
            parent=node.parent,
            key=node.key[:tokens],
            pages=node.pages[:pages],
            last_access=node.last_access,
            locks=node.locks,
        )
        node.parent.children[self._first_page(upper.key, 0)] = upper
        node.key, node.pages, node.parent = node.key[tokens:], node.pages[pages:], upper
        upper.children[self._first_page(node.key, 0)] = node
        return upper

    def _may_grow(self, node: Node, start: Node) -> bool:
        """Whether an insert may lengthen ``node``'s own edge (S-18.1)."""
        if node.parent is None or node.children:
            return False
        return node.locks == 0 or (node is start and node.locks == 1)

    def _append(self, node: Node, key: list[int], pages: list[int], stamp: int) -> None:
        node.key += key
        node.pages += pages
        self._touch(node, stamp)
        if node.locks:
            self.protected_tokens += len(key)
        else:
            self.evictable_tokens += len(key)

    def _add_leaf(self, parent: Node, key: list[int], pages: list[int]) -> Node:
        leaf = Node(parent=parent, key=key, pages=pages, last_access=next(self._clock))
        parent.children[self._first_page(key, 0)] = leaf
        self.evictable_tokens += len(key)
        self._consider(leaf)
        return leaf

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[self._first_page(leaf.key, 0)]
        leaf.parent = None
        self._consider(parent)

    def _touch(self, node: Node, stamp: int) -> None:
        node.last_access = stamp
        self._consider(node)

    def _consider(self, node: Node) -> None:
        """Queue ``node`` for eviction if it is an unlocked leaf."""
        if self._is_candidate(node):
            heapq.heappush(self._candidates, (node.last_access, next(self._entries), node))

    def _is_candidate(self, node: Node) -> bool:
        return node.parent is not None and not node.children and node.locks == 0

    def _oldest_leaf(self) -> Node | None:
        while self._candidates:
            stamp, _, node = self._candidates[0]
            if node.last_access == stamp and self._is_candidate(node):
                return node
            heapq.heappop(self._candidates)
        return None
