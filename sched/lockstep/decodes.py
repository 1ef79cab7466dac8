"""Requests that decode in lock step, in aggregate."""

from __future__ import annotations

from heapq import heappop, heappush

from passtime.sched.lockstep.sequence import Sequence

NO_PASS = -1


class Decodes:
    """Sequences that get one token in every pass, one count per property instead of a loop.

    A member has, when pass t starts, t + delta computed and t + delta + 1 known tokens, and its
    delta is constant: so is the class of passes (modulo ``block_tokens``) in which it needs a
    block, and the pass of its last token.

    Invariants: ``count`` members; ``delta_sum`` = Σ delta; ``takers[c]`` = members with
    -delta ≡ c, Σ takers = count; every member is in ``finishing[member.last_pass]``. Entries of
    ``finishing`` whose sequence says another ``last_pass`` are stale.
    """

    def __init__(self, block_tokens: int, *, track_longest: bool = False) -> None:
        """Nobody decodes. ``track_longest`` keeps the longest member findable."""
        self.block_tokens = block_tokens
        self.count = 0
        self.delta_sum = 0
        self.takers = [0] * block_tokens
        self.finishing: dict[int, list[Sequence]] = {}
        self.last_stall = -1  # the latest pass in which a member stalled
        self._finish_passes: list[int] = []
        self.next_finish = NO_PASS  # no member finishes before it
        self._stale = False  # whether some finishing list may hold stale entries, or be unordered
        self._longest: list[tuple[int, int, int, Sequence]] | None = [] if track_longest else None

    # --- Members --------------------------------------------------------------------------------

    def join(self, sequences: list[Sequence], now: int) -> None:
        """Sequences that got a token in pass ``now``, not their last, decode from the next pass on.

        Their ``known_tokens`` include that token. There are some, in running order.
        """
        block_tokens, takers, finishing = self.block_tokens, self.takers, self.finishing
        for sequence in sequences:
            known = sequence.known_tokens
            sequence.delta = delta = known - now - 2
            sequence.first_pass = now
            left = sequence.output_limit + sequence.prompt_tokens - known
            sequence.last_pass = last_pass = now + left
            self.delta_sum += delta
            takers[-delta % block_tokens] += 1
            if last_pass in finishing:
                finishing[last_pass].append(sequence)
            else:
                finishing[last_pass] = [sequence]
                heappush(self._finish_passes, last_pass)
        self.next_finish = self._finish_passes[0]
        self.count += len(sequences)
        if self._longest is not None:
            for sequence in sequences:
                heappush(self._longest, (-sequence.delta, sequence.order, sequence.row, sequence))

    def leave(self, sequence: Sequence) -> None:
        """A member is preempted or stalls: the ``finishing`` entry of its last pass is stale."""
        self._stale = True
        self.count -= 1
        self.delta_sum -= sequence.delta
        self.takers[-sequence.delta % self.block_tokens] -= 1

    def finish(self, now: int) -> list[Sequence]:
        """Members whose last token comes in pass ``now`` leave, in running order.

        ``now`` is ``next_finish``.
        """
        heappop(self._finish_passes)
        self.next_finish = self._finish_passes[0] if self._finish_passes else NO_PASS
        finished = self.finishing.pop(now)
        if self._stale:
            finished = [sequence for sequence in finished if sequence.last_pass == now]
            finished.sort(key=lambda sequence: sequence.order)
        block_tokens, takers = self.block_tokens, self.takers
        for sequence in finished:
            delta = sequence.delta
            self.delta_sum -= delta
            takers[-delta % block_tokens] -= 1
        self.count -= len(finished)
        return finished

    def stall(self, sequence: Sequence, now: int) -> None:
        """A member gets no token in pass ``now``: everything of it comes one pass later."""
        self.leave(sequence)
        sequence.end_series(now - 1)
        sequence.known_tokens = now + sequence.delta + 1
        self.join([sequence], now)
        sequence.first_pass = now + 1
        self.last_stall = now

    # --- Questions ------------------------------------------------------------------------------

    def kv_tokens(self, now: int) -> int:
        """Σ known tokens of all members when pass ``now`` starts."""
        return self.count * (now + 1) + self.delta_sum

    def needs_block(self, sequence: Sequence, now: int) -> bool:
        """Whether a member needs a block in pass ``now``."""
        return (now + sequence.delta) % self.block_tokens == 0

    def blocks_needed(self, now: int, passes: int) -> int:
        """Blocks that all members take in ``passes`` passes from ``now`` on."""
        periods, rest = divmod(passes, self.block_tokens)
        start = now % self.block_tokens
        takers = self.takers
        blocks = periods * self.count + sum(takers[start : start + rest])
        wrapped = start + rest - self.block_tokens
        return blocks + sum(takers[:wrapped]) if wrapped > 0 else blocks

    def passes_within(self, now: int, blocks: int) -> int:
        """The most passes from ``now`` on that ``blocks`` blocks can feed; there are members."""
        periods, left = divmod(blocks, self.count)
        passes = periods * self.block_tokens
        while (needed := self.takers[(now + passes) % self.block_tokens]) <= left:
            left -= needed
            passes += 1
        return passes

    def longest_tokens(self, now: int) -> int:
        """Known tokens of the longest member that decodes in pass ``now``, 0 if none does."""
        if self.last_stall == now:
            members = (s for last, b in self.finishing.items() for s in b if s.last_pass == last)
            return max((now + s.delta + 1 for s in members if s.first_pass <= now), default=0)
        heap = self._longest
        assert heap is not None
        while heap:
            delta, order, _, sequence = heap[0]
            if sequence.last_pass >= now and (-delta, order) == (sequence.delta, sequence.order):
                return now + sequence.delta + 1
            heappop(heap)
        return 0
