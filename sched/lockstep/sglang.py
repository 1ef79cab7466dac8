"""The SGLang-style rank in lock step: the rules of the literal core, at the cost of what happens.

A pass costs what its events cost: an admission, a chunk, a retraction, a completion. Requests that
decode undisturbed are counted in ``StepDecodes``; decode passes in which nothing happens at all
are made in one stretch. Only what a replay reports is kept: no outputs, no events, no metrics.

All running sequences are in step. The one that is only partly prefilled waits at the head of the
queue, as the rules have it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from passtime.errors import LiveLockError, RunError
from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.durations import durations
from passtime.sched.lockstep.pages import CountedPages, PagePool
from passtime.sched.lockstep.radix import RadixPages
from passtime.sched.lockstep.room import Room, may_exceed
from passtime.sched.lockstep.sglang_queue import Chunk, PrefillQueue, Wish
from passtime.sched.lockstep.step_columns import StepColumns
from passtime.sched.lockstep.steps import NEVER, StepDecodes, SteppedSequence
from passtime.sched.replay.stalls import (
    SAME_INSTANT_RETRIES,
    STALLED_PASSES,
    exhausted,
    live_lock,
    too_many_retries,
)
from passtime.sched.sglang.admission import LPM_QUEUE_LIMIT, NewTokenRatio, PrefillLimits
from passtime.sched.timing import PassShape, TimingModel
from passtime.sched.workload.rows import Workload


class SglangLockstepRank:
    """One aggregated SGLang-style rank, without speculation, intervals, handoff and KV events.

    ``ends_ms[t]`` is the end of pass t. ``ended`` and ``rejected`` are what the latest pass
    completed and rejected, in the order of its outputs; ``prefill_tokens`` what it computed.
    """

    def __init__(
        self,
        config: EngineConfig,
        timing: TimingModel,
        workload: Workload,
        columns: StepColumns,
        *,
        horizon_ms: float = math.inf,
        worker: int = 0,
    ) -> None:
        """An empty rank. A pass that ends beyond ``horizon_ms`` is the last."""
        self.ends_ms = array("d")
        self.ended: list[SteppedSequence] = []
        self.rejected: list[SteppedSequence] = []
        self.prefill_tokens = 0
        self.preemptions = 0
        self.running: dict[SteppedSequence, None] = {}
        self._columns = columns
        self._durations = durations(timing, config)
        self._whole_pass = self._durations.whole_pass
        self._page_tokens = config.block_tokens
        self._limits = PrefillLimits.of(config, 1)
        self._clip = self._limits.clip_max_new_tokens
        self._ratio = NewTokenRatio.of(config, 1)
        self._decodes = StepDecodes(
            config.block_tokens, clip_tokens=self._clip, track_longest=self._whole_pass
        )
        self.pool: PagePool = CountedPages(config.num_gpu_blocks, config.block_tokens)
        if config.enable_prefix_caching:
            self.pool = RadixPages(
                config.num_gpu_blocks,
                config.block_tokens,
                prompts=workload.block_ids,
                trace_block_tokens=workload.trace_block_size,
                decodes=self._decodes,
                step_passes=columns.step_passes,
            )
        self._queue = PrefillQueue(config, self._limits, self.pool)
        self.waiting = self._queue.waiting
        self._rejects = config.max_model_len is not None
        self._total_kv_tokens = config.total_kv_tokens
        self._horizon_ms = horizon_ms
        self._worker = worker
        self._order = 0  # of the next admission
        self._unpublished: list[SteppedSequence] = []  # members whose prompt is not published yet
        self._fruitless_passes = 0

    def submit(self, sequence: SteppedSequence) -> None:
        """A request arrived; a pass in flight does not see it."""
        self.pool.enter(sequence)
        self._queue.add(sequence)
        self._fruitless_passes = 0

    def advance(self, now_ms: float, until_ms: float) -> float | None:
        """Make one pass, or several decode passes that differ only in time; the end of the last.

        Stops after a pass that changes who runs, and, if a new request could matter, after the
        first pass that ends at ``until_ms`` or later. None without any request. Raises
        DeadEndError if a pass would change nothing, now or ever, LiveLockError as the literal
        core's replay does.
        """
        if not (self.waiting or self.running):
            return None
        self.pool.at(len(self.ends_ms))
        self.ended, self.prefill_tokens = [], 0
        queue = self._queue
        self.rejected = queue.reject_overlong() if queue.overlong else []
        if queue.sorts:
            queue.sort()
        looks = bool(self.waiting) and len(self.running) < self._limits.max_num_seqs
        wish = queue.wish() if looks else None
        if self._decodes.count and not (self.rejected or self._unpublished):
            steps = self._quiet_steps(looks, wish)
            if steps:
                return self._stretch(steps, now_ms, until_ms)
        return self._single_pass(wish, now_ms)

    # --- Stretches ------------------------------------------------------------------------------

    def _quiet_steps(self, looks: bool, wish: Wish | None) -> int:
        """Steps up to the next completion, included, before which nobody can be admitted.

        ``looks``: there is a slot for the head of the queue, which would take ``wish``, or cannot
        have anything (None).
        """
        decodes, pool, queue = self._decodes, self.pool, self._queue
        steps = decodes.steps_to_finish()
        if wish is not None:
            _, _, _, tokens, _ = wish
            steps = self._blocked_steps(tokens, steps)
            if not steps:
                return 0
        room = pool.free
        if not (queue.order_minds_evictions() or (looks and queue.head_minds_evictions())):
            room += pool.evictable
        if decodes.may_need_more(steps, room) and decodes.pages_needed(steps) > room:
            steps = decodes.steps_within(room)
        return steps

    def _blocked_steps(self, tokens: int, steps: int) -> int:
        """How many of ``steps`` begin without room for the head, surely (S-37, S-38.3)."""
        decodes, size = self._decodes, self._page_tokens
        attainable = (self.pool.free + self.pool.evictable) * size
        ratio, after_decay = self._ratio.value, self._ratio.after_decay
        if may_exceed(attainable, decodes.reserved_tokens * ratio, tokens):
            return 0
        takers, first = decodes.takers, decodes.step
        for step, reserved in enumerate(decodes.reserved_ahead(steps), first):
            if may_exceed(attainable, reserved * ratio, tokens):
                return step - first
            attainable -= takers[step % size] * size
            ratio = after_decay(ratio)
        return steps

    def _stretch(self, steps: int, now_ms: float, until_ms: float) -> float:
        """Up to ``steps`` passes of pure decoding."""
        decodes, ends_ms, pool = self._decodes, self.ends_ms, self.pool
        first = len(ends_ms)
        cut_ms = min(until_ms, self._horizon_ms) if self._arrivals_matter() else self._horizon_ms
        batch, kv_tokens = decodes.count, decodes.kv_tokens
        if self._whole_pass:
            self._durations.whole_pass_stretch(ends_ms, now_ms, self._decode_shape(), steps, cut_ms)
        else:
            self._durations.decode_stretch(ends_ms, now_ms, batch, kv_tokens, steps, cut_ms)
        made = len(ends_ms) - first
        pool.take(decodes.pages_needed(made), decodes.steps_within)
        self._columns.step_passes.extend(range(first, first + made))
        self._ratio.decay(made)
        self._fruitless_passes = 0
        decodes.advance(made - 1)
        self._finish_step(first + made - 1)
        return ends_ms[-1]

    def _arrivals_matter(self) -> bool:
        """Whether a new request could change anything before the next completion."""
        if self._rejects:
            return True  # it may be rejected in the next pass
        if self._queue.sorts:
            return len(self.waiting) <= LPM_QUEUE_LIMIT  # the queue is sorted with it
        return not self.waiting and len(self.running) < self._limits.max_num_seqs

    def _decode_shape(self) -> PassShape:
        decodes = self._decodes
        longest = decodes.longest_tokens()
        return PassShape(
            0, 0, 0, 0, decodes.count, decodes.kv_tokens, longest, self._total_kv_tokens
        )

    # --- One pass (S-28) ------------------------------------------------------------------------

    def _single_pass(self, wish: Wish | None, now_ms: float) -> float:
        """One pass with whatever happens in it."""
        number = len(self.ends_ms)
        batch = self._admit(wish, now_ms) if wish is not None else []
        if batch:
            end_ms = now_ms + self._prefill(batch, number, now_ms)
        elif self.running:
            end_ms = now_ms + self._decode(number, now_ms)
        elif self.rejected:
            self._ratio.decay()
            end_ms = now_ms
        else:
            raise self._dead_end(now_ms)
        self.ends_ms.append(end_ms)
        return end_ms

    def _dead_end(self, now_ms: float) -> RunError:
        """Nobody runs and the head cannot start: passes are repeated until the ratio is at rest."""
        retries, ratio = 0, self._ratio.value
        while (
            retries <= SAME_INSTANT_RETRIES and (lower := self._ratio.after_decay(ratio)) != ratio
        ):
            retries, ratio = retries + 1, lower
        if retries > SAME_INSTANT_RETRIES:
            return too_many_retries(self._worker, now_ms)
        return exhausted(self._worker, now_ms)

    # --- Admission (S-37 … S-40) ----------------------------------------------------------------

    def _admit(self, wish: Wish, now_ms: float) -> list[Chunk]:
        """The prefill batch; who is through its prompt joins ``running``."""
        slots = self._limits.max_num_seqs - len(self.running)
        attainable = (self.pool.free + self.pool.evictable) * self._page_tokens
        reserved, ratio = self._decodes.reserved_tokens, self._ratio.value
        room = Room(attainable, reserved, ratio, self._each_reserved)
        batch = self._queue.take(wish, room, slots)
        running, admitted = self.running, self._columns.admitted
        for sequence, prefix, end, is_first in batch:
            if is_first:
                admitted(sequence.row, now_ms, prefix)
            if end == sequence.known_tokens:
                running[sequence] = None
                sequence.order = self._order
                self._order += 1
        return batch

    def _each_reserved(self) -> Iterable[int]:
        step, clip = self._decodes.step, self._clip
        return (min(member.last_step - step + 1, clip) for member in self.running)

    # --- Prefill pass (S-29 … S-32) -------------------------------------------------------------

    def _prefill(self, batch: list[Chunk], number: int, now_ms: float) -> float:
        """Compute the batch, and give first tokens; how long it takes."""
        duration_ms = self._compute_ms(batch)
        progressed = False
        only_one: list[SteppedSequence] = []
        grows: list[SteppedSequence] = []
        for sequence, _, end, _ in batch:
            if end > sequence.furthest_tokens:
                sequence.furthest_tokens = end
                progressed = True
            if end < sequence.known_tokens:
                continue
            remaining = sequence.final_tokens - end
            if remaining > 1:
                grows.append(sequence)
            elif remaining:  # its only token needs no page (S-31)
                sequence.known_tokens += 1
                sequence.lead_pass = number
                only_one.append(sequence)
            else:
                self.ended.append(sequence)
        self.ended += only_one
        got_tokens = self._first_tokens(grows, number)
        for sequence in self.ended:
            del self.running[sequence]
            self.pool.finish(sequence, sequence.computed_tokens)
        if progressed or got_tokens or self.ended or self.rejected:
            self._fruitless_passes = 0
        else:
            self._count_fruitless(now_ms)
        return duration_ms

    def _compute_ms(self, batch: list[Chunk]) -> float:
        """Compute the batch; how long it takes.

        Every member counts, also one that computes nothing (S-49).
        """
        prefix_sum = isl_sum = 0
        for _, prefix, end, _ in batch:
            prefix_sum += prefix
            isl_sum += end
        self.prefill_tokens = isl_sum - prefix_sum
        if self._whole_pass:
            return self._durations.pass_ms(self._prefill_shape(batch))
        mean_isl, mean_prefix = isl_sum // len(batch), prefix_sum // len(batch)
        if mean_isl == mean_prefix:
            return 0.0
        return self._durations.prefill_ms(len(batch), mean_isl, mean_prefix)

    def _prefill_shape(self, batch: list[Chunk]) -> PassShape:
        computing = [(prefix, end - prefix) for _, prefix, end, _ in batch if end > prefix]
        return PassShape(
            prefill_requests=len(computing),
            prefill_new_tokens=sum(new for _, new in computing),
            prefill_prefix_tokens=sum(prefix for prefix, _ in computing),
            prefill_pairs=sum(n * prefix + n * (n + 1) // 2 for prefix, n in computing),
            decode_requests=0,
            decode_kv_tokens=0,
            decode_kv_max=0,
            total_kv_tokens=self._total_kv_tokens,
        )

    def _first_tokens(self, grows: list[SteppedSequence], number: int) -> bool:
        """First tokens of prompts that go on, if there is room for all of them (S-32)."""
        size, pool, decodes = self._page_tokens, self.pool, self._decodes
        pages = 0
        for sequence in grows:
            if sequence.known_tokens % size == 0:
                pages += 1
        pool.make_room(pages)
        fits = pages <= pool.free
        if fits:
            pool.take(pages)
        step, publish, join = decodes.step, pool.publish, decodes.join
        for sequence in grows:
            if fits:
                sequence.known_tokens = known = sequence.known_tokens + 1
                sequence.lead_pass = number
                publish(sequence, known)
                sequence.publishes_from = step
            else:
                self._unpublished.append(sequence)
            join(sequence)
        return fits and bool(grows)

    # --- Decode pass (S-33, S-34a) --------------------------------------------------------------

    def _decode(self, number: int, now_ms: float) -> float:
        """A token for every running sequence, if the pool lets them grow; how long it takes."""
        decodes, pool = self._decodes, self.pool
        retracted = self._retract()
        pages = decodes.pages_needed(1)
        if pages > pool.free + pool.evictable:
            raise LiveLockError(
                f"worker {self._worker} at {now_ms} ms: a request runs alone and cannot get "
                "another page: all are taken and none can be evicted"
            )
        if self._whole_pass:
            duration_ms = self._durations.pass_ms(self._decode_shape())
        else:
            duration_ms = self._durations.decode_ms(decodes.count, decodes.kv_tokens)
        pool.take(pages)
        self._columns.step_passes.append(number)
        for sequence in self._unpublished:
            if sequence.order != NEVER:
                known = decodes.step + sequence.delta + 1
                pool.publish(sequence, known, order=sequence.order)
                sequence.publishes_from = decodes.step + 1
        self._unpublished.clear()
        self._finish_step(number)
        if retracted:
            self._queue.come_back(retracted)
        else:
            self._ratio.decay()
        self._fruitless_passes = 0
        return duration_ms

    def _retract(self) -> list[SteppedSequence]:
        """Send sequences back until the others can grow: fewest outputs first (S-34a)."""
        decodes, pool, running = self._decodes, self.pool, self.running
        retracted: list[SteppedSequence] = []
        while decodes.pages_needed(1) > pool.free + pool.evictable and len(running) > 1:
            victim = min(running, key=lambda s: s.delta - s.prompt_tokens)
            del running[victim]
            decodes.leave(victim)
            victim.known_tokens = decodes.step + victim.delta
            pool.release(victim, victim.known_tokens)
            victim.computed_tokens = 0
            victim.order = NEVER
            victim.end_series(decodes.step - 1)
            retracted.append(victim)
        if retracted:
            self.preemptions += len(retracted)
            step = decodes.step
            self._ratio.raise_for(
                survivors=len(running),
                produced_tokens=sum(step + s.delta - s.prompt_tokens for s in running),
                limit_tokens=sum(s.output_limit for s in running),
            )
        return retracted

    def _finish_step(self, number: int) -> None:
        """Members whose last token came in pass ``number``, which is the present step's."""
        decodes, pool = self._decodes, self.pool
        finished = decodes.finish()
        if finished:
            pool.at(number, step_is_over=True)
            for sequence in finished:
                del self.running[sequence]
                pool.finish(sequence, decodes.step + sequence.delta + 1)
            self.ended = finished
        decodes.advance(1)

    def _count_fruitless(self, now_ms: float) -> None:
        """A prefill pass without output that got nowhere new; too many are a live-lock (R-15)."""
        self._fruitless_passes += 1
        if self._fruitless_passes >= STALLED_PASSES:
            raise live_lock(now_ms)
