"""The pool in runs of blocks against the pool block by block, and its own invariants."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from passtime.sched.lockstep.runs import DuplicateBlock, Run, RunPool
from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.vllm.blocks import BlockCopy, BlockPool

Identity = tuple[object, ...]


@dataclass(eq=False)
class Owner:
    """One request in both pools."""

    sequence: Sequence
    identities: list[Identity]  # of its whole prompt blocks
    computed: int = 0
    copies: list[BlockCopy] = field(default_factory=list)


class Pools:
    """The pool in runs, and beside it the literal one, driven by the same steps (V-50 … V-55)."""

    def __init__(self, rng: random.Random, *, blocks: int, size: int, trace_tokens: int) -> None:
        self.rng, self.size, self.trace_tokens, self.blocks = rng, size, trace_tokens, blocks
        self.prompts: list[list[int]] = []
        self.runs = RunPool(blocks, size, prompts=self.prompts, trace_block_tokens=trace_tokens)
        self.literal = BlockPool(blocks)
        self.running: list[Owner] = []
        self.decoding: list[Owner] = []
        self.preempted: list[Owner] = []
        self.hashes: dict[Identity, int] = {}

    def hash_of(self, identity: Identity) -> int:
        return self.hashes.setdefault(identity, len(self.hashes))

    def arrive(self) -> Owner:
        """A prompt of few different ids, often whole blocks, often an earlier one again."""
        tokens = self.rng.randint(1, 6) * self.size + self.rng.choice((0, 0, 1))
        ids = [self.rng.randrange(2) for _ in range(-(-tokens // self.trace_tokens))]
        if self.prompts and self.rng.random() < 0.4:
            ids = self.rng.choice(self.prompts)
            tokens = min(len(ids) * self.trace_tokens, tokens)
        row = len(self.prompts)
        self.prompts.append(ids)
        sequence = Sequence(row, tokens, self.rng.choice((0, 1, 30)))
        self.runs.enter(sequence)
        spelled = [token_id for token_id in ids for _ in range(self.trace_tokens)]
        whole = tokens // self.size
        return Owner(sequence, [tuple(spelled[: (k + 1) * self.size]) for k in range(whole)])

    def identity(self, owner: Owner, block: int) -> Identity:
        if block < len(owner.identities):
            return owner.identities[block]
        return ("produced by", owner.sequence.row, block)

    def literal_hits(self, owner: Owner) -> tuple[list[BlockCopy], int]:
        hits: list[BlockCopy] = []
        active = 0
        while True:
            copy = self.literal.first_copy(self.hash_of(self.identity(owner, len(hits))))
            if copy is None:
                break
            if active == len(hits) and self.literal.is_active(copy):
                active += 1
            hits.append(copy)
        if owner.sequence.output_limit:
            most = (owner.sequence.known_tokens - 1) // self.size
            hits, active = hits[:most], min(active, most)
        return hits, active

    def admit(self, owner: Owner, chunk: int) -> bool:
        """Look up in both, compare, and admit if it fits; whether it did."""
        hits = self.runs.lookup(owner.sequence)
        copies, active = self.literal_hits(owner)
        assert (hits.blocks, hits.active_blocks) == (len(copies), active)
        known = owner.sequence.known_tokens
        if -(-known // self.size) - active > self.runs.free + self.runs.evictable:
            return False
        after = min(known, hits.blocks * self.size + chunk)
        fresh = self.literal.allocate(copies, -(-after // self.size) - len(copies))
        assert fresh is not None
        self.runs.admit(owner.sequence, hits, after)
        owner.copies = [*copies, *fresh]
        self.finalise(owner, len(copies) * self.size, after)
        self.running.append(owner)
        self.emit(owner)
        return True

    def finalise(self, owner: Owner, before: int, after: int) -> None:
        owner.computed = after
        for block in range(before // self.size, after // self.size):
            self.literal.publish(owner.copies[block], self.hash_of(self.identity(owner, block)))

    def compute(self, owner: Owner, tokens: int) -> bool:
        """Compute more of the known tokens, or decode one; False if the pool is short."""
        before, after = owner.computed, owner.computed + tokens
        needed = -(-after // self.size) - len(owner.copies)
        if needed > self.runs.free + self.runs.evictable:
            return False
        fresh = self.literal.allocate([], needed)
        assert fresh is not None
        owner.copies += fresh
        self.runs.take(needed)
        if owner not in self.decoding:
            self.runs.publish(owner.sequence, after)
        self.finalise(owner, before, after)
        self.emit(owner)
        return True

    def emit(self, owner: Owner) -> None:
        """A token, if everything known is computed; a request that wants none ends."""
        if owner.computed < owner.sequence.known_tokens:
            return
        if owner.sequence.output_limit:
            owner.sequence.known_tokens += 1
            if owner not in self.decoding:
                self.decoding.append(owner)
        else:
            self.release(owner, preempt=False)

    def release(self, owner: Owner, *, preempt: bool) -> None:
        self.running.remove(owner)
        if owner in self.decoding:
            self.decoding.remove(owner)
        self.literal.release(reversed(owner.copies))
        owner.copies = []
        if preempt:
            self.runs.preempt(owner.sequence, owner.computed)
            owner.sequence.furthest_tokens = max(owner.sequence.furthest_tokens, owner.computed)
            self.preempted.append(owner)
        else:
            self.runs.release(owner.sequence, owner.computed)

    def check(self) -> None:
        """Equal counts, and what the docstring of ``RunPool`` promises."""
        assert self.runs.free == self.literal.free
        assert self.runs.evictable == self.literal.unreferenced
        if self.rng.random() < 0.5:  # otherwise evictions stay owed for a while
            self.runs._evict_owed()
            assert self.runs.evictable == evictable_blocks(self.runs)
            check_trie(self.runs, [owner.sequence for owner in self.running])
        active = self.literal.active
        assert self.runs.free + self.runs.evictable + active == self.blocks


def evictable_blocks(pool: RunPool) -> int:
    """Blocks behind the entries of the queue that are not stale, and behind those runs."""
    total = 0
    stale: dict[int, int] = {}
    for entry in pool._queue:
        if isinstance(entry, int):
            total += entry
            continue
        stale[id(entry)] = stale.get(id(entry), 0) + 1
        if stale[id(entry)] <= entry.stale:
            continue
        if isinstance(entry, DuplicateBlock):
            total += 1
            continue
        total += entry.end - entry.start
        parent = entry.parent
        while parent is not None and not parent.references and parent.place is None:
            total += parent.end - parent.start
            parent = parent.parent
    return total


def check_trie(pool: RunPool, holders: list[Sequence]) -> None:
    """Every run is referenced by exactly who ends there or below, and never without its parent."""

    def check(run: Run) -> None:
        children = list((run.children or {}).values())
        held = sum(sequence.run is run for sequence in holders)
        expected = held + sum(child.references > 0 for child in children)
        assert run.references == expected + (2 if run is pool._root else 0)
        assert len(run.duplicates) == 0 or run.end - run.start == 1
        for child in children:
            assert child.parent is run
            assert child.start == run.end < child.end
            assert run.references > 0 or child.references == 0
            check(child)

    check(pool._root)


@pytest.mark.parametrize("seed", range(120))
def test_runs_find_and_evict_what_blocks_do(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((2, 4))
    trace_tokens = rng.choice((size, 2 * size, 3, 5))
    pools = Pools(rng, blocks=rng.choice((8, 16, 40)), size=size, trace_tokens=trace_tokens)
    for _ in range(150):
        draw = rng.random()
        partial = [owner for owner in pools.running if owner not in pools.decoding]
        if partial:
            rest = partial[0].sequence.known_tokens - partial[0].computed
            if not pools.compute(partial[0], rng.randint(1, rest)):
                pools.release(partial[0], preempt=True)
        elif draw < 0.4:
            again = bool(pools.preempted)
            owner = pools.preempted[-1] if again else pools.arrive()
            if pools.admit(owner, rng.choice((1, size, 100))) and again:
                pools.preempted.remove(owner)
        elif draw < 0.7:
            for owner in list(pools.running):
                if owner in pools.running and not pools.compute(owner, 1):
                    pools.release(pools.running[-1], preempt=True)
        elif pools.running:
            pools.release(rng.choice(pools.running), preempt=rng.random() < 0.3)
        pools.check()
    for owner in list(pools.running):
        pools.release(owner, preempt=False)
    pools.check()
    assert pools.runs.free + pools.runs.evictable == pools.blocks


def pool_of(*prompts: list[int], blocks: int = 100) -> tuple[RunPool, list[Sequence]]:
    """A pool of 4-token blocks, and a sequence per prompt of 4-token trace blocks."""
    pool = RunPool(blocks, 4, prompts=list(prompts), trace_block_tokens=4)
    sequences = [Sequence(row, 4 * len(ids) + 1, 5) for row, ids in enumerate(prompts)]
    for sequence in sequences:
        pool.enter(sequence)
    return pool, sequences


def admit(pool: RunPool, sequence: Sequence) -> int:
    hits = pool.lookup(sequence)
    pool.admit(sequence, hits, sequence.known_tokens)
    return hits.blocks


def test_prompts_share_their_common_blocks_alone() -> None:
    pool, (a, b, c) = pool_of([1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4, 5])
    assert [admit(pool, sequence) for sequence in (a, b, c)] == [0, 2, 4]
    assert pool.free == 100 - (5 + 3 + 2)  # each has a last block that is not whole


def test_the_deepest_block_goes_first() -> None:
    pool, (a, again) = pool_of([1, 2, 3, 4], [1, 2, 3, 4], blocks=6)
    admit(pool, a)
    pool.release(a, 17)
    assert (pool.free, pool.evictable) == (2, 4)
    pool.take(4)
    assert pool.lookup(again).blocks == 2


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    pool = RunPool(20, 4, prompts=[[1, 2], [1, 2]], trace_block_tokens=4)
    first, second = Sequence(0, 8, 5), Sequence(1, 8, 5)
    for sequence in (first, second):
        pool.enter(sequence)
    assert [admit(pool, first), admit(pool, second)] == [0, 1]
    assert second.duplicate is not None
    pool.release(first, 8)  # the first copy of block 1 is evicted first …
    assert pool.evictable == 1
    pool.take(pool.free + 1)
    third = Sequence(1, 8, 0)
    pool.enter(third)
    assert pool.lookup(third).active_blocks == 2  # … and the second one is found instead
    assert second.duplicate is None


def test_prompts_without_content_share_nothing() -> None:
    pool = RunPool(20, 4, prompts=None, trace_block_tokens=512)
    first, second = Sequence(0, 9, 5), Sequence(1, 9, 5)
    for sequence in (first, second):
        pool.enter(sequence)
    assert [admit(pool, first), admit(pool, second)] == [0, 0]
