"""One pass of the SGLang-style rank, rule by rule (S-28 … S-34): the literal core.

Prefill or decode, never both: if a prompt can be admitted the pass runs that batch alone, and
every running request waits. One loop over requests, as the rules read: the core for what is per
request by nature, and the opinion that the aggregated cores are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passtime.sched.config import EngineConfig
from passtime.sched.contract import (
    Admission,
    CompletionEffects,
    ForwardPassMetrics,
    LifecycleEvent,
    Output,
    PendingPass,
    PressureEvent,
    RankPass,
    RetryHint,
    SourceHeld,
    StartEffects,
    TransferTiming,
)
from passtime.sched.moments import variance
from passtime.sched.pass_timer import PassTimer
from passtime.sched.sglang.admission import (
    Admitted,
    NewTokenRatio,
    PrefillLimits,
    PrefillPass,
    sort_by_longest_prefix,
)
from passtime.sched.sglang.commands import CommandedRank
from passtime.sched.sglang.requests import RequestState
from passtime.sched.speculative import AcceptanceSampler
from passtime.sched.timing import PassShape, TimingModel


@dataclass(slots=True, kw_only=True)
class PassWork:
    """What the pass under way has done so far."""

    now_ms: float
    deferred: bool  # no prefill in this pass (S-42)
    rejected: list[RequestState] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    batch: list[Admitted] = field(default_factory=list)
    decode_lengths: list[int] = field(default_factory=list)  # before retraction (S-56)
    retracted: list[RequestState] = field(default_factory=list)
    pressure: list[PressureEvent] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    completed: list[RequestState] = field(default_factory=list)
    events: list[LifecycleEvent] = field(default_factory=list)
    duration_ms: float = 0.0
    progressed: bool = False  # somebody's KV reached further than ever before

    @property
    def prefill_tokens(self) -> int:
        """Prompt (and recomputed output) tokens that the pass computes."""
        return sum(admitted.computed_tokens for admitted in self.batch)

    @property
    def interval_idle(self) -> bool:
        """A deferred pass that found nobody to decode (S-44)."""
        return self.deferred and not self.decode_lengths

    @property
    def did_something(self) -> bool:
        """Whether the pass had any effect beyond looking at its queues."""
        return bool(self.outputs or self.admissions or self.batch or self.pressure)


class SglangCore(CommandedRank):
    """The scheduler of a SGLang rank; ``Core`` in ``sched/core.py``."""

    def __init__(
        self,
        config: EngineConfig,
        timing: TimingModel,
        *,
        seed_offset: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """An empty rank of ``dp_size``; ``seed_offset`` separates random streams (C-38).

        Raises ConfigError if the chunk cannot be divided among the ranks (S-4a).
        """
        super().__init__(config, dp_rank=dp_rank)
        self._timer = PassTimer(timing, config)
        self._limits = PrefillLimits.of(config, dp_size)
        self._ratio = NewTokenRatio.of(config, dp_size)
        self._charges_prefill = config.worker_type != "decode"
        speculates = config.aic_nextn and config.worker_type != "prefill"
        self._rates = config.acceptance_rates if speculates else ()
        self._longest_burst = len(self._rates) + 1
        self._sampler = AcceptanceSampler((config.aic_mtp_seed + seed_offset) % 2**64, self._rates)
        self._was_interval_idle = False  # the pass that settle_group() is to judge (S-44)

    # --- The pass -------------------------------------------------------------------------------

    def execute_pass(self, now_ms: float) -> RankPass:
        """Schedule and compute one pass (S-28); all state changes happen now."""
        work = PassWork(now_ms=now_ms, deferred=self.rounds_without_prefill > 0)
        ratio_before = self._ratio.value
        self._reject_overlong(work)
        self._promote_activated(work)
        if self.config.sglang.schedule_policy == "lpm":
            sort_by_longest_prefix(self.waiting, self.cache)
        if not (work.deferred or self.prebuilt or self.destinations.pending):
            self._admit(work)
        if work.batch:
            self._prefill(work)
        else:
            self._decode(work)
        self._finish_completed(work)
        self.waiting.extend(work.retracted)
        if not (work.retracted or work.batch or work.interval_idle):
            self._ratio.decay()
        ratio_changed = self._ratio.value != ratio_before
        self._was_interval_idle = work.interval_idle
        return self._report(work, ratio_changed)

    def group_drained(self) -> None:
        """Nothing here counts the passes of a group since it was drained."""

    def settle_group(self, *, group_prefilled: bool, group_worked: bool) -> None:
        """The group's pass was computed: count rounds without prefill (S-43, S-44)."""
        if group_prefilled:
            self.rounds_without_prefill = self.config.prefill_decode_interval
        else:
            self.rounds_without_prefill = max(0, self.rounds_without_prefill - 1)
        if self._was_interval_idle and not group_worked:
            self._ratio.reset()
        self._was_interval_idle = False

    # --- Queue to batch -------------------------------------------------------------------------

    def _reject_overlong(self, work: PassWork) -> None:
        """Prompts that leave no room for output go first (S-28.2)."""
        limit = self.config.max_model_len
        if limit is None:
            return
        work.rejected = [r for r in self.waiting if r.prompt_tokens >= limit]
        for request in work.rejected:
            self._cancel_scheduled(request)

    def _promote_activated(self, work: PassWork) -> None:
        """Activated destinations join the running requests (S-58)."""
        while self.prebuilt and len(self.running) < self._limits.max_num_seqs:
            request = self.prebuilt.popleft()
            self.running.append(request)
            work.admissions.append(Admission(request.request_id, 0))

    def _admit(self, work: PassWork) -> None:
        """Take the prefill batch from the queue (S-37 … S-40) and put it where it goes on (S-28.7).

        A prompt that is not through is published as far as it is and waits at the head.
        """
        prefill = PrefillPass(self.cache, self._limits, self.running, self._ratio)
        work.batch = prefill.take(self.waiting)
        for admitted in work.batch:
            request = admitted.request
            if admitted.is_first_chunk:
                work.admissions.append(Admission(request.request_id, admitted.prefix))
            if admitted.end > request.furthest:
                request.furthest = admitted.end
                work.progressed = True
            if admitted.end < request.length:
                self.cache.publish(request.lease, request.tokens)
                self.waiting.appendleft(request)
            else:
                self.running.append(request)

    # --- Prefill pass (S-29 … S-32) -------------------------------------------------------------

    def _prefill(self, work: PassWork) -> None:
        """Compute the batch; prompts that are through get their first token."""
        work.duration_ms = self._prefill_ms(work.batch)
        through = [a.request for a in work.batch if a.end == a.request.length]
        grows = [r for r in through if r.remaining > 1]
        for request in through:
            if request.remaining == 0:
                self._complete(request, None, work)
        for request in through:
            if request.remaining == 1:  # its only token needs no KV slot (S-31)
                self._complete(request, request.append_output(), work)
        growth = self._growth(grows, burst=1)
        self.cache.make_room(growth)
        slots = self.cache.reserve_slots(growth)
        if slots is None:
            return  # the first tokens come from a later decode pass (S-32)
        for request in grows:
            self._produce(request, slots, work)

    def _prefill_ms(self, batch: list[Admitted]) -> float:
        """What the batch takes; every member counts, also one that computes nothing (S-49)."""
        if not self._charges_prefill:
            return 0.0
        mean_isl = sum(a.end for a in batch) // len(batch)
        mean_prefix = sum(a.prefix for a in batch) // len(batch)
        if self._timer.whole_pass:
            return self._timer.pass_ms(self._prefill_shape(batch))
        if mean_isl == mean_prefix:
            return 0.0
        return self._timer.prefill_ms(len(batch), mean_isl, mean_prefix)

    def _prefill_shape(self, batch: list[Admitted]) -> PassShape:
        computing = [a for a in batch if a.computed_tokens]
        return PassShape(
            prefill_requests=len(computing),
            prefill_new_tokens=sum(a.computed_tokens for a in computing),
            prefill_prefix_tokens=sum(a.prefix for a in computing),
            prefill_pairs=sum(
                a.computed_tokens * a.prefix + a.computed_tokens * (a.computed_tokens + 1) // 2
                for a in computing
            ),
            decode_requests=0,
            decode_kv_tokens=0,
            decode_kv_max=0,
            total_kv_tokens=self.config.total_kv_tokens,
        )

    # --- Decode pass (S-33, S-34a) --------------------------------------------------------------

    def _decode(self, work: PassWork) -> None:
        """Every running request produces its burst, if the pool lets it grow."""
        for request in [r for r in self.running if r.remaining == 0]:
            self._complete(request, None, work)
        work.decode_lengths = [r.length for r in self.running]
        if not self.running:
            return
        growth = self._retract(work)
        duration_ms = self._decode_ms()
        slots = self.cache.reserve_slots(growth)
        if slots is None:
            return
        work.duration_ms = duration_ms
        for request in list(self.running):
            burst = min(self._sampler.accepted(), request.remaining) if self._rates else 1
            for _ in range(burst):
                self._produce(request, slots, work)
        self.cache.return_slots(slots)

    def _retract(self, work: PassWork) -> int:
        """Send requests back to the queue until the others can grow; return that growth (S-34a).

        The victim is the one with the fewest output tokens, the earliest of several.
        """
        while True:
            growth = self._growth(self.running, burst=self._longest_burst)
            if growth <= self.cache.attainable or len(self.running) == 1:
                break
            victim = min(self.running, key=lambda r: r.output_tokens)
            self._retract_one(victim, growth, work)
        if work.retracted:
            self._ratio.raise_for(
                survivors=len(self.running),
                produced_tokens=sum(r.output_tokens for r in self.running),
                limit_tokens=sum(r.output_limit for r in self.running),
            )
            self.generation += 1
        self.cache.make_room(growth)
        return growth

    def _retract_one(self, victim: RequestState, growth: int, work: PassWork) -> None:
        state_before = self.pressure_state()
        pages_before = len(victim.lease.pages)
        attainable_before = self.cache.attainable
        self.running.remove(victim)
        self.cache.release(victim.lease)
        work.retracted.append(victim)
        work.pressure.append(
            PressureEvent(
                at_ms=work.now_ms,
                kind="sglang_retraction",
                request_id=victim.request_id,
                state_before=state_before,
                state_after=self.pressure_state(),
                request_active_blocks_before=pages_before,
                logical_available_blocks_before=attainable_before // self.cache.page_tokens,
                required_blocks_before=self.cache.pages_for(growth),
            )
        )

    def _decode_ms(self) -> float:
        """What one step of all running requests takes, at their lengths before it (S-50)."""
        lengths = [r.length for r in self.running]
        if not self._timer.whole_pass:
            return self._timer.decode_ms(len(lengths), sum(lengths))
        return self._timer.pass_ms(
            PassShape(
                prefill_requests=0,
                prefill_new_tokens=0,
                prefill_prefix_tokens=0,
                prefill_pairs=0,
                decode_requests=len(lengths),
                decode_kv_tokens=sum(lengths),
                decode_kv_max=max(lengths),
                total_kv_tokens=self.config.total_kv_tokens,
            )
        )

    # --- Tokens and completions -----------------------------------------------------------------

    def _growth(self, requests: list[RequestState], *, burst: int) -> int:
        """Tokens of new pages that a burst of each request needs at most (S-27)."""
        return sum(
            max(0, self.cache.ceil(r.length + min(burst, r.remaining)) - self.cache.owned(r.lease))
            for r in requests
        )

    def _produce(self, request: RequestState, slots: list[int], work: PassWork) -> None:
        """One token with its KV slot, published at once unless it is the last (S-26, S-33.6)."""
        self.cache.take_slot(request.lease, slots)
        token = request.append_output()
        if request.remaining == 0:
            self._complete(request, token, work)
            return
        work.outputs.append(Output(request.request_id, token, completed=False))
        self.cache.publish(request.lease, request.tokens)

    def _complete(self, request: RequestState, token: int | None, work: PassWork) -> None:
        """A request's last output; its lease is settled at the end of the pass (S-28.9)."""
        self.running.remove(request)
        work.outputs.append(Output(request.request_id, token, completed=True))
        work.completed.append(request)

    def _finish_completed(self, work: PassWork) -> None:
        """Return leases to the tree and the pool, or hold them for a handoff (S-24, S-57)."""
        for request in work.completed:
            self.forget(request)
            self.generation += 1
            handoff_id = self.sources.hold(request)
            if handoff_id is None:
                self.cache.finish(request.lease, request.tokens)
                continue
            timing = TransferTiming(
                mode=self.config.kv_transfer_timing_mode,
                full_prompt_tokens=request.prompt_tokens,
                kv_bytes_per_token=self.config.transfer_bytes_per_token,
                bandwidth_gb_s=self.config.kv_transfer_bandwidth,
            )
            work.events.append(SourceHeld(handoff_id, request.request_id, timing))
        rejected = [
            Output(r.request_id, None, completed=True, rejected=True) for r in work.rejected
        ]
        work.outputs += rejected

    # --- Report ---------------------------------------------------------------------------------

    def _stuck(self, work: PassWork, ratio_changed: bool) -> str | None:
        """A lone request that cannot grow and never will: the same pass for ever (S-64)."""
        if work.deferred or ratio_changed or work.did_something or not work.decode_lengths:
            return None
        request = self.running[0]
        return (
            f"request {request.request_id} runs alone with {request.length} tokens and cannot "
            f"get another page: all {self.cache.total_pages} pages are taken and none can be "
            "evicted"
        )

    def _retry_hint(self, work: PassWork, ratio_changed: bool) -> RetryHint:
        """Whether a pass without effect may have one if repeated at once (S-62)."""
        if work.deferred:
            return self.rounds_without_prefill - 1
        return "retry" if ratio_changed else "exhausted"

    def _report(self, work: PassWork, ratio_changed: bool) -> RankPass:
        end_ms = work.now_ms + work.duration_ms
        metrics = self.metrics()
        first_chunks = [a for a in work.batch if a.is_first_chunk]
        metrics.sglang_cache_hit_tokens = sum(a.prefix for a in first_chunks)
        metrics.sglang_cache_total_tokens = metrics.sglang_cache_hit_tokens + work.prefill_tokens
        return RankPass(
            end_ms=end_ms,
            progressed=work.progressed,
            same_timestamp_retry=self._retry_hint(work, ratio_changed),
            stuck=self._stuck(work, ratio_changed),
            start_effects=StartEffects(
                admissions=work.admissions, pressure_events=work.pressure, kv_events=[]
            ),
            pending=PendingPass(
                started_at_ms=work.now_ms,
                effects=CompletionEffects(
                    outputs=work.outputs,
                    lifecycle_events=work.events,
                    kv_events=self.drain_kv_events(),
                    metrics=metrics,
                    forward_pass=self._forward_pass_metrics(work, end_ms - work.now_ms),
                ),
            ),
        )

    def _forward_pass_metrics(self, work: PassWork, duration_ms: float) -> ForwardPassMetrics:
        """What the pass computed, and what it left queued (S-56)."""
        computing = [a for a in work.batch if a.computed_tokens]
        forward_pass = ForwardPassMetrics(
            num_prefill_requests=len(computing),
            sum_prefill_tokens=work.prefill_tokens,
            var_prefill_length=variance([a.request.prompt_tokens for a in computing]),
            sum_prefill_kv_tokens=sum(a.prefix for a in computing),
            num_decode_requests=len(work.decode_lengths),
            sum_decode_kv_tokens=sum(work.decode_lengths),
            var_decode_kv_tokens=variance(work.decode_lengths),
            duration_ms=duration_ms,
        )
        self.add_queue_metrics(forward_pass)
        return forward_pass
