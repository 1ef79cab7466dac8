"""Replay with a prefill pool and a decode pool: the coordinator of handoffs (R-40 … R-45)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal
from uuid import UUID

import numpy as np

from passtime.errors import CommandError, DeadEndError
from passtime.sched.config import LaunchConfig
from passtime.sched.contract import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelSource,
    Command,
    CompletionEffects,
    DestinationReserved,
    HandoffId,
    LifecycleEvent,
    ReleaseSource,
    Request,
    ReserveDestination,
    SourceHeld,
    SubmitHandoffPrefill,
    TransferTiming,
)
from passtime.sched.group import GroupPass
from passtime.sched.replay.arrivals import Arrivals
from passtime.sched.replay.fleet import Fleet, StallGuard
from passtime.sched.replay.outcome import Outcome, PoolTimes, Status
from passtime.sched.replay.prompts import Prompts, row_of
from passtime.sched.replay.requestlog import RequestLog
from passtime.sched.timing import FloatArray, IntArray, TimingModel
from passtime.sched.workload.rows import Workload

Pool = Literal["prefill", "decode"]


@dataclass(slots=True)
class Handoff:
    """One request on its way through both pools; times in ms, NaN before they are known."""

    row: int
    arrival: int = 0  # how many requests arrived before it
    prefill: tuple[int, int] | None = None  # (worker, rank), once placed
    decode: tuple[int, int] | None = None
    failed: bool = False
    timing: TransferTiming | None = None
    missing_tokens: int | None = None
    prefill_admit_ms: float = math.nan
    source_held_ms: float = math.nan
    reserved_ms: float = math.nan
    activated_ms: float = math.nan
    decode_admit_ms: float = math.nan
    released_ms: float = math.nan
    prefill_reused_tokens: int = 0
    decode_reused_tokens: int = 0

    @property
    def handoff_id(self) -> HandoffId:
        """The id that both ranks know it by."""
        return UUID(int=self.row + 1)

    def admitted(self, pool: Pool, now_ms: float, reused_tokens: int) -> None:
        """First admission time and largest reuse, per pool."""
        if pool == "prefill":
            if math.isnan(self.prefill_admit_ms):
                self.prefill_admit_ms = now_ms
            self.prefill_reused_tokens = max(self.prefill_reused_tokens, reused_tokens)
        else:
            if math.isnan(self.decode_admit_ms):
                self.decode_admit_ms = now_ms
            self.decode_reused_tokens = max(self.decode_reused_tokens, reused_tokens)


class PooledReplay:
    """Drives both pools under one clock; ``run`` it once.

    vLLM and TensorRT-LLM prefill first and then reserve; SGLang reserves first (R-41).
    """

    def __init__(
        self,
        workload: Workload,
        prefill: tuple[LaunchConfig, TimingModel, int],
        decode: tuple[LaunchConfig, TimingModel, int],
        *,
        arrivals: Arrivals,
        max_sim_time_ms: float | None,
        capture_admissions: bool,
    ) -> None:
        """Each pool as (configuration, timing model, workers); everything at time 0."""
        self._workload = workload
        self._launches: dict[Pool, LaunchConfig] = {"prefill": prefill[0], "decode": decode[0]}
        self._decode_first = prefill[0].engine.backend == "sglang"
        self._arrivals = arrivals
        self._max_sim_time_ms = max_sim_time_ms
        self._prompts = Prompts(workload)
        self._log = RequestLog(len(workload), capture_admissions=capture_admissions)
        self._guard = StallGuard()
        self._fleets: dict[Pool, Fleet] = {
            "prefill": self._fleet("prefill", prefill),
            "decode": self._fleet("decode", decode),
        }
        self._placed: dict[Pool, int] = {"prefill": 0, "decode": 0}
        self._handoffs = [Handoff(row) for row in range(len(workload))]
        self._actions: deque[Callable[[], None]] = deque()
        self._deferred: dict[tuple[Pool, int], list[tuple[int, Callable[[], None]]]] = defaultdict(
            list
        )
        self._transfers: list[tuple[float, int, int]] = []  # ties go by order of arrival
        self._arrived = 0
        self._in_flight = 0
        self._now_ms = 0.0

    def _fleet(self, pool: Pool, parts: tuple[LaunchConfig, TimingModel, int]) -> Fleet:
        launch, timing, workers = parts
        return Fleet(
            launch,
            timing,
            workers,
            guard=self._guard,
            pooled=True,
            on_start=lambda worker, group_pass, now: self._started(pool, group_pass, now),
            on_complete=lambda worker, effects, now: self._completed(pool, worker, effects, now),
        )

    # --- Clock ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Replay to the end, or to ``max_sim_time_ms`` (R-23); DeadEndError as in R-15."""
        while True:
            self._drain()
            if self._done():
                break
            next_ms = self._next_time()
            if next_ms is None:
                raise DeadEndError(
                    "offline disagg replay encountered an effect-free zero-duration pass with "
                    f"{self._in_flight} in-flight requests remaining at {self._now_ms} ms"
                )
            if self._max_sim_time_ms is not None and next_ms > self._max_sim_time_ms:
                break
            self._now_ms = next_ms
        return self._outcome()

    def _drain(self) -> None:
        """Everything that can happen at this timestamp.

        The order of a round was found by experiment (R-42 says otherwise of arrivals): they come
        last, so that one at the very end of a pass misses the pass that starts there; and what a
        zero-length pass did shows in the next round.
        """
        changed = True
        while changed:
            changed = False
            for fleet in self._fleets.values():
                fleet.begin_round()
                fleet.apply_late(self._now_ms)
            while (due := self._due_fleet()) is not None:
                changed |= due.complete_next(self._now_ms)
            while self._transfers and self._transfers[0][0] <= self._now_ms:
                self._queue_activation(self._handoffs[heapq.heappop(self._transfers)[2]])
                changed = True
            while self._actions:
                self._actions.popleft()()
                changed = True
            for fleet in self._fleets.values():
                changed |= fleet.drive(self._now_ms)
            for arrival_ms, row in self._arrivals.due(self._now_ms):
                self._arrive(row, arrival_ms)
                changed = True

    def _due_fleet(self) -> Fleet | None:
        """The pool whose pass is the next to complete now: by end, the prefill pool first."""
        ends = {fleet.next_completion(): fleet for fleet in reversed(self._fleets.values())}
        due = [end_ms for end_ms in ends if end_ms is not None and end_ms <= self._now_ms]
        return ends[min(due)] if due else None

    def _done(self) -> bool:
        drained = all(fleet.is_drained() for fleet in self._fleets.values())
        return not self._in_flight and self._arrivals.exhausted() and drained

    def _next_time(self) -> float | None:
        times = [fleet.next_completion() for fleet in self._fleets.values()]
        times.append(self._transfers[0][0] if self._transfers else None)
        times.append(self._arrivals.next_time())
        return min((time for time in times if time is not None), default=None)

    # --- Actions (R-41) -------------------------------------------------------------------------

    def _arrive(self, row: int, arrival_ms: float) -> None:
        self._log.arrived(row, arrival_ms)
        self._in_flight += 1
        self._guard.progress()
        handoff = self._handoffs[row]
        handoff.arrival = self._arrived
        self._arrived += 1
        first = self._reserve if self._decode_first else self._submit_prefill
        self._actions.append(lambda: first(handoff))

    def _submit_prefill(self, handoff: Handoff) -> None:
        """Prefill with at most one token, which no client sees (R-43)."""
        handoff.prefill = self._place("prefill")
        request = self._prompts.request(handoff.row)
        limited = Request(
            request_id=request.request_id,
            tokens=request.tokens,
            max_output_tokens=min(1, request.max_output_tokens),
        )
        self._apply("prefill", handoff.prefill, SubmitHandoffPrefill(handoff.handoff_id, limited))

    def _reserve(self, handoff: Handoff) -> None:
        """Ask the decode rank for space, busy or not; a refusal ends the request (R-44)."""
        handoff.decode = self._place("decode")
        worker, dp_rank = handoff.decode
        self._log.scheduler[handoff.row] = worker * self._fleets["decode"].dp_size + dp_rank
        request = self._prompts.request(handoff.row)
        command = ReserveDestination(handoff.handoff_id, request)
        try:
            self._apply("decode", handoff.decode, command)
        except CommandError:
            self._log.scheduler[handoff.row] = -1  # the reference reports no place either
            self._log.ended(handoff.row, self._now_ms, Status.FAILED)
            handoff.failed = True
            if handoff.prefill is None:
                self._leave(handoff)
            else:
                self._defer("prefill", handoff, lambda: self._cancel_source(handoff))

    def _transfer(self, handoff: Handoff) -> None:
        """Both sides are ready: move the KV, at once where no timing says otherwise (R-41)."""
        assert handoff.timing is not None
        assert handoff.missing_tokens is not None
        delay_ms = handoff.timing.delay_ms(handoff.missing_tokens) or 0.0
        if delay_ms > 0:
            heapq.heappush(self._transfers, (self._now_ms + delay_ms, handoff.arrival, handoff.row))
        else:
            self._queue_activation(handoff)

    def _queue_activation(self, handoff: Handoff) -> None:
        self._actions.append(
            lambda: self._defer("decode", handoff, lambda: self._activate(handoff))
        )

    def _activate(self, handoff: Handoff) -> None:
        """The request may decode; its source is released next."""
        effects = self._apply("decode", handoff.decode, ActivateDestination(handoff.handoff_id))
        if isinstance(effects, Applied):
            handoff.activated_ms = self._now_ms
            self._actions.append(
                lambda: self._defer("prefill", handoff, lambda: self._release(handoff))
            )

    def _release(self, handoff: Handoff) -> None:
        self._apply("prefill", handoff.prefill, ReleaseSource(handoff.handoff_id))
        handoff.released_ms = self._now_ms

    def _cancel_source(self, handoff: Handoff) -> None:
        """Only now does a rejected or failed request leave its in-flight slot (R-44)."""
        self._apply("prefill", handoff.prefill, CancelSource(handoff.handoff_id))
        if handoff.decode is not None:
            self._defer("decode", handoff, lambda: self._cancel_destination(handoff))
        self._leave(handoff)

    def _cancel_destination(self, handoff: Handoff) -> None:
        self._apply("decode", handoff.decode, CancelDestination(handoff.handoff_id))

    def _leave(self, handoff: Handoff) -> None:
        """The request is over; with a failed one its session is, too (R-48)."""
        self._in_flight -= 1
        over = self._arrivals.abandoned if handoff.failed else self._arrivals.ended
        over(handoff.row, self._now_ms)

    def _place(self, pool: Pool) -> tuple[int, int]:
        """Round-robin over all ranks of the pool, one counter each (R-40)."""
        fleet = self._fleets[pool]
        number = self._placed[pool] % (len(fleet.engines) * fleet.dp_size)
        self._placed[pool] += 1
        return divmod(number, fleet.dp_size)

    def _defer(self, pool: Pool, handoff: Handoff, action: Callable[[], None]) -> None:
        """Act now, or at the end of the pass that the handoff's worker has in flight (R-41)."""
        place = handoff.prefill if pool == "prefill" else handoff.decode
        assert place is not None
        worker = place[0]
        if self._fleets[pool].engines[worker].pass_in_flight:
            again = (place[1], lambda: self._defer(pool, handoff, action))
            self._deferred[pool, worker].append(again)
        else:
            action()

    def _apply(self, pool: Pool, place: tuple[int, int] | None, command: Command) -> object:
        """Send a command and take note of the lifecycle events it caused; its result."""
        assert place is not None
        effects = self._fleets[pool].apply(*place, command, self._now_ms)
        self._note(effects.lifecycle_events)
        return effects.result

    # --- Effects --------------------------------------------------------------------------------

    def _started(self, pool: Pool, group_pass: GroupPass, now_ms: float) -> None:
        for rank in group_pass.ranks:
            self._log.preemptions += len(rank.start_effects.pressure_events)
            for admission in rank.start_effects.admissions:
                row, reused = row_of(admission.request_id), admission.reused_input_tokens
                self._log.admitted(row, now_ms, reused, pool)
                self._handoffs[row].admitted(pool, now_ms, reused)

    def _completed(
        self, pool: Pool, worker: int, effects: list[CompletionEffects], now_ms: float
    ) -> None:
        """Deferred actions are queued again, then outputs, then lifecycle events (R-42).

        What was deferred goes by rank, then by when it was deferred (R-48).
        """
        deferred = self._deferred.pop((pool, worker), [])
        self._actions.extend(action for _, action in sorted(deferred, key=itemgetter(0)))
        self._log.passes += 1
        for effect in effects:
            self._log.committed_prefill_tokens += effect.forward_pass.sum_prefill_tokens
            for output in effect.outputs:
                self._guard.progress()
                handoff = self._handoffs[row_of(output.request_id)]
                if pool == "decode" and output.token_id is not None:
                    self._log.token(handoff.row, now_ms)
                if output.completed:
                    self._ended(pool, handoff, now_ms, rejected=output.rejected)
            self._note(effect.lifecycle_events)

    def _ended(self, pool: Pool, handoff: Handoff, now_ms: float, *, rejected: bool) -> None:
        if pool == "prefill":
            if rejected:
                self._log.ended(handoff.row, now_ms, Status.REJECTED)
                self._actions.append(
                    lambda: self._defer("prefill", handoff, lambda: self._cancel_source(handoff))
                )
            return
        self._log.ended(handoff.row, now_ms, Status.REJECTED if rejected else Status.COMPLETED)
        self._leave(handoff)

    def _note(self, events: list[LifecycleEvent]) -> None:
        """What each event makes possible (R-41)."""
        for event in events:
            handoff = self._handoffs[row_of(event.request_id)]
            match event:
                case SourceHeld(_, _, timing):
                    handoff.timing, handoff.source_held_ms = timing, self._now_ms
                    follow = self._transfer if self._decode_first else self._reserve
                case DestinationReserved(_, _, missing_tokens):
                    handoff.missing_tokens, handoff.reserved_ms = missing_tokens, self._now_ms
                    follow = self._submit_prefill if self._decode_first else self._transfer
            self._actions.append(_call(follow, handoff))

    def _outcome(self) -> Outcome:
        prefill, decode = self._fleets["prefill"], self._fleets["decode"]
        handoffs = self._handoffs

        def times(name: str) -> FloatArray:
            return np.array([getattr(handoff, name) for handoff in handoffs], dtype=np.float64)

        def counts(name: str) -> IntArray:
            return np.array([getattr(handoff, name) for handoff in handoffs], dtype=np.int64)

        def number(place: tuple[int, int] | None) -> int:
            return -1 if place is None else place[0] * prefill.dp_size + place[1]

        return self._log.outcome(
            clock_ms=self._now_ms,
            workers={"prefill": len(prefill.engines), "decode": len(decode.engines)},
            gpus_per_worker={
                pool: launch.gpus_per_worker for pool, launch in self._launches.items()
            },
            pools=PoolTimes(
                prefill_scheduler=np.array([number(h.prefill) for h in handoffs], dtype=np.int64),
                prefill_admit_ms=times("prefill_admit_ms"),
                source_held_ms=times("source_held_ms"),
                destination_reserved_ms=times("reserved_ms"),
                destination_activated_ms=times("activated_ms"),
                decode_admit_ms=times("decode_admit_ms"),
                source_released_ms=times("released_ms"),
                prefill_reused_tokens=counts("prefill_reused_tokens"),
                decode_reused_tokens=counts("decode_reused_tokens"),
            ),
        )


def _call(action: Callable[[Handoff], None], handoff: Handoff) -> Callable[[], None]:
    return lambda: action(handoff)
