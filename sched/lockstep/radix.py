"""The radix cache of a lock-step SGLang rank: prompts in runs of pages, decoding left implicit.

The same tree as ``sglang/radix.py``, edge for edge and age for age, but its edges only say where
their pages come from (``edges.py``). A decode publishes a page whenever it fills
one and touches its whole path; that is not carried out. What a member of :class:`StepDecodes`
has published follows from the step number, and is made up for when somebody comes to its node
(``_settle``) or when its lease ends (``finish``, ``release``).

Ages are numbers: pass, phase of the pass (admission, step, completions), place within the phase.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

from passtime.sched.lockstep.edges import Content, Node
from passtime.sched.lockstep.pages import NO_MATCH, Edge, Match
from passtime.sched.lockstep.steps import NEVER, StepDecodes, SteppedSequence

_PHASE_BITS = 40
_ADMISSION, _STEP, _COMPLETIONS = 0, 1, 2
_EVERYBODY = 2**_PHASE_BITS


class RadixPages:
    """A pool of pages and the tree over it; ``PagePool`` in ``pages.py``."""

    def __init__(
        self,
        pages: int,
        page_tokens: int,
        *,
        prompts: Sequence[Sequence[int]] | None,
        trace_block_tokens: int,
        decodes: StepDecodes,
        step_passes: array[int],
    ) -> None:
        """All ``pages`` are free. ``prompts`` are the trace blocks of each row; None: all differ.

        ``step_passes`` holds the pass number of every step made.
        """
        self.free = pages
        self.evictable = 0
        self.evicted_pages = 0
        self._page_tokens = page_tokens
        self._content = content = Content(page_tokens, prompts, trace_block_tokens)
        self.enter = content.enter
        self._decodes = decodes
        self._step_passes = step_passes
        self._root = Node(None, (), (), -1, 0, 0, 0, 0)
        self._root.locks = 2  # for ever: no eviction takes it, nobody has it alone (S-12)
        self._candidates: list[tuple[int, int, Node]] = []
        self._entries = count()
        self._now = 0  # age of what happened last
        self._step = 0
        self._had_token = 0  # members of a lower order had their token of that step

    def at(self, pass_number: int, *, step_is_over: bool = False) -> None:
        """What follows happens in that pass: before, or after, the tokens of its step."""
        self._step = self._decodes.step
        if step_is_over:
            self._now = (4 * pass_number + _COMPLETIONS) << _PHASE_BITS
            self._had_token = _EVERYBODY
        else:
            self._now = (4 * pass_number + _ADMISSION) << _PHASE_BITS
            self._had_token = 0

    # --- Leases (S-21 … S-25) -------------------------------------------------------------------

    def match(self, sequence: SteppedSequence, end: int) -> Match:
        """The cached prefix of the first ``end`` tokens; changes nothing (S-14)."""
        size = self._page_tokens
        if sequence.first_key not in self._root.children or end < size:
            return NO_MATCH
        edges = self._walk(sequence, end // size)
        return Match(edges[-1][1] * size, edges)

    def acquire(self, sequence: SteppedSequence, match: Match, end: int) -> bool:
        """Open a lease for the first ``end`` tokens, after ``match``, if there is room (S-21)."""
        edges = match.edges
        node = self._lock_match(edges) if edges else self._root
        pages = -(-end // self._page_tokens) - node.end
        if pages > self.free:
            if pages > self.free + self.evictable:
                self._unlock(node, 0)
                return False
            self._evict(pages - self.free, None)
        self.free -= pages
        sequence.node = node
        if edges:
            node.holders.append(sequence)
        sequence.cached_pages = node.end
        return True

    def extend(self, sequence: SteppedSequence, *, end: int) -> bool:
        """Grow a lease to ``end`` tokens, if there is room (S-23)."""
        size = self._page_tokens
        pages = -(-end // size) - -(-sequence.computed_tokens // size)
        if pages > self.free + self.evictable:
            return False
        self.take(pages)
        return True

    def publish(self, sequence: SteppedSequence, tokens: int, *, order: int | None = None) -> None:
        """Make the whole pages of the first ``tokens`` findable (S-22)."""
        end = tokens // self._page_tokens
        if end <= sequence.cached_pages:
            return
        if order is not None:
            self._had_token = order
            age = self._step_age(self._step, order)
        else:
            self._now = age = self._now + 1
        node = touched = sequence.node
        if node is self._root and sequence.first_key not in node.children:
            self._hang(sequence, 0, end, age)
            return
        while touched.parent is not None:
            touched.age = age
            touched = touched.parent
        new_node = self._insert(sequence, end, age)
        if new_node is not node:
            self._lock(new_node, node)
            self._move(sequence, new_node)
        sequence.cached_pages = end

    def finish(self, sequence: SteppedSequence, tokens: int) -> None:
        """Leave the whole pages of ``tokens`` to the tree, free the rest (S-24)."""
        end = tokens // self._page_tokens
        if tokens % self._page_tokens:
            self.free += 1
        published = self._published_pages(sequence)
        if end > published:
            self._now = age = self._now + 1
        else:
            age = self._published_at(sequence, published)
        leaf = sequence.node
        if leaf.locks == 1 and not leaf.children:
            if end > leaf.end:
                self._append(leaf, sequence, end)
        else:
            self._settle_lease(sequence, published)
            if end > published:
                last = self._insert(sequence, end, age)
                if last is not sequence.node:
                    self._consider(last)
        self._close(sequence, age)

    def release(self, sequence: SteppedSequence, tokens: int) -> None:
        """Give everything unpublished of ``tokens`` up (S-25)."""
        published = self._published_pages(sequence)
        age = self._published_at(sequence, published)
        self._settle_lease(sequence, published)
        self.free += -(-tokens // self._page_tokens) - sequence.cached_pages
        self._close(sequence, age)
        sequence.node = self._root
        sequence.publishes_from = NEVER

    def _close(self, sequence: SteppedSequence, age: int) -> None:
        """End a lease whose path was touched at ``age`` for the last time."""
        node = sequence.node
        if node is not self._root:
            node.holders.remove(sequence)
            self._unlock(node, age)

    def _unlock(self, node: Node, age: int) -> None:
        """Unlock ``node`` and its ancestors, which were touched at ``age``, if not later."""
        parent = node.parent
        while parent is not None:
            if node.age < age:
                node.age = age
            node.locks -= 1
            if node.locks == 0:
                self.evictable += node.end - node.start
                if not node.children:
                    heappush(self._candidates, (node.age, next(self._entries), node))
            node = parent
            parent = node.parent

    # --- What decoding has published (S-33.6) ---------------------------------------------------

    def _published_pages(self, member: SteppedSequence) -> int:
        """Pages that a sequence has published, by decoding too; its last token is not."""
        if member.publishes_from < 0:
            return member.cached_pages
        steps = self._step + (member.order < self._had_token)
        last = member.last_step
        return ((steps if steps < last else last) + member.delta) // self._page_tokens

    def _published_at(self, member: SteppedSequence, pages: int) -> int:
        """The age of the last of these pages, 0 if it did not come by decoding."""
        first = member.publishes_from
        if first < 0:
            return 0
        step = pages * self._page_tokens - 1 - member.delta
        return self._step_age(step, member.order) if step >= first else 0

    def _settle(self, node: Node) -> None:
        """Bring the edges of members that hold ``node`` up to date, before anything changes it."""
        holders = node.holders
        if len(holders) == 1:
            self._settle_member(holders[0])
        else:
            for member in holders.copy():
                self._settle_member(member)

    def _settle_member(self, member: SteppedSequence) -> None:
        """Bring the edge of one member up to date."""
        end = self._published_pages(member)
        if end > member.cached_pages:
            self._grow(member, end)

    def _settle_lease(self, sequence: SteppedSequence, end: int) -> None:
        """Settle a sequence that has published ``end`` pages, and all who hold its node.

        Before it unlocks: the others then hung their output below, not being alone.
        """
        if sequence.node.locks != 1:  # others hold it too, or it is the root, which keeps no list
            self._settle(sequence.node)
        if end > sequence.cached_pages:
            self._grow(sequence, end)

    def _grow(self, member: SteppedSequence, end: int) -> None:
        """A member alone on a leaf lengthened it; otherwise its output hangs below as a leaf."""
        node = member.node
        if node.locks == 1 and not node.children:
            self._append(node, member, end)
            member.cached_pages = end
        else:
            self._hang(member, member.cached_pages, end, 0)

    def _hang(self, sequence: SteppedSequence, start: int, end: int, age: int) -> None:
        """Publish pages below a sequence's node, where there are none such."""
        node = sequence.node
        leaf = self._new_child(node, sequence, start, end, age)
        leaf.locks = 1
        leaf.holders.append(sequence)
        if node is not self._root:
            node.holders.remove(sequence)
        sequence.node = leaf
        sequence.cached_pages = end

    def _move(self, sequence: SteppedSequence, node: Node) -> None:
        """A sequence's published prefix ends further down, at ``node``.

        The root keeps no list: what hangs below it is a leaf of its own, whenever it is settled.
        """
        if sequence.node is not self._root:
            sequence.node.holders.remove(sequence)
        node.holders.append(sequence)
        sequence.node = node

    def _step_age(self, step: int, order: int) -> int:
        return ((4 * self._step_passes[step] + _STEP) << _PHASE_BITS) + order

    # --- Looking up (S-14 … S-16) ---------------------------------------------------------------

    def _walk(self, sequence: SteppedSequence, end: int) -> list[Edge]:
        """Edges along the first ``end`` pages, and how far each agrees."""
        edges: list[Edge] = []
        key, agree = self._content.key, self._content.agree
        node, page = self._root, 0
        while page < end:
            child = node.children.get(key(sequence, page))
            if child is None:
                break
            if child.holders:
                self._settle(child)
            page = agree(child, sequence, end)
            edges.append((child, page))
            if page < child.end:
                break
            node = child
        return edges

    def _lock_match(self, edges: Sequence[Edge]) -> Node:
        """The node where a matched prefix ends, locked (S-15)."""
        self._now = age = self._now + 1
        node = self._root
        unlocked = 0
        for child, reached in edges:
            if reached == child.end:
                child.age = age
                node = child
            else:
                node = self._split(child, reached)
            if node.locks == 0:
                unlocked += node.end - node.start
            node.locks += 1
        self.evictable -= unlocked
        return node

    def _split(self, node: Node, page: int) -> Node:
        """Cut ``node`` before ``page``; holders stay with the lower half (S-16)."""
        assert node.parent is not None, "the root has no edge to split"
        prompt_end = min(node.prompt_end, page)
        upper = Node(
            node.parent,
            node.key,
            node.block_ids,
            node.owner,
            node.start,
            prompt_end,
            page,
            node.age,
        )
        upper.locks = node.locks
        node.parent.children[node.key] = upper
        node.parent = upper
        node.start, node.prompt_end = page, max(node.prompt_end, page)
        node.key = (
            self._content.block_key(node.block_ids, page)
            if page < node.prompt_end
            else (node.owner,)
        )
        upper.children[node.key] = node
        return upper

    # --- Inserting (S-18) -----------------------------------------------------------------------

    def _insert(self, sequence: SteppedSequence, end: int, age: int) -> Node:
        """Offer pages up to ``end``, some of them new, after the sequence's node, at ``age``.

        The node where they end: if it is another one, it is unlocked or held by others. Pages of
        content that the tree has already are free again.
        """
        start, page = sequence.node, sequence.cached_pages
        if len(start.holders) > 1:
            self._settle(start)
        node = start
        while page < end:
            if not node.children and (node.locks == 0 or (node.locks == 1 and node is start)):
                if node.locks == 0:
                    self.evictable += end - page
                self._append(node, sequence, end)
                node.age = age
                return node
            child = node.children.get(self._content.key(sequence, page))
            if child is None:
                self.evictable += end - page
                return self._new_child(node, sequence, page, end, age)
            if child.holders:
                self._settle(child)
            reached = self._content.agree(child, sequence, end)
            self.free += reached - page
            if reached == child.end:
                child.age = age
                node = child
            else:
                node = self._split(child, reached)
            page = reached
        return node

    @staticmethod
    def _append(node: Node, sequence: SteppedSequence, end: int) -> None:
        """Lengthen a leaf's edge up to page ``end`` of ``sequence``, whose path it is on."""
        if node.prompt_end == node.end:
            if node.end < sequence.prompt_pages:
                node.prompt_end = min(end, sequence.prompt_pages)
            node.block_ids = sequence.block_ids
            node.owner = sequence.row
        node.end = end

    def _new_child(
        self, parent: Node, sequence: SteppedSequence, start: int, end: int, age: int
    ) -> Node:
        prompt_end = sequence.prompt_pages
        if prompt_end > end:
            prompt_end = end
        elif prompt_end < start:
            prompt_end = start
        key = self._content.key(sequence, start) if start else sequence.first_key
        child = Node(parent, key, sequence.block_ids, sequence.row, start, prompt_end, end, age)
        parent.children[key] = child
        return child

    # --- Locks and ages (S-13, S-17) ------------------------------------------------------------

    def _lock(self, node: Node, below: Node) -> None:
        """Lock ``node`` and its ancestors below ``below``."""
        while node is not below:
            if node.locks == 0:
                self.evictable -= node.end - node.start
            node.locks += 1
            assert node.parent is not None, "below is an ancestor"
            node = node.parent

    # --- Taking and evicting (S-19) -------------------------------------------------------------

    def make_room(self, pages: int) -> None:
        """Evict, as far as possible, until so many pages are free."""
        if pages > self.free:
            self._evict(pages - self.free, None)

    def take(self, pages: int, feeds: Callable[[int], int] | None = None) -> None:
        """Take pages, free ones first; there is room."""
        if pages > self.free:
            self._evict(pages - self.free, feeds)
        self.free -= pages

    def _evict(self, pages: int, feeds: Callable[[int], int] | None) -> None:
        """Drop pages, oldest leaf first and from its tail, until ``pages`` are or none is left."""
        candidates = self._candidates
        while pages and candidates:
            age, _, leaf = candidates[0]
            if leaf.age != age or leaf.locks or leaf.children or leaf.parent is None:
                heappop(candidates)  # no longer an unlocked leaf of that age
                continue
            length = leaf.end - leaf.start
            taken = length if length < pages else pages
            pages -= taken
            self.free += taken
            self.evictable -= taken
            self.evicted_pages += taken
            if taken == length:
                heappop(candidates)
                self._remove(leaf, feeds)
            else:
                leaf.end -= taken
                if leaf.prompt_end > leaf.end:
                    leaf.prompt_end = leaf.end

    def _remove(self, leaf: Node, feeds: Callable[[int], int] | None) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        if parent.holders:
            present = self._step
            if feeds is not None:  # in the step that needs this page, before its tokens
                self._step += feeds(self.free - 1)
            self._settle(parent)
            self._step = present
        del parent.children[leaf.key]
        leaf.parent = None
        self._consider(parent)

    def _consider(self, node: Node) -> None:
        """Queue ``node`` for eviction if it is an unlocked leaf."""
        if node.locks == 0 and not node.children:
            heappush(self._candidates, (node.age, next(self._entries), node))

    def head_key(self, sequence: SteppedSequence, tokens: int) -> object:
        """Equal for sequences whose first ``tokens`` tokens are equal."""
        return self._content.head_key(sequence, tokens)
