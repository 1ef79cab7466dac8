"""The KV pool with prefix caching on, in runs of blocks instead of blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Column
from typing import TypeAlias

from passtime.sched.lockstep.pool import Hits
from passtime.sched.lockstep.sequence import Sequence


class Run:
    """Blocks [start, end) of a chain of prompts: one node of the pool's compressed trie.

    All its blocks are resident; they are all referenced (``references`` > 0), or all in the LRU
    and ``slot`` is where. ``references`` counts the sequences that end here and the children that
    are referenced. ``block_ids`` are those of a prompt that the run was cut from; ``key`` names
    the run's first block among its siblings. ``duplicates`` are further copies of the one block
    of a run, in the order in which they were made.
    """

    __slots__ = (
        "block_ids",
        "children",
        "duplicates",
        "end",
        "key",
        "parent",
        "references",
        "slot",
        "start",
    )

    def __init__(
        self, block_ids: tuple[int, ...], start: int, end: int, key: Hashable, parent: Run | None
    ) -> None:
        """Referenced once; not yet among its parent's children."""
        self.block_ids = block_ids
        self.start = start
        self.end = end
        self.key = key
        self.parent = parent
        self.references = 1
        self.children: dict[Hashable, Run] | None = None
        self.slot: Slot | None = None
        self.duplicates: tuple[DuplicateBlock, ...] = ()


class DuplicateBlock:
    """A second copy of a prompt's last block, made because V-51 has it computed anew.

    ``maker`` owns it, besides the run before ``first``; None once it is released and in ``slot``.
    No lookup finds it before it becomes the first copy.
    """

    __slots__ = ("first", "maker", "slot")

    def __init__(self, first: Run, maker: Sequence) -> None:
        """A copy of the one block of ``first``."""
        self.first = first
        self.maker: Sequence | None = maker
        self.slot: Slot | None = None


Slot: TypeAlias = "list[int | Run | DuplicateBlock]"
"""What one release put into the LRU; the last entry is the deepest and is evicted first.

A number stands for blocks that nobody will look for. An entry that says another slot is stale.
"""


