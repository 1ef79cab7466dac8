"""Who waits on a lock-step SGLang rank, and who gets into a prefill pass (S-35 … S-41)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.pages import PagePool
from passtime.sched.lockstep.room import Room
from passtime.sched.lockstep.steps import SteppedSequence
from passtime.sched.sglang.admission import LPM_HEAD_TOKENS, LPM_QUEUE_LIMIT, PrefillLimits


class Chunk(NamedTuple):
    """A sequence's share of a prefill pass: tokens ``prefix`` … ``end`` are computed."""

    sequence: SteppedSequence
    prefix: int
    end: int
    is_first: bool


class Wish(NamedTuple):
    """What the head of the queue would take next: tokens ``start`` … ``end`` (S-38).

    ``cost`` is their pages in tokens, ``room`` what has to be exceeded by the room there is.
    """

    start: int
    end: int
    cost: int
    room: int


class PrefillQueue:
    """The waiting sequences of a rank: new ones, a partly prefilled one, retracted ones."""

    def __init__(self, config: EngineConfig, limits: PrefillLimits, pool: PagePool) -> None:
        """Nobody waits."""
        self.waiting: deque[SteppedSequence] = deque()
        self.sorts = config.enable_prefix_caching and config.sglang.schedule_policy == "lpm"
        self._limits = limits
        self._pool = pool
        self._page_tokens = config.block_tokens
        self._length_limit = config.max_model_len
        self._overlong = False  # whether prompts wait that will be rejected
        self._unsorted = False
        self._evicted_when_sorted = 0

    def add(self, sequence: SteppedSequence) -> None:
        """A request arrived."""
        self.waiting.append(sequence)
        self._unsorted = True
        limit = self._length_limit
        if limit is not None and sequence.prompt_tokens >= limit:
            self._overlong = True

    def come_back(self, retracted: list[SteppedSequence]) -> None:
        """Retracted sequences queue again (S-28.10)."""
        self.waiting.extend(retracted)
        self._unsorted = True

    def reject_overlong(self) -> list[SteppedSequence]:
        """Take out the prompts that leave no room for output (S-28.2)."""
        limit = self._length_limit
        if not self._overlong or limit is None:
            return []
        self._overlong = False
        rejected = [s for s in self.waiting if s.prompt_tokens >= limit]
        kept = [s for s in self.waiting if s.prompt_tokens < limit]
        self.waiting.clear()
        self.waiting.extend(kept)
        return rejected

    def sort(self) -> None:
        """Longest prefix first (S-36).

        Sorting again changes nothing until queue or tree have changed: of the sequences with one
        uncached head, the one that kept its priority stands in front of the others.
        """
        evicted = self._pool.evicted_pages
        if not self._unsorted and evicted == self._evicted_when_sorted:
            return
        if len(self.waiting) > LPM_QUEUE_LIMIT:
            return
        self._unsorted, self._evicted_when_sorted = False, evicted
        head_tokens = -(-LPM_HEAD_TOKENS // self._page_tokens) * self._page_tokens
        heads: set[object] = set()

        def rank(sequence: SteppedSequence) -> tuple[bool, int]:
            hit = self._pool.peek(sequence, sequence.known_tokens)
            deprioritised = False
            if hit <= LPM_HEAD_TOKENS and sequence.known_tokens >= head_tokens:
                head = self._pool.head_key(sequence, head_tokens)
                deprioritised = head in heads
                heads.add(head)
            return deprioritised, -hit

        ordered = sorted(self.waiting, key=rank)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def head_has_hits(self) -> bool:
        """Whether an eviction can change what the head asks for."""
        head = self.waiting[0]
        return head.computed_tokens == 0 and self._pool.peek(head, head.known_tokens) > 0

    def wish(self, chunk_left: int | None = None) -> Wish | None:
        """The head's next chunk, of a whole chunk budget unless less is left (S-38.1 … 3).

        None if no room could let it in (S-38.2, 4).
        """
        limits, size = self._limits, self._page_tokens
        if chunk_left is None:
            chunk_left = limits.chunk_tokens
        head = self.waiting[0]
        known, start = head.known_tokens, head.computed_tokens
        if not start:
            start = self._pool.peek(head, known - 1 if head.output_limit else known)
        extension = known - start
        taken = extension
        if -(-extension // size) * size > chunk_left:
            taken = min(extension, chunk_left // size * size)
            if not taken:
                return None
        cost = -(-taken // size) * size
        if cost > limits.max_prefill_tokens or cost > chunk_left:
            return None
        through = taken == extension
        output_reserve = min(head.remaining, limits.clip_max_new_tokens) if through else 0
        return Wish(start, start + taken, cost, cost + output_reserve)

    def take(self, room: Room, slots: int) -> list[Chunk]:
        """Admit from the head until one does not fit; a partial one waits again (S-38, S-28.7)."""
        waiting = self.waiting
        input_left, chunk_left = self._limits.max_prefill_tokens, self._limits.chunk_tokens
        batch: list[Chunk] = []
        while len(batch) < slots and waiting and chunk_left > 0:
            wish = self.wish(chunk_left)
            if wish is None or wish.cost > input_left or not room.exceeds(wish.room):
                break
            chunk = self._lease(waiting[0], wish)
            if chunk is None:
                break
            waiting.popleft()
            batch.append(chunk)
            room.charge(wish.room)
            input_left -= wish.cost
            chunk_left -= wish.cost
        for sequence, _, end, _ in batch:
            if end < sequence.known_tokens:
                self._pool.publish(sequence, end)
                waiting.appendleft(sequence)
        self._unsorted |= bool(batch)
        return batch

    def _lease(self, head: SteppedSequence, wish: Wish) -> Chunk | None:
        """Get the pages of the head's chunk, if the pool has them (S-38.5)."""
        is_first = head.computed_tokens == 0
        prefix: int | None = wish.start
        if is_first:
            prefix = self._pool.acquire(head, end=wish.end, prefix=wish.start)
        elif not self._pool.extend(head, end=wish.end):
            prefix = None
        if prefix is None:
            return None
        head.computed_tokens = wish.end
        return Chunk(head, prefix, wish.end, is_first)
