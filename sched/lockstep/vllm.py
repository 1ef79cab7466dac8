"""The vLLM-style rank in lock step: the rules of the literal core, at the cost of what happens.

A pass costs what its events cost: an admission, a chunk, a preemption, a completion. Requests
that decode undisturbed are counted in ``Decodes``; passes in which nothing happens at all are
taken in one stretch. Only what a replay reports is kept: no outputs, no events, no metrics.

Two facts carry it. At most one running sequence is not in step, the ``partial`` one, whose known
tokens take several passes to compute: it took the whole budget, so nobody is admitted behind it
but sequences that need no token, and those end in the same pass. It is the last of ``running``.
And ``running`` never outnumbers the budget: each of its sequences used a token of the pass that
admitted the latest of them. So the budget never stops the running phase.
"""

from __future__ import annotations

import math
from array import array
from collections import deque

from passtime.errors import LiveLockError
from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.columns import Columns
from passtime.sched.lockstep.decodes import Decodes
from passtime.sched.lockstep.durations import durations
from passtime.sched.lockstep.pool import Pool
from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.lockstep.work import Chunk, pass_shape
from passtime.sched.replay.stalls import STALLED_PASSES
from passtime.sched.timing import PassShape, TimingModel


class LockstepRank:
    """One aggregated vLLM-style rank, without speculation, handoff and KV events.

    ``ends_ms[t]`` is the end of pass t. Of the latest pass, ``ended`` and ``rejected`` are what it
    completed and rejected, in the order of its outputs, and ``prefill_tokens`` what its items with
    prompt tokens computed (C-23).
    """

    def __init__(
        self,
        config: EngineConfig,
        timing: TimingModel,
        pool: Pool,
        columns: Columns,
        *,
        horizon_ms: float = math.inf,
    ) -> None:
        """An empty rank. A pass that ends beyond ``horizon_ms`` is the last."""
        self.ends_ms = array("d")
        self.ended: list[Sequence] = []
        self.rejected: list[Sequence] = []
        self.prefill_tokens = 0
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self._partial: Sequence | None = None
        self._columns = columns
        self._pool = pool
        self._durations = durations(timing, config)
        self._whole_pass = self._durations.whole_pass
        self._decodes = Decodes(config.block_tokens, track_longest=self._whole_pass)
        self._block_tokens = config.block_tokens
        self._budget = config.token_budget
        self._seqs_limit = config.seqs_limit
        self._length_limit = config.max_model_len or config.UNLIMITED
        self._pool_blocks = config.num_gpu_blocks
        self._total_kv_tokens = config.total_kv_tokens
        self._chunks_prompts = config.enable_chunked_prefill
        self._fifo = config.preemption_mode == "fifo"
        self._horizon_ms = horizon_ms
        self._next_order = 0  # of the next admission
        self._fruitless_passes = 0
        # False: the head of ``waiting`` would be blocked again. A head that does not fit the pool
        # stays so until something is released, or a partial prompt completes a block it shares:
        # decoding only shrinks the room, and evictions leave active hits alone. One that does not
        # fit the budget stays so while the batch does.
        self._look = False
        self._wants_nothing = False  # whether there were requests for no output at all

    def submit(self, sequence: Sequence) -> None:
        """A request arrived; a pass in flight does not see it."""
        if not self.waiting:
            self._look = True
        if not sequence.output_limit:
            self._wants_nothing = True
        self.waiting.append(sequence)
        self._pool.enter(sequence)
        self._fruitless_passes = 0

    def advance(self, now_ms: float, until_ms: float) -> float | None:
        """Make one pass, or several that differ only in time and blocks; the end of the last.

        Stops after a pass that changes who runs, and, if a new request could be admitted, after
        the first pass that ends at ``until_ms`` or later. None if a pass would change nothing.
        """
        if self.ended or self.rejected:
            self.ended, self.rejected = [], []
        if self._partial is None and self._decodes.count and not (self._look and self.waiting):
            end_ms = self._stretch(now_ms, until_ms)
            if end_ms is not None:
                return end_ms
        return self._single_pass(now_ms)

    # --- Stretches ------------------------------------------------------------------------------

    def _stretch(self, now_ms: float, until_ms: float) -> float | None:
        """Passes of pure decoding up to the next completion; None if the pool cannot feed one."""
        decodes, pool, ends_ms = self._decodes, self._pool, self.ends_ms
        now = len(ends_ms)
        passes = decodes.next_finish - now + 1
        blocks = decodes.blocks_needed(now, passes)
        room = pool.free + pool.evictable
        if blocks > room:
            passes = decodes.passes_within(now, room)
            if not passes:
                return None
            blocks = decodes.blocks_needed(now, passes)
        cut_ms = self._horizon_ms
        if until_ms < cut_ms and not self.waiting and len(self.running) < self._seqs_limit:
            cut_ms = until_ms  # whoever arrives then could be admitted
        batch, kv_tokens = decodes.count, decodes.kv_tokens(now)
        if self._whole_pass:
            longest, total = decodes.longest_tokens(now), self._total_kv_tokens
            shape = PassShape(0, 0, 0, 0, batch, kv_tokens, longest, total)
            self._durations.whole_pass_stretch(ends_ms, now_ms, shape, passes, cut_ms)
        else:
            self._durations.decode_stretch(ends_ms, now_ms, batch, kv_tokens, passes, cut_ms)
        made = len(ends_ms) - now
        pool.take(blocks if made == passes else decodes.blocks_needed(now, made))
        self.prefill_tokens = self._fruitless_passes = 0
        if decodes.next_finish == now + made - 1:
            self._finish_decodes(now + made - 1)
        return ends_ms[-1]

    # --- One pass (V-10) ------------------------------------------------------------------------

    def _single_pass(self, now_ms: float) -> float | None:
        """One pass with whatever happens in it."""
        now, decodes, pool = len(self.ends_ms), self._decodes, self._pool
        batch, kv_tokens, partial = decodes.count, decodes.kv_tokens(now), self._partial
        needed = decodes.takers[now % self._block_tokens]
        budget, tokens = self._budget - batch, 0
        if partial is not None:
            tokens, blocks = self._next_chunk(partial, budget)
            needed += blocks
        chunks: list[Chunk] = []
        preempted = needed > pool.free + pool.evictable
        if preempted:
            batch, kv_tokens = self._schedule_short(now, chunks)
            self._look = True
        else:
            if needed:
                pool.take(needed)
            if partial is not None:
                self._compute(partial, tokens, chunks)
            if self._look and self.waiting:
                self._admit_waiting(now_ms, budget - tokens, chunks)
        if not (batch or chunks or self.rejected or preempted):
            return None
        end_ms = self._end_ms(now_ms, batch, kv_tokens, chunks)
        self.ends_ms.append(end_ms)
        self._emit(now, chunks)
        if batch or self.rejected:
            self._fruitless_passes = 0
        else:
            self._count_fruitless(now_ms, chunks)
        return end_ms

    def _next_chunk(self, partial: Sequence, budget: int) -> tuple[int, int]:
        """Tokens that the partial sequence computes next, and the blocks it needs for them."""
        computed, size = partial.computed_tokens, self._block_tokens
        tokens = min(partial.known_tokens - computed, budget)
        return tokens, -(-(computed + tokens) // size) - -(-computed // size)

    def _compute(self, partial: Sequence, tokens: int, chunks: list[Chunk]) -> None:
        """The partial sequence computes its chunk; its blocks are taken."""
        before = partial.computed_tokens
        partial.computed_tokens = after = before + tokens
        self._pool.publish(partial, after)
        chunks.append((partial, before, tokens))
        if after == partial.known_tokens:
            self._partial = None

    # --- Running phase with a pool that is short (V-20, V-21, V-44) -----------------------------

    def _schedule_short(self, now: int, chunks: list[Chunk]) -> tuple[int, int]:
        """Schedule ``running`` in order and preempt as blocks are missing; (decodes, their Σ L).

        Only who needs a block is looked at. Positions are those of the order at the start, of
        which ``first`` … ``end`` still run.
        """
        order, decodes, pool = list(self.running), self._decodes, self._pool
        takers = deque(
            position
            for position, sequence in enumerate(order)
            if sequence is self._partial or decodes.needs_block(sequence, now)
        )
        first, end, position, scheduled = 0, len(order), 0, 0
        skipped: set[int] = set()
        while position < end:
            while takers and takers[0] < position:
                takers.popleft()
            taker = min(takers[0], end) if takers else end
            if taker > position:
                scheduled += taker - position
                position = taker
                continue
            sequence, turn = order[position], position - first
            tokens = needed = 1
            if sequence is self._partial:
                tokens, needed = self._next_chunk(sequence, self._budget - scheduled)
            removed, survives = 0, True
            while survives and needed > pool.free + pool.evictable:
                victim = first if self._fifo else end - 1
                undone = victim < position and victim not in skipped
                self._preempt(order[victim], now, scheduled=undone)
                scheduled -= undone
                removed += 1
                survives = victim != position
                if self._fifo:
                    first += 1
                else:
                    end -= 1
            if survives:
                pool.take(needed)
                if sequence is self._partial:
                    self._compute(sequence, tokens, chunks)
                else:
                    scheduled += 1
            # the index of V-20 does not follow when earlier ones are removed (V-21)
            following = position + 1
            if self._fifo:
                following += removed if survives else turn
            skipped.update(range(position + 1, min(following, end)))
            position = following
        return self._stall([order[p] for p in sorted(skipped) if p >= first], now)

    def _stall(self, skipped: list[Sequence], now: int) -> tuple[int, int]:
        """Running sequences whose turn never came get no token; (other decodes, their Σ L)."""
        decodes = self._decodes
        batch, kv_tokens = decodes.count, decodes.kv_tokens(now)
        for sequence in skipped:
            if sequence is not self._partial:
                batch -= 1
                kv_tokens -= now + sequence.delta + 1
                decodes.stall(sequence, now)
        return batch, kv_tokens

    def _preempt(self, victim: Sequence, now: int, *, scheduled: bool) -> None:
        """Take a running sequence's blocks; it is next in line (V-44).

        If it was ``scheduled`` in this pass already, the block it may have completed stays (V-45).
        """
        if victim is self._partial:
            self._partial = None
            computed = victim.computed_tokens
        else:
            self._decodes.leave(victim)
            computed = now + victim.delta + scheduled
            victim.known_tokens = now + victim.delta + 1
            victim.end_series(now - 1)
            victim.last_pass = -1
        victim.furthest_tokens = max(victim.furthest_tokens, computed)
        del self.running[victim]
        self.waiting.appendleft(victim)
        self._pool.preempt(victim, computed)
        self.preemptions += 1

    # --- Waiting phase (V-30 … V-38) ------------------------------------------------------------

    def _admit_waiting(self, now_ms: float, budget: int, chunks: list[Chunk]) -> None:
        """The queue in strict order, until its head is blocked."""
        waiting, running, pool, size = self.waiting, self.running, self._pool, self._block_tokens
        self._look = False
        while waiting and len(running) < self._seqs_limit:
            head = waiting[0]
            known = head.known_tokens
            blocks = -(-known // size)
            never_fits = blocks > self._pool_blocks and not head.furthest_tokens
            if never_fits or head.prompt_tokens >= self._length_limit:
                self.rejected.append(waiting.popleft())
                continue
            # what is short of budget now is so again in the next pass, if this one was all decodes
            short_again = self._partial is None and not chunks
            if not budget and head.output_limit:  # it needs one token at least (V-51)
                self._look = not short_again
                return
            hits = pool.lookup(head)
            if blocks - hits.active_blocks > pool.free + pool.evictable:
                self._look = self._partial is not None
                return
            before = hits.blocks * size
            used = known - before
            if used > budget:
                in_one = head.prompt_tokens - before if not self._chunks_prompts else 0
                if not budget or in_one > budget:
                    self._look = not short_again
                    return
                used = budget
            waiting.popleft()
            running[head] = None
            head.order = self._next_order
            self._next_order += 1
            pool.admit(head, hits, before + used)
            chunks.append((head, before, used))
            if before + used < known:
                head.computed_tokens = before + used
                self._partial = head
            self._columns.admitted(head.row, now_ms, before)
            budget -= used
            if not used and not budget:
                self._look = True
                return

    # --- The pass's end (V-60 … V-68) -----------------------------------------------------------

    def _end_ms(self, now_ms: float, batch: int, kv_tokens: int, chunks: list[Chunk]) -> float:
        """When the pass ends, given the decodes in step (V-61, V-62)."""
        in_step, in_step_tokens = batch, kv_tokens
        prompts = isl = prefix = computed = 0
        for sequence, before, used in chunks:
            prompt, after = sequence.prompt_tokens, before + used
            if before < prompt:
                prompts += 1
                prefix += before
                computed += used
                isl += after if after < prompt else prompt
            if after > prompt and after == sequence.known_tokens:  # recomputed: it decodes at once
                batch += 1
                kv_tokens += after
        self.prefill_tokens = computed
        if self._whole_pass:
            longest = self._decodes.longest_tokens(len(self.ends_ms))
            shape = pass_shape(chunks, in_step, in_step_tokens, longest, self._total_kv_tokens)
            return now_ms + self._durations.pass_ms(shape)
        if prompts:
            now_ms += self._durations.prefill_ms(prompts, isl // prompts, prefix // prompts)
        if batch:
            now_ms += self._durations.decode_ms(batch, kv_tokens)
        return now_ms

    def _emit(self, now: int, chunks: list[Chunk]) -> None:
        """Completions without a token, then a token for everybody who is computed (V-60, V-63)."""
        partial = self._partial
        if self._wants_nothing:
            for sequence, _, _ in chunks:
                if not sequence.output_limit and sequence is not partial:
                    self._end(sequence, sequence.known_tokens)
        if self._decodes.next_finish == now:
            self._finish_decodes(now)
        joining = []
        for sequence, _, _ in chunks:
            limit = sequence.output_limit
            if limit and sequence is not partial:
                sequence.known_tokens += 1
                if sequence.known_tokens - sequence.prompt_tokens < limit:
                    joining.append(sequence)
                else:
                    sequence.first_pass = sequence.last_pass = now
                    self._end(sequence, sequence.known_tokens - 1)
        if joining:
            self._decodes.join(joining, now)

    def _finish_decodes(self, now: int) -> None:
        """Sequences in step whose last token comes in pass ``now``."""
        running, release = self.running, self._pool.release
        finished = self._decodes.finish(now)
        for sequence in finished:
            del running[sequence]
            release(sequence, sequence.prompt_tokens + sequence.output_limit - 1)
        self.ended += finished
        self._look = True

    def _end(self, sequence: Sequence, computed_tokens: int) -> None:
        """A sequence completed (V-68)."""
        del self.running[sequence]
        self._pool.release(sequence, computed_tokens)
        self.ended.append(sequence)
        self._look = True

    def _count_fruitless(self, now_ms: float, chunks: list[Chunk]) -> None:
        """A pass without decodes; LiveLockError if too many in a row got nowhere new (R-15)."""
        partial = self._partial
        emitted = any(sequence is not partial for sequence, _, _ in chunks)
        advanced = any(before + used > s.furthest_tokens for s, before, used in chunks)
        self._fruitless_passes = 0 if emitted or advanced else self._fruitless_passes + 1
        if self._fruitless_passes >= STALLED_PASSES:
            raise LiveLockError(
                f"live-lock at {now_ms} ms: {STALLED_PASSES} passes without "
                "output or progress (requests keep taking each other's KV blocks)"
            )
