"""One pass of the vLLM-style rank, rule by rule (V-10 … V-86): the literal core.

Running requests first, then the queue, under the token budget and the block pool, preempting if
it must; then every request whose known tokens are all computed emits. One loop over requests, as
the rules read: the core for what is per request by nature, and the opinion that the aggregated
cores are tested against.
"""

from __future__ import annotations

from enum import Enum, auto

from passtime.sched.config import EngineConfig
from passtime.sched.contract import (
    Admission,
    CompletionEffects,
    LifecycleEvent,
    Output,
    PendingPass,
    PressureEvent,
    RankPass,
    SourceHeld,
    StartEffects,
    TransferTiming,
)
from passtime.sched.pass_timer import PassTimer
from passtime.sched.speculative import AcceptanceSampler
from passtime.sched.timing import TimingModel
from passtime.sched.vllm.commands import CommandedRank
from passtime.sched.vllm.interval import PrefillGate
from passtime.sched.vllm.requests import RequestState, RequestStatus
from passtime.sched.vllm.scheduled import ScheduledPass, WorkItem


class Verdict(Enum):
    """What became of one request's turn (V-40)."""

    SCHEDULED = auto()
    BLOCKED = auto()
    PREEMPTED_ITSELF = auto()


class VllmCore(CommandedRank):
    """The scheduler of a vLLM or TensorRT-LLM rank; ``Core`` in ``sched/core.py``."""

    def __init__(
        self,
        config: EngineConfig,
        timing: TimingModel,
        *,
        seed_offset: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """An empty rank; ``seed_offset`` separates the random streams of ranks (C-38)."""
        super().__init__(config, dp_rank=dp_rank)
        self._timer = PassTimer(timing, config)
        self._prefills = config.worker_type != "decode"
        self._decodes = config.worker_type != "prefill"
        self._rates = config.acceptance_rates if config.aic_nextn else ()
        self._sampler = AcceptanceSampler(
            seed=(config.aic_mtp_seed + seed_offset) % 2**64, rates=self._rates
        )
        self._gate = PrefillGate(config.prefill_schedule_interval, dp_size=dp_size)
        self._burst_reservation = 0  # blocks promised to the bursts of this pass (V-81)

    def execute_pass(self, now_ms: float) -> RankPass:
        """Schedule, compute and emit one pass (V-10); all state changes happen now."""
        work = ScheduledPass(self.config.token_budget, counts_prefill=self._prefills)
        work.prefills = self._gate.is_open(self.running)
        self._schedule_running(work, now_ms)
        self._schedule_waiting(work, now_ms)
        if not work.preempted:
            self._gate.scheduled(was_open=work.prefills, leaves_waiting=bool(self.waiting))
        outputs: list[Output] = []
        events: list[LifecycleEvent] = []
        self._complete_without_token(outputs, events)
        ready = self._ready()
        if self._rates:
            ready = self._reserve_bursts(ready, work, now_ms)
        end_ms = self._end_ms(now_ms, work, ready)
        bursts = self._bursts(ready)
        for request, burst in zip(ready, bursts, strict=True):
            self._emit(request, burst, outputs, events)
        self.pool.unreserve(self._burst_reservation)
        self._burst_reservation = 0
        outputs += [Output(r, None, completed=True, rejected=True) for r in work.rejected]
        forward_pass = work.forward_pass_metrics()
        self.add_queue_metrics(forward_pass)
        return RankPass(
            end_ms=end_ms,
            progressed=work.progressed,
            start_effects=StartEffects(
                admissions=work.admissions, pressure_events=work.pressure, kv_events=[]
            ),
            pending=PendingPass(
                started_at_ms=now_ms,
                effects=CompletionEffects(
                    outputs=outputs,
                    lifecycle_events=events,
                    kv_events=self.drain_kv_events(),
                    metrics=self.metrics(),
                    forward_pass=forward_pass,
                ),
            ),
        )

    def settle_group(self, *, group_prefilled: bool, group_worked: bool) -> None:
        """One more pass of the group since it was last drained (V-89)."""
        self._gate.group_passed()

    def group_drained(self) -> None:
        """The count of the prefill interval starts anew (V-89)."""
        self._gate.group_drained()

    # --- Scheduling (V-20 … V-45) ---------------------------------------------------------------

    def _schedule_running(self, work: ScheduledPass, now_ms: float) -> None:
        """Running requests in list order, while there is budget (V-20).

        A preemption of an earlier request shortens the list but not the index, so one request is
        skipped in this pass: the rule, not an oversight (V-21).
        """
        index = 0
        while index < len(self.running) and work.budget > 0:
            request = self.running[index]
            if not work.prefills and request.computed < request.prompt_tokens:
                index += 1  # held back, while later ones are served (V-89)
                continue
            verdict = self._schedule(request, work, now_ms, credit=None)
            if verdict is Verdict.BLOCKED:
                return
            if verdict is Verdict.SCHEDULED:
                index += 1

    def _schedule_waiting(self, work: ScheduledPass, now_ms: float) -> None:
        """The queue in strict order, while nothing was preempted in this pass (V-30 … V-38)."""
        while not work.preempted and len(self.running) < self.config.seqs_limit:
            head = self._head()
            if head is None:
                return
            if self.policy.rejects(head):
                self.remove(head)
                work.rejected.append(head.request_id)
                continue
            credit = self._admission_credit(head)
            if credit is None:
                return
            budget_before = work.budget
            if self._schedule(head, work, now_ms, credit=credit) is not Verdict.SCHEDULED:
                return
            self._admit(head, credit, work)
            if work.budget == budget_before == 0:
                return

    def _head(self) -> RequestState | None:
        """Next in line; while reservations wait only activated destinations may start (V-30)."""
        queue = self.materialized if self.destinations.pending else self.waiting
        return queue[0] if queue else None

    def _admission_credit(self, head: RequestState) -> int | None:
        """Cached tokens the head may start from, None if it does not fit (V-32 … V-35)."""
        if self._is_materialized(head):
            return head.prompt_tokens
        cached, active_cached = self._prefix_credit(head, makes_output=head.limit > head.generated)
        admitted = self.policy.admits(head, active_cached // self.config.block_tokens, self)
        return cached if admitted else None

    @staticmethod
    def _is_materialized(request: RequestState) -> bool:
        """An activated destination whose KV is all there (V-32)."""
        prompt = request.prompt_tokens
        return request.activated and request.computed >= prompt and request.allocated >= prompt

    def _prefix_credit(self, request: RequestState, *, makes_output: bool) -> tuple[int, int]:
        """Cached tokens, and those in active blocks (V-50), reduced so that one block or token is
        left to compute for a request that must produce logits (V-51).
        """
        hits, active = self.lookup(request)
        block_tokens, length = self.config.block_tokens, request.length
        cached = min(len(hits) * block_tokens, length)
        active_cached = min(active * block_tokens, length)
        if makes_output and self.policy.recomputes_last_block:
            cap = (length - 1) // block_tokens * block_tokens
            cached, active_cached = min(cached, cap), min(active_cached, cap)
            if self._rates and cached >= block_tokens:
                cached -= block_tokens
                active_cached = min(active_cached, cached)
        return cached, active_cached

    def _admit(self, head: RequestState, credit: int, work: ScheduledPass) -> None:
        """From the queue to the end of ``running`` (V-36, C-20)."""
        reused = 0 if head.activated and head.preemptions == 0 else credit
        self.waiting.remove(head)
        if head in self.materialized:
            self.materialized.remove(head)
        head.status = RequestStatus.RUNNING
        self.running.append(head)
        if head.credit is None:
            head.credit = reused
        work.admissions.append(Admission(head.request_id, reused))

    def _schedule(
        self, request: RequestState, work: ScheduledPass, now_ms: float, *, credit: int | None
    ) -> Verdict:
        """Give one request its tokens of this pass, preempting for blocks (V-40).

        ``credit`` is the waiting phase's prefix credit; None in the running phase.
        """
        length, prompt = request.length, request.prompt_tokens
        complete = request.remaining(self.config.max_model_len) == 0
        reused = 0
        if request.computed == 0:
            reused = (
                credit
                if credit is not None
                else self._prefix_credit(request, makes_output=not complete)[0]
            )
        before = request.computed + reused
        prompt_before = min(before, prompt)
        rest = length - before
        if not self.config.enable_chunked_prefill and prompt - prompt_before > work.budget:
            return Verdict.BLOCKED
        if not work.prefills and credit is not None and rest > 1:
            return Verdict.BLOCKED  # held back; a head with one token or none goes on (V-89)
        want = min(rest, work.budget)
        if want == 0 and rest > 0:
            return Verdict.BLOCKED
        after = before + want
        while after > request.allocated:
            if self.allocate(request, after, reused // self.config.block_tokens):
                break
            victim = self.policy.victim(self.running)
            if victim is None:
                after = before
                break
            self._preempt(victim, work, now_ms)
            work.undo(victim)
            if victim is request:
                return Verdict.PREEMPTED_ITSELF
        used = after - before
        request.computed = after
        if used == 0 and after < length:
            return Verdict.BLOCKED
        if after > request.furthest:
            request.furthest = after
            work.progressed = True
        self.finalise(request, before, after)
        work.add(
            WorkItem(
                request=request,
                used=used,
                before=before,
                prompt_new=min(after, prompt) - prompt_before,
                prompt_before=prompt_before,
                prompt_tokens=prompt,
                length=length,
                was_complete=complete,
            )
        )
        return Verdict.SCHEDULED

    def _preempt(self, victim: RequestState, work: ScheduledPass, now_ms: float) -> None:
        """Take a running request's blocks and tell of it (V-44, C-22)."""
        state_before = self.pressure_state()
        blocks_before = -(-victim.allocated // self.config.block_tokens)
        self.requeue_preempted(victim)
        work.pressure.append(
            PressureEvent(
                at_ms=now_ms,
                kind="vllm_preemption",
                request_id=victim.request_id,
                state_before=state_before,
                state_after=self.pressure_state(),
                request_active_blocks_before=blocks_before,
            )
        )

    # --- Emission (V-60 … V-69, V-80 … V-86) ----------------------------------------------------

    def _complete_without_token(self, outputs: list[Output], events: list[LifecycleEvent]) -> None:
        """Requests whose tokens are all computed and that want no more end first (V-60, V-65)."""
        for request in [r for r in self.running if self._is_computed(r) and not self._left(r)]:
            outputs.append(self._output(request, None, completed=True))
            self._finish(request, events)

    def _ready(self) -> list[RequestState]:
        """Running requests that get a token in this pass, in running order (V-60)."""
        return [r for r in self.running if self._is_computed(r) and self._left(r)]

    @staticmethod
    def _is_computed(request: RequestState) -> bool:
        return request.computed == request.length

    def _left(self, request: RequestState) -> int:
        return request.remaining(self.config.max_model_len)

    def _decode_batch(self, work: ScheduledPass, ready: list[RequestState]) -> list[RequestState]:
        """Whose step is charged as decode (V-61): on an aggregated worker a first token comes
        from its prefill forward; with speculation every burst is charged (V-80).
        """
        if not self._decodes:
            return []
        if self._rates or not self._prefills:
            return ready
        return [r for r in ready if r.generated > 0 or not work.computed_prompt(r)]

    def _end_ms(self, now_ms: float, work: ScheduledPass, ready: list[RequestState]) -> float:
        """When the pass ends: prefill plus decode (V-62), or the model's word on the whole."""
        if self._timer.whole_pass:
            decodes = ready if self._decodes else []
            return now_ms + self._timer.pass_ms(work.shape(decodes, self.config.total_kv_tokens))
        prefill = work.prefill_arguments()
        end_ms = now_ms + (self._timer.prefill_ms(*prefill) if prefill else 0.0)
        batch = self._decode_batch(work, ready)
        if not batch:
            return end_ms
        return end_ms + self._timer.decode_ms(len(batch), sum(r.length for r in batch))

    def _reserve_bursts(
        self, ready: list[RequestState], work: ScheduledPass, now_ms: float
    ) -> list[RequestState]:
        """Promise blocks for the longest bursts, preempting until they fit (V-81).

        Returns who is still ready. Victims keep their work items: that is the rule here.
        """
        longest = len(self._rates) + 1 if self._decodes else 1
        while ready:
            needed = sum(
                -(-(r.length + min(longest, self._left(r))) // r.block_tokens) - len(r.blocks)
                for r in ready
            )
            if self.pool.reserve([], needed):
                self.record_evictions()
                self._burst_reservation = needed
                break
            victim = self.policy.victim(self.running)
            if victim is None:
                return []
            self._preempt(victim, work, now_ms)
            ready = self._ready()
        return ready

    def _bursts(self, ready: list[RequestState]) -> list[int]:
        """Tokens that each ready request produces, all drawn before any is produced (V-83)."""
        if not self._rates or not self._decodes:
            return [1] * len(ready)
        return [min(self._sampler.accepted(), self._left(r)) for r in ready]

    def _emit(
        self,
        request: RequestState,
        burst: int,
        outputs: list[Output],
        events: list[LifecycleEvent],
    ) -> None:
        """Produce a request's tokens of this pass (V-63, V-84) and finish it if they were its last.

        Without speculation a token's KV is computed, and its slot allocated, in the next pass
        (V-41); in a burst it takes its slot at once.
        """
        for _ in range(burst):
            if self._rates:
                self.finalise(request, request.length - 1, request.length)
            token = request.append_output()
            if self._rates:
                self._take_burst_slot(request)
            completed = not self._left(request)
            outputs.append(self._output(request, token, completed=completed))
        if completed:
            self._finish(request, events)
        elif self._rates:
            request.computed = request.length - 1

    def _take_burst_slot(self, request: RequestState) -> None:
        """Cover the newest token, from the reservation if it starts a block (V-84)."""
        last = request.blocks[-1]
        if last.copy is None:
            last.copy = self.pool.take_reserved()
            self._burst_reservation -= 1
        request.allocated = request.length

    def _output(self, request: RequestState, token: int | None, *, completed: bool) -> Output:
        """An output; the first one tells the credit of the first admission (C-21)."""
        cached = None if request.reported_credit else request.credit
        request.reported_credit = True
        return Output(request.request_id, token, completed=completed, cached_tokens=cached)

    def _finish(self, request: RequestState, events: list[LifecycleEvent]) -> None:
        """Complete a request; a handoff prefill's blocks are held and announced (V-68, V-72)."""
        held = self.finish(request)
        if held is not None:
            events.append(SourceHeld(held, request.request_id, self._transfer_timing(request)))

    def _transfer_timing(self, request: RequestState) -> TransferTiming:
        return TransferTiming(
            mode=self.config.kv_transfer_timing_mode,
            full_prompt_tokens=request.prompt_tokens,
            kv_bytes_per_token=self.config.transfer_bytes_per_token,
            bandwidth_gb_s=self.config.kv_transfer_bandwidth,
        )
