"""Offline replay of aggregated workers: one virtual clock, one thread (R-1 … R-23)."""

from __future__ import annotations

from passtime.errors import DeadEndError
from passtime.sched.config import LaunchConfig
from passtime.sched.contract import CompletionEffects, Submit
from passtime.sched.group import GroupPass
from passtime.sched.replay.arrivals import Arrivals
from passtime.sched.replay.fleet import Fleet, StallGuard
from passtime.sched.replay.outcome import Outcome, Status
from passtime.sched.replay.prompts import Prompts, row_of
from passtime.sched.replay.requestlog import RequestLog
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload


class AggregatedReplay:
    """Drives workers that prefill and decode; ``run`` it once."""

    def __init__(
        self,
        workload: Workload,
        launch: LaunchConfig,
        timing: TimingModel,
        *,
        arrivals: Arrivals,
        num_workers: int,
        max_sim_time_ms: float | None,
        capture_admissions: bool,
    ) -> None:
        """Everything at time 0 (R-1)."""
        self._launch = launch
        self._arrivals = arrivals
        self._max_sim_time_ms = max_sim_time_ms
        self._prompts = Prompts(workload)
        self._log = RequestLog(len(workload), capture_admissions=capture_admissions)
        self._guard = StallGuard()
        self._fleet = Fleet(
            launch,
            timing,
            num_workers,
            guard=self._guard,
            pooled=False,
            on_start=self._started,
            on_complete=self._completed,
        )
        self._in_flight = 0
        self._dispatched = 0
        self._now_ms = 0.0

    def run(self) -> Outcome:
        """Replay to the end (R-3), or to ``max_sim_time_ms`` (R-23).

        Raises DeadEndError if requests remain that nothing can advance (R-15).
        """
        while True:
            self._drain()
            if self._done():
                break
            next_ms = self._next_time()
            if next_ms is None:
                raise DeadEndError(
                    "offline replay detected an effect-free zero-duration pass with "
                    f"{self._in_flight} in-flight requests remaining at {self._now_ms} ms: "
                    "they can never be scheduled (does a request outgrow the KV pool?)"
                )
            if self._max_sim_time_ms is not None and next_ms > self._max_sim_time_ms:
                break
            self._now_ms = next_ms
        workers = len(self._fleet.engines)
        return self._log.outcome(
            clock_ms=self._now_ms,
            workers={"decode": workers},
            gpus_per_worker={"decode": self._launch.gpus_per_worker},
        )

    def _drain(self) -> None:
        """Everything that can happen at this timestamp (R-2)."""
        changed = True
        while changed:
            changed = False
            self._fleet.begin_round()
            while (end_ms := self._fleet.next_completion()) is not None and end_ms <= self._now_ms:
                self._fleet.complete_next(self._now_ms)
                changed = True
            for arrival_ms, row in self._arrivals.due(self._now_ms):
                self._dispatch(row, arrival_ms)
                changed = True
            changed |= self._fleet.drive(self._now_ms)

    def _done(self) -> bool:
        return not self._in_flight and self._arrivals.exhausted() and self._fleet.is_drained()

    def _next_time(self) -> float | None:
        times = (self._fleet.next_completion(), self._arrivals.next_time())
        return min((time for time in times if time is not None), default=None)

    def _dispatch(self, row: int, arrival_ms: float) -> None:
        """Place a request round-robin over workers, then over the worker's ranks (R-11)."""
        workers = len(self._fleet.engines)
        worker = self._dispatched % workers
        dp_rank = self._dispatched // workers % self._fleet.dp_size
        self._dispatched += 1
        self._log.arrived(row, arrival_ms)
        self._log.scheduler[row] = worker * self._fleet.dp_size + dp_rank
        self._in_flight += 1
        self._guard.progress()
        self._fleet.apply(worker, dp_rank, Submit(self._prompts.request(row)), self._now_ms)

    def _started(self, worker: int, group_pass: GroupPass, now_ms: float) -> None:
        for rank in group_pass.ranks:
            for admission in rank.start_effects.admissions:
                row = row_of(admission.request_id)
                self._log.admitted(row, now_ms, admission.reused_input_tokens)
            self._log.preemptions += len(rank.start_effects.pressure_events)

    def _completed(self, worker: int, effects: list[CompletionEffects], now_ms: float) -> None:
        """Apply outputs in order (R-4)."""
        self._log.passes += 1
        for effect in effects:
            self._log.committed_prefill_tokens += effect.forward_pass.sum_prefill_tokens
            for output in effect.outputs:
                self._guard.progress()
                row = row_of(output.request_id)
                if output.token_id is not None:
                    self._log.token(row, now_ms)
                if output.completed:
                    status = Status.REJECTED if output.rejected else Status.COMPLETED
                    self._log.ended(row, now_ms, status)
                    self._in_flight -= 1
                    self._arrivals.ended(row, now_ms)
