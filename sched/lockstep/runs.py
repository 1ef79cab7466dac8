"""The KV pool with prefix caching on, in runs of blocks instead of blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Column

from passtime.sched.lockstep.pool import Hits
from passtime.sched.lockstep.sequence import Sequence


class Run:
    """Blocks [start, end) of a chain of prompts: one node of the pool's compressed trie.

    All its blocks are resident; they are all referenced (``references`` > 0) or all in the LRU.
    ``references`` counts the sequences that end here and the children that are referenced.
    ``block_ids`` are those of a prompt that the run was cut from; ``key`` names its first block
    among its siblings. ``duplicates`` are further copies of the one block of a run, oldest first.

    ``place`` is the entry of the LRU queue that stands for the run: itself, or the duplicate whose
    place it took. An unreferenced run without a place stands directly behind its child.
    ``stale`` counts entries of this run that are still in the queue, ahead of its place, and mean
    nothing any more.
    """

    __slots__ = (
        "block_ids",
        "children",
        "duplicates",
        "end",
        "key",
        "parent",
        "place",
        "references",
        "stale",
        "start",
    )

    def __init__(
        self, block_ids: Column[int], start: int, end: int, key: Hashable, parent: Run | None
    ) -> None:
        """Referenced once; not yet among its parent's children."""
        self.block_ids = block_ids
        self.start = start
        self.end = end
        self.key = key
        self.parent = parent
        self.references = 1
        self.children: dict[Hashable, Run] | None = None
        self.place: Run | DuplicateBlock | None = None
        self.stale = 0
        self.duplicates: tuple[DuplicateBlock, ...] = ()


class DuplicateBlock:
    """A second copy of a prompt's last block, made because V-51 has it computed anew.

    ``maker`` owns it, besides the run before ``first``; None once it is in the LRU. No lookup
    finds it before it becomes the first copy: then ``first`` takes its place.
    """

    __slots__ = ("first", "maker", "stale")

    def __init__(self, first: Run, maker: Sequence) -> None:
        """A copy of the one block of ``first``."""
        self.first = first
        self.maker: Sequence | None = maker
        self.stale = 0


