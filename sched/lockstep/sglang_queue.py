"""Who waits on a lock-step SGLang rank, and who gets into a prefill pass (S-35 … S-41)."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.pages import NO_MATCH, Match, PagePool
from passtime.sched.lockstep.room import Room
from passtime.sched.lockstep.steps import SteppedSequence
from passtime.sched.sglang.admission import LPM_HEAD_TOKENS, LPM_QUEUE_LIMIT, PrefillLimits

Chunk: TypeAlias = tuple[SteppedSequence, int, int, bool]
"""A sequence's share of a prefill pass: (sequence, prefix, end, whether it is the first one).

Tokens ``prefix`` … ``end`` are computed.
"""

Wish: TypeAlias = tuple[int, int, int, int, Match]
"""What the head of the queue would take next (S-38): (start, end, cost, room, match).

Tokens ``start`` … ``end``; ``cost`` is their pages in tokens, ``room`` what has to be exceeded by
the room there is. ``match`` is the cached prefix that a first chunk starts from.
"""


class PrefillQueue:
    """The waiting sequences of a rank: new ones, a partly prefilled one, retracted ones."""

    def __init__(self, config: EngineConfig, limits: PrefillLimits, pool: PagePool) -> None:
        """Nobody waits."""
        self.waiting: deque[SteppedSequence] = deque()
        self.sorts = config.enable_prefix_caching and config.sglang.schedule_policy == "lpm"
        self._limits = limits
        self._pool = pool
        self._page_tokens = config.block_tokens
        self._input_tokens = limits.max_prefill_tokens
        self._clip = limits.clip_max_new_tokens
        self._length_limit = config.max_model_len
        self.overlong = False  # whether prompts wait that will be rejected
        self._head_tokens = -(-LPM_HEAD_TOKENS // self._page_tokens) * self._page_tokens
        self._unsorted = False
        self._any_hits = False  # whether anybody had some when the queue was last sorted
        self._evicted_when_sorted = 0

    def add(self, sequence: SteppedSequence) -> None:
        """A request arrived."""
        self.waiting.append(sequence)
        self._unsorted = True
        if self.sorts:
            sequence.head = self._pool.head_key(sequence, self._head_tokens)
        limit = self._length_limit
        if limit is not None and sequence.prompt_tokens >= limit:
            self.overlong = True

    def come_back(self, retracted: list[SteppedSequence]) -> None:
        """Retracted sequences queue again (S-28.10)."""
        self.waiting.extend(retracted)
        self._unsorted = True

    def reject_overlong(self) -> list[SteppedSequence]:
        """Take out the prompts that leave no room for output (S-28.2)."""
        limit = self._length_limit
        if not self.overlong or limit is None:
            return []
        self.overlong = False
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
        if not (self._unsorted or self._hits_were_evicted()):
            return
        if len(self.waiting) > LPM_QUEUE_LIMIT:
            return
        self._unsorted, self._any_hits = False, False
        self._evicted_when_sorted = self._pool.evicted_pages
        match, head_tokens = self._pool.match, self._head_tokens
        heads: set[object] = set()

        def rank(sequence: SteppedSequence) -> tuple[bool, int]:
            hit = match(sequence, sequence.known_tokens).tokens
            deprioritised = False
            if hit:
                self._any_hits = True
            if hit <= LPM_HEAD_TOKENS and sequence.known_tokens >= head_tokens:
                deprioritised = sequence.head in heads
                heads.add(sequence.head)
            return deprioritised, -hit

        ordered = sorted(self.waiting, key=rank)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def _hits_were_evicted(self) -> bool:
        return self._any_hits and self._pool.evicted_pages != self._evicted_when_sorted

    def order_minds_evictions(self) -> bool:
        """Whether an eviction can change the order of the queue."""
        if not self.sorts or len(self.waiting) > LPM_QUEUE_LIMIT:
            return False
        return self._any_hits or self._unsorted

    def head_minds_evictions(self) -> bool:
        """Whether an eviction can let the head in.

        If its whole prompt fits one chunk, it only asks for more when its prefix is evicted.
        """
        head, limits, size = self.waiting[0], self._limits, self._page_tokens
        tokens = -(-head.known_tokens // size) * size
        one_chunk = tokens <= min(limits.chunk_tokens, limits.max_prefill_tokens)
        return head.computed_tokens == 0 and not one_chunk

    def wish(self, chunk_left: int | None = None) -> Wish | None:
        """The head's next chunk, of a whole chunk budget unless less is left (S-38.1 … 3).

        None if no room could let it in (S-38.2, 4).
        """
        size = self._page_tokens
        if chunk_left is None:
            chunk_left = self._limits.chunk_tokens
        head = self.waiting[0]
        known, start, match = head.known_tokens, head.computed_tokens, NO_MATCH
        if not start:
            match = self._pool.match(head, known - 1 if head.output_limit else known)
            start = match.tokens
        cost = -(-(known - start) // size) * size
        if cost <= chunk_left:
            if cost > self._input_tokens:
                return None
            remaining = head.final_tokens - known
            reserve = remaining if remaining < self._clip else self._clip
            return start, known, cost, cost + reserve, match
        cost = chunk_left // size * size
        if not cost or cost > self._input_tokens:
            return None
        return start, start + cost, cost, cost, match

    def take(self, wish: Wish | None, room: Room, slots: int) -> list[Chunk]:
        """Admit from the head, with its ``wish``, until one does not fit (S-38).

        A sequence that is only partly prefilled waits again, at the head (S-28.7).
        """
        waiting, acquire, extend = self.waiting, self._pool.acquire, self._pool.extend
        input_left, chunk_left = self._input_tokens, self._limits.chunk_tokens
        batch: list[Chunk] = []
        partial: list[SteppedSequence] = []
        while wish is not None:
            start, end, cost, tokens, match = wish
            if cost > input_left or not room.exceeds(tokens):
                break
            head = waiting[0]
            is_first = not head.computed_tokens
            if not (acquire(head, match, end) if is_first else extend(head, end=end)):
                break  # the pool does not have the pages (S-38.5)
            head.computed_tokens = end
            waiting.popleft()
            batch.append((head, start, end, is_first))
            if end < head.known_tokens:
                partial.append(head)
            room.charge(tokens)
            input_left -= cost
            chunk_left -= cost
            goes_on = len(batch) < slots and waiting and chunk_left > 0
            wish = self.wish(chunk_left) if goes_on else None
        for sequence in partial:
            self._pool.publish(sequence, sequence.computed_tokens)
            waiting.appendleft(sequence)
        self._unsorted |= bool(batch)
        return batch