class RunPool:
    """A trie of prompts and a queue of what was released: blocks are counted, never touched.

    Invariants (they follow from V-53 and V-55):

    * free + evictable + referenced blocks = the pool's size;
    * a resident block's ancestors are resident, so eviction only trims the ends of leaves;
    * a referenced block's ancestors are referenced, so the active hits of a lookup end where the
      deepest referenced run ends;
    * a run is held as a whole: a prompt that ends or branches off inside it splits it first.
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

        ``prompts`` are the trace blocks of each row's prompt (R-31); None: no two share anything.
        """
        self.block_tokens = block_tokens
        self.free = blocks
        self.evictable = 0
        self._prompts = prompts
        # where prompts have no content, one trace block that no prompt exceeds stands for each
        self._trace_tokens = block_tokens << 48 if prompts is None else trace_block_tokens
        self._aligned = self._trace_tokens % block_tokens == 0
        self._root = Run((), 0, 0, None, None)
        self._root.references = 2  # never unreferenced, never anybody's own
        self._no_hits = Hits(0, 0, 0, self._root)
        self._slots: deque[Slot] = deque()

    # --- Lookup (V-50, V-51) --------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Remember what the prompt consists of."""
        row, prompts = sequence.row, self._prompts
        sequence.block_ids = (row,) if prompts is None else tuple(prompts[row])
        sequence.whole_blocks = sequence.prompt_tokens // self.block_tokens

    def lookup(self, sequence: Sequence) -> Hits:
        """Follow the prompt, then what is left of the sequence's own produced blocks."""
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
            blocks, active = min(blocks, most), min(active, most)
        return Hits(blocks, active, depth, run)

    def _key(self, block_ids: tuple[int, ...], depth: int) -> Hashable:
        """What names block ``depth`` of a prompt, given the blocks before it."""
        start = depth * self.block_tokens
        if self._aligned:
            return block_ids[start // self._trace_tokens]
        end = -(-(start + self.block_tokens) // self._trace_tokens)
        return block_ids[start // self._trace_tokens : end]

    def _common_depth(self, run: Run, block_ids: tuple[int, ...], whole: int) -> int:
        """The block up to which a prompt of ``whole`` whole blocks follows ``run``.

        It shares the run's ancestors and its first block.
        """
        end = min(run.end, whole)
        first = run.start * self.block_tokens // self._trace_tokens
        last = -(-end * self.block_tokens // self._trace_tokens)
        if block_ids is run.block_ids or block_ids[first:last] == run.block_ids[first:last]:
            return end
        while block_ids[first] == run.block_ids[first]:
            first += 1
        return first * self._trace_tokens // self.block_tokens

    # --- Holding and publishing (V-53, V-54) ----------------------------------------------------

    def admit(self, sequence: Sequence, hits: Hits, computed_tokens: int) -> None:
        """Hits leave the LRU, then blocks are taken, then whole ones are published."""
        run = hits.run
        assert run is not None
        depth = hits.depth
        if hits.blocks < depth:  # the last block is computed anew: it becomes a run of its own
            run = self._cut(run, depth)
            depth = hits.blocks
        if depth < run.end:
            run = self._cut(run, depth)
        self._hold(run)
        sequence.run = run
        sequence.duplicate = None
        if sequence.furthest_tokens:
            self._take_back_tail(sequence)
        self.take(-(-computed_tokens // self.block_tokens) - hits.blocks)
        self.publish(sequence, computed_tokens)

    def _cut(self, run: Run, depth: int) -> Run:
        """The run that ends at ``depth``, somewhere in ``run``: split it, or its parent."""
        if depth == run.end:
            return run
        parent = run.parent
        assert parent is not None
        if depth == run.start:
            return parent
        upper = Run(run.block_ids, run.start, depth, run.key, parent)
        assert parent.children is not None
        parent.children[run.key] = upper
        run.key = self._key(run.block_ids, depth)
        run.start, run.parent = depth, upper
        upper.children = {run.key: run}
        if run.slot is not None:  # evicted after its deeper half
            upper.references = 0
            upper.slot = run.slot
            upper.slot.insert(upper.slot.index(run), upper)
        return upper

    def _hold(self, run: Run | None) -> None:
        """One more sequence ends at ``run``: it and its ancestors are referenced."""
        while run is not None:
            run.references += 1
            if run.references > 1:
                return
            self.evictable -= run.end - run.start
            run.slot = None
            run = run.parent

    def _take_back_tail(self, sequence: Sequence) -> None:
        """What is left of the blocks it had produced before it was preempted is its own again."""
        tail = sequence.tail
        if tail is not None:
            self.evictable -= tail.end - tail.start
            tail.slot = sequence.tail = None

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
        """Everything that nobody else references goes to the LRU's end."""
        slot, produced = self._give_back(sequence, computed_tokens)
        if produced > 0:
            self.evictable += produced
            slot.append(produced)
        if slot:
            self._slots.append(slot)
            if len(self._slots) > 2 * self.evictable + 64:  # every live slot has a block
                self._compact()

    def preempt(self, sequence: Sequence, computed_tokens: int) -> None:
        """As ``release``; the blocks that it had produced stay its own to find."""
        slot, produced = self._give_back(sequence, computed_tokens)
        sequence.tail = None
        if produced > 0:
            self.evictable += produced
            whole = sequence.whole_blocks
            sequence.tail = tail = Run((), whole, whole + produced, None, None)
            tail.references, tail.slot = 0, slot
            slot.append(tail)
        self._slots.append(slot)

    def _give_back(self, sequence: Sequence, computed_tokens: int) -> tuple[Slot, int]:
        """Prompt blocks for the LRU, shallowest first, and the number of whole ones behind them."""
        blocks, partial = divmod(computed_tokens, self.block_tokens)
        if partial:
            self.free += 1  # it has no identity
        slot: Slot = []
        run: Run | None = sequence.run
        while run is not None:
            run.references -= 1
            if run.references:
                break
            self.evictable += run.end - run.start
            run.slot = slot
            slot.append(run)
            run = run.parent
        if len(slot) > 1:
            slot.reverse()
        if (duplicate := sequence.duplicate) is not None:
            self.evictable += 1
            duplicate.maker, duplicate.slot = None, slot
            slot.append(duplicate)
        return slot, blocks - sequence.whole_blocks

    def _compact(self) -> None:
        """Drop stale entries, and the slots that held nothing else."""
        for slot in self._slots:
            slot[:] = [entry for entry in slot if isinstance(entry, int) or entry.slot is slot]
        self._slots = deque(slot for slot in self._slots if slot)

    # --- Eviction (V-53, V-55) ------------------------------------------------------------------

    def take(self, blocks: int) -> None:
        """Free blocks first, then the least recently released."""
        self.free -= blocks
        if self.free < 0:
            self._evict(-self.free)
            self.free = 0

    def _evict(self, blocks: int) -> None:
        """The entry that is evicted next is the last of the first slot."""
        assert blocks <= self.evictable, "the caller checked that there is room"
        self.evictable -= blocks
        while blocks > 0:
            slot = self._slots[0]
            while slot and blocks > 0:
                entry = slot.pop()
                if isinstance(entry, int):
                    blocks -= entry
                    if blocks < 0:
                        slot.append(-blocks)
                elif entry.slot is not slot:
                    pass  # taken out of the LRU since
                elif isinstance(entry, Run):
                    blocks -= entry.end - entry.start
                    if blocks < 0:
                        entry.end = entry.start - blocks
                        slot.append(entry)
                    else:
                        self._forget(entry)
                else:
                    blocks -= 1
                    first = entry.first
                    first.duplicates = tuple(d for d in first.duplicates if d is not entry)
            if not slot:
                self._slots.popleft()

    def _forget(self, run: Run) -> None:
        """The last block of a run was evicted: it goes, or its first duplicate takes its place."""
        if run.duplicates:
            successor, *others = run.duplicates
            run.duplicates = tuple(others)
            self._succeed(run, successor)
            return
        run.slot = None
        run.end = run.start
        if run.parent is not None:  # not a tail
            assert run.parent.children is not None
            del run.parent.children[run.key]
            run.parent = None

    def _succeed(self, run: Run, duplicate: DuplicateBlock) -> None:
        """``duplicate`` is now the first copy: the run takes over its state."""
        maker = duplicate.maker
        if maker is None:
            slot = duplicate.slot
            assert slot is not None
            slot[slot.index(duplicate)] = run
            run.slot = slot
            return
        # the maker's hold moves from the run before to this one, which is referenced by it
        run.slot, run.references = None, 1
        maker.run, maker.duplicate = run, None