class RunPool:
    """A trie of prompts and a queue of what was released: blocks are counted, never touched.

    Invariants (they follow from V-53 and V-55):

    * free + evictable + referenced blocks = the pool's size;
    * a resident block's ancestors are resident, so eviction only trims the ends of leaves;
    * a referenced block's ancestors are referenced, so the active hits of a lookup end where the
      deepest referenced run ends;
    * a run is held as a whole: a prompt that ends or branches off inside it splits it first.

    The queue holds what was released, in eviction order: runs, duplicates, and numbers of blocks
    that nobody will look for. Evictions are owed until somebody looks: what is released meanwhile
    comes later in the queue.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        *,
        prompts: Column[Column[int]] | None,
        trace_block_tokens: int,
    ) -> None:
        """All ``blocks`` are free.

        ``prompts`` are the trace blocks of each row's prompt (R-31), lists or tuples, but of one
        kind; None: no two prompts share anything.
        """
        self.block_tokens = block_tokens
        self.free = blocks
        self.evictable = 0
        self._prompts = prompts
        # where prompts have no content, one trace block that no prompt exceeds stands for each
        self._trace_tokens = block_tokens << 48 if prompts is None else trace_block_tokens
        whole, rest = divmod(self._trace_tokens, block_tokens)
        self._blocks_per_id = 0 if rest else whole  # 0: ids do not end where blocks do
        self._root = Run([], 0, 0, None, None)
        self._root.references = 2  # never unreferenced, never anybody's own
        self._no_hits = Hits(0, 0, 0, self._root)
        self._queue: deque[int | Run | DuplicateBlock] = deque()
        self._owed = 0

    # --- Lookup (V-50, V-51) --------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Remember what the prompt consists of."""
        row, prompts = sequence.row, self._prompts
        sequence.block_ids = [row] if prompts is None else prompts[row]
        sequence.whole_blocks = sequence.prompt_tokens // self.block_tokens

    def lookup(self, sequence: Sequence) -> Hits:
        """Follow the prompt, then what is left of the sequence's own produced blocks."""
        if self._owed:
            self._evict_owed()
        block_ids, whole = sequence.block_ids, sequence.whole_blocks
        run, depth, active = self._root, 0, 0
        while depth < whole and run.children:
            child = run.children.get(self._key(block_ids, depth))
            if child is None:
                break
            depth = self._common_depth(child, block_ids, whole)
            if child.references:
                active = depth
            run = child
            if depth < child.end:
                break
        blocks = depth
        if sequence.furthest_tokens and sequence.tail is not None:
            blocks += sequence.tail.end - sequence.tail.start
        if not blocks:
            return self._no_hits
        if sequence.output_limit:  # its last known token has to be computed for its logits
            most = (sequence.known_tokens - 1) // self.block_tokens
            if blocks > most:
                blocks, active = most, min(active, most)
        return Hits(blocks, active, depth, run)

    def _key(self, block_ids: Column[int], depth: int) -> Hashable:
        """What names block ``depth`` of a prompt, given the blocks before it."""
        if self._blocks_per_id:
            return block_ids[depth // self._blocks_per_id]
        start = depth * self.block_tokens
        end = -(-(start + self.block_tokens) // self._trace_tokens)
        return tuple(block_ids[start // self._trace_tokens : end])

    def _common_depth(self, run: Run, block_ids: Column[int], whole: int) -> int:
        """The block up to which a prompt of ``whole`` whole blocks follows ``run``.

        It shares the run's ancestors and its first block.
        """
        end = run.end if run.end < whole else whole
        first = run.start * self.block_tokens // self._trace_tokens
        last = -(-end * self.block_tokens // self._trace_tokens)
        others = run.block_ids
        if block_ids is others or block_ids[first:last] == others[first:last]:
            return end
        while block_ids[first] == others[first]:
            first += 1
        return first * self._trace_tokens // self.block_tokens

    # --- Holding and publishing (V-53, V-54) ----------------------------------------------------

    def admit(self, sequence: Sequence, hits: Hits, computed_tokens: int) -> None:
        """Hits leave the LRU, then blocks are taken, then whole ones are published."""
        sequence.duplicate = None
        if hits is self._no_hits:
            sequence.run = self._root
            self._root.references += 1
        else:
            self._hold_hits(sequence, hits)
        self.take(-(-computed_tokens // self.block_tokens) - hits.blocks)
        self.publish(sequence, computed_tokens)

    def _hold_hits(self, sequence: Sequence, hits: Hits) -> None:
        run, depth = hits.run, hits.depth
        assert run is not None
        if hits.blocks < depth:  # the last block is computed anew: it becomes a run of its own
            run = self._cut(run, depth)
            depth = hits.blocks
        if depth < run.end:
            run = self._cut(run, depth)
        self._hold(run)
        sequence.run = run
        if sequence.furthest_tokens:
            self._take_back_tail(sequence)

    def _cut(self, run: Run, depth: int) -> Run:
        """The run that ends at ``depth``, somewhere in ``run``: split it, or its parent.

        The lower half keeps the object, its holders, its children and its place in the LRU.
        """
        parent = run.parent
        if depth == run.end or parent is None:
            return run
        if depth == run.start:
            return parent
        upper = Run(run.block_ids, run.start, depth, run.key, parent)
        assert parent.children is not None
        parent.children[run.key] = upper
        run.key = self._key(run.block_ids, depth)
        run.start, run.parent = depth, upper
        upper.children = {run.key: run}
        if not run.references:
            upper.references = 0
        return upper

    def _hold(self, run: Run | None) -> None:
        """One more sequence ends at ``run``: it and its ancestors are referenced."""
        while run is not None:
            run.references += 1
            if run.references > 1:
                return
            self.evictable -= run.end - run.start
            if run.place is not None:
                run.place.stale += 1
                run.place = None
            run = run.parent

    def _take_back_tail(self, sequence: Sequence) -> None:
        """What is left of the blocks it had produced before it was preempted is its own again."""
        tail = sequence.tail
        if tail is not None:
            self.evictable -= tail.end - tail.start
            tail.stale = 1
            sequence.tail = None

    def publish(self, sequence: Sequence, computed_tokens: int) -> None:
        """Lengthen the sequence's own run, or begin one."""
        depth, run = computed_tokens // self.block_tokens, sequence.run
        if depth > sequence.whole_blocks:
            depth = sequence.whole_blocks
        if depth <= run.end:
            return
        children = run.children
        if children is None:
            if run.references == 1 and not run.duplicates:
                run.block_ids, run.end = sequence.block_ids, depth
                return
            run.children = children = {}
        key = self._key(sequence.block_ids, run.end)
        if key not in children:
            # the sequence's hold moves down to the new run, whose reference takes its place
            sequence.run = children[key] = Run(sequence.block_ids, run.end, depth, key, run)
            return
        first = children[key]
        assert first.start + 1 == first.end == depth, "only a prompt's last block is made twice"
        sequence.duplicate = DuplicateBlock(first, sequence)
        first.duplicates += (sequence.duplicate,)

    # --- Release (V-55) -------------------------------------------------------------------------

    def release(self, sequence: Sequence, computed_tokens: int) -> None:
        """Everything that nobody else references goes to the LRU's end, deepest first."""
        size = self.block_tokens
        if computed_tokens % size:
            self.free += 1  # the last block is not whole, so it has no identity
        produced = computed_tokens // size - sequence.whole_blocks
        if produced > 0:
            self.evictable += produced
            self._queue.append(produced)
        self._release_prompt(sequence)

    def preempt(self, sequence: Sequence, computed_tokens: int) -> None:
        """As ``release``; the blocks that it had produced stay its own to find."""
        size, whole = self.block_tokens, sequence.whole_blocks
        if computed_tokens % size:
            self.free += 1
        produced = computed_tokens // size - whole
        sequence.tail = None
        if produced > 0:
            self.evictable += produced
            sequence.tail = Run([], whole, whole + produced, None, None)
            self._queue.append(sequence.tail)
        self._release_prompt(sequence)

    def _release_prompt(self, sequence: Sequence) -> None:
        queue = self._queue
        if (duplicate := sequence.duplicate) is not None:
            self.evictable += 1
            duplicate.maker = None
            queue.append(duplicate)
        run: Run | None = sequence.run
        while run is not None:
            run.references -= 1
            if run.references:
                break
            self.evictable += run.end - run.start
            run.place = run
            queue.append(run)
            run = run.parent
        # every entry that is not stale has a block
        if len(queue) > 2 * (self.evictable + self._owed) + 64:
            self._compact()

    def _compact(self) -> None:
        """Drop stale entries."""
        live: deque[int | Run | DuplicateBlock] = deque()
        for entry in self._queue:
            if isinstance(entry, int) or not entry.stale:
                live.append(entry)
            else:
                entry.stale -= 1
        self._queue = live

    # --- Eviction (V-53, V-55) ------------------------------------------------------------------

    def take(self, blocks: int) -> None:
        """Free blocks first, then the least recently released."""
        free = self.free - blocks
        if free >= 0:
            self.free = free
        else:
            self.free = 0
            self.evictable += free
            self._owed -= free

    def _evict_owed(self) -> None:
        """Take the queue's first entries away, the last one perhaps in part."""
        queue, owed = self._queue, self._owed
        while owed > 0:
            entry = queue.popleft()
            if isinstance(entry, int):
                owed -= entry
                if owed < 0:
                    queue.appendleft(-owed)
            elif entry.stale:
                entry.stale -= 1
            elif isinstance(entry, Run):
                owed -= entry.end - entry.start
                if owed < 0:
                    entry.end = entry.start - owed
                    queue.appendleft(entry)
                else:
                    self._forget(entry)
            else:
                owed -= 1
                self._forget_copy(entry)
        self._owed = 0

    def _forget_copy(self, duplicate: DuplicateBlock) -> None:
        """A duplicate was evicted, or the first copy that has its place."""
        first = duplicate.first
        if first.place is duplicate:
            self._forget(first)
        else:
            first.duplicates = tuple(d for d in first.duplicates if d is not duplicate)

    def _forget(self, run: Run) -> None:
        """The last block of a run was evicted: it goes, or its first duplicate succeeds it."""
        if run.duplicates:
            self._succeed(run, run.duplicates[0])
            return
        run.end = run.start
        run.place = None
        parent = run.parent
        if parent is not None:  # not a tail
            assert parent.children is not None
            del parent.children[run.key]
            run.parent = None
            if not parent.references and parent.place is None:  # it was right behind this run
                parent.place = parent
                self._queue.appendleft(parent)

    def _succeed(self, run: Run, duplicate: DuplicateBlock) -> None:
        """``duplicate`` is now the first copy: the run takes over its state."""
        run.duplicates = run.duplicates[1:]
        maker = duplicate.maker
        if maker is None:
            run.place = duplicate
            return
        # the maker's hold moves from the run before to this one, which is referenced by it
        run.place, run.references = None, 1
        maker.run, maker.duplicate = run, None
