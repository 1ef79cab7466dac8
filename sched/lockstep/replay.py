"""Replay of aggregated ranks in lock step: the driver's rules around the cores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from passtime.errors import DeadEndError, ProviderError, RunError
from passtime.sched.config import LaunchConfig
from passtime.sched.lockstep.arrivals import has_turns, source_of
from passtime.sched.lockstep.ranks import parts_of
from passtime.sched.lockstep.workers import Share, merged, shares_of_workers
from passtime.sched.replay.outcome import Outcome
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload

if TYPE_CHECKING:
    from passtime.sched.simulate import ReplayOptions


def supports(launch: LaunchConfig, workload: Workload, options: ReplayOptions) -> bool:
    """Whether :func:`replay_lockstep` is exact for this replay.

    Several workers have to be independent of one another: then who gets which request is known
    before anything runs.
    """
    engine = launch.engine
    independent = options.concurrency is None and not has_turns(workload)
    return (
        engine.backend in ("vllm", "sglang")
        and engine.worker_type == "aggregated"
        and engine.aic_nextn is None
        and engine.prefill_schedule_interval == 1
        and engine.prefill_decode_interval == 0
        and not engine.emit_kv_events
        and launch.dp_size == 1
        and (options.num_workers == 1 or independent)
    )


def replay_lockstep(
    workload: Workload,
    launch: LaunchConfig,
    timing: TimingModel,
    *,
    concurrency: int | None = None,
    arrival_speedup_ratio: float = 1.0,
    max_sim_time_ms: float | None = None,
    capture_admissions: bool = False,
    num_workers: int = 1,
) -> Outcome:
    """Replay a workload through ranks that :func:`supports` accepts (R-1 … R-23).

    Raises TraceError for arrivals that make no sense, RunError if the run cannot finish.
    """
    replays = lockstep_replays(
        workload,
        launch,
        timing,
        concurrency=concurrency,
        arrival_speedup_ratio=arrival_speedup_ratio,
        max_sim_time_ms=max_sim_time_ms,
        capture_admissions=capture_admissions,
        num_workers=num_workers,
    )
    failures: list[tuple[float, int, RunError]] = []
    for replay in replays:
        try:
            replay.run()
        except RunError as error:
            failures.append((replay.now_ms, replay.worker, error))
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2]
    _raise_if_stuck(replays)
    outcomes = [replay.outcome() for replay in replays]
    if num_workers == 1:
        return outcomes[0]
    return merged(outcomes, [replay.rows for replay in replays], num_workers)


def lockstep_replays(
    workload: Workload,
    launch: LaunchConfig,
    timing: TimingModel,
    *,
    concurrency: int | None,
    arrival_speedup_ratio: float,
    max_sim_time_ms: float | None,
    capture_admissions: bool,
    num_workers: int,
) -> list[LockstepReplay]:
    """One replay per worker that gets anything, none of them run."""
    if num_workers > 1:
        shares = shares_of_workers(workload, num_workers, arrival_speedup_ratio)
    else:
        source = source_of(
            workload, concurrency=concurrency, arrival_speedup_ratio=arrival_speedup_ratio
        )
        shares = [Share(0, workload, source, range(len(workload)))]
    return [
        LockstepReplay(
            share,
            launch,
            timing,
            max_sim_time_ms=max_sim_time_ms,
            capture_admissions=capture_admissions,
        )
        for share in shares
    ]


def _raise_if_stuck(replays: list[LockstepReplay]) -> None:
    """DeadEndError if requests remain that nothing can advance (R-15)."""
    in_flight = sum(replay.in_flight for replay in replays)
    if in_flight and not any(replay.stopped for replay in replays):
        raise DeadEndError(
            "offline replay detected an effect-free zero-duration pass with "
            f"{in_flight} in-flight requests remaining at "
            f"{max(replay.now_ms for replay in replays)} ms: "
            "they can never be scheduled (does a request outgrow the KV pool?)"
        )


class LockstepReplay:
    """Drives one rank under a virtual clock; ``run`` it once.

    ``in_flight`` requests have arrived and not ended; ``stopped`` says that time was up.
    """

    def __init__(
        self,
        share: Share,
        launch: LaunchConfig,
        timing: TimingModel,
        *,
        max_sim_time_ms: float | None,
        capture_admissions: bool,
    ) -> None:
        """Everything at time 0 (R-1)."""
        engine, workload = launch.engine, share.workload
        horizon_ms = math.inf if max_sim_time_ms is None else max_sim_time_ms
        self.rows = share.rows
        self.worker = share.worker
        self._launch = launch
        self._workload = workload
        self._source = share.source
        self._horizon_ms = horizon_ms
        self._rank, self._columns, self.pool, self._sequence = parts_of(
            engine,
            timing,
            workload,
            horizon_ms=horizon_ms,
            worker=share.worker,
            capture_admissions=capture_admissions,
        )
        self.in_flight = 0
        self.stopped = False
        self._completed_passes = 0  # the first of the rank's passes
        self._idle_passes = 0  # that changed nothing, and are none of the rank's
        self._committed_prefill_tokens = 0
        self.now_ms = 0.0

    def run(self) -> None:
        """Replay to the end (R-3), or to ``max_sim_time_ms`` (R-23), or until nothing can move.

        Raises ProviderError, with the place, if the model fails.
        """
        try:
            self._run_rounds()
        except ProviderError as error:
            ends_ms = self._rank.ends_ms
            passes = len(ends_ms)  # those before the failure, also of a stretch that was begun
            now_ms = ends_ms[-1] if passes > self._completed_passes else self.now_ms
            place = f"worker {self.worker}, pass {passes + self._idle_passes} at {now_ms} ms"
            raise ProviderError(f"{place}: {error}") from error

    def _run_rounds(self) -> None:
        """The main loop (R-1).

        One turn of the loop is a round of R-2, with the worker idle at its start. After a pass of
        no length the rank runs again before slots that it freed are refilled (R-12).
        """
        source, rank = self._source, self._rank
        while True:
            now_ms = self.now_ms
            changed = source.next_ms <= now_ms
            if changed:
                self._dispatch(now_ms)
            end_ms = rank.advance(now_ms, source.next_ms)
            while end_ms == now_ms:
                self._complete(end_ms)
                changed = True
                end_ms = rank.advance(now_ms, source.next_ms)
            if end_ms is None:
                if rank.waiting or rank.running:
                    self._idle_passes += 1
                if not changed and not self._wait():
                    return
                continue
            if source.next_ms <= now_ms:
                self._dispatch(now_ms)
            if end_ms > self._horizon_ms:
                self._stop_in_mid_pass()
                return
            self.now_ms = end_ms
            self._complete(end_ms)

    def _dispatch(self, now_ms: float) -> None:
        """Hand the rank what arrives up to ``now_ms``."""
        due = self._source.due(now_ms)
        workload, limit = self._workload, self._launch.engine.max_model_len
        prompts, outputs = workload.input_tokens, workload.output_tokens
        times_ms, submit, sequence = self._columns.arrival_ms, self._rank.submit, self._sequence
        for arrival_ms, row in due:
            prompt, output = prompts[row], outputs[row]
            if limit is not None:
                output = min(output, max(0, limit - prompt))
            times_ms[row] = arrival_ms
            submit(sequence(row, prompt, output))
        self.in_flight += len(due)

    def _complete(self, end_ms: float) -> None:
        """Apply the outputs of the latest pass (R-4)."""
        rank = self._rank
        self._completed_passes = len(rank.ends_ms)
        self._committed_prefill_tokens += rank.prefill_tokens
        if rank.ended or rank.rejected:
            self._apply_ends(rank.ended, rank.rejected, end_ms)

    def _apply_ends(self, ended: list[Any], rejected: list[Any], end_ms: float) -> None:
        columns, source_ended = self._columns, self._source.ended
        completed, last = columns.completed, self._completed_passes - 1
        for sequence in ended:
            completed(sequence, last)
            source_ended(sequence.row, end_ms)
        for sequence in rejected:
            columns.rejected(sequence.row, last)
            source_ended(sequence.row, end_ms)
        self.in_flight -= len(ended) + len(rejected)

    def _wait(self) -> bool:
        """Go to the next arrival; False if there is none, or none in time."""
        next_ms = self._source.next_ms
        self.stopped = self._horizon_ms < next_ms < math.inf
        if self.stopped or next_ms == math.inf:
            return False
        self.now_ms = next_ms
        return True

    def _stop_in_mid_pass(self) -> None:
        """The latest pass ends beyond the horizon: it has begun and is never completed (R-23)."""
        self.stopped = True
        ends_ms = self._rank.ends_ms
        self._completed_passes = len(ends_ms) - 1
        if self._completed_passes:
            self.now_ms = max(self.now_ms, ends_ms[-2])
        while (next_ms := self._source.next_ms) <= self._horizon_ms:
            self.now_ms = max(self.now_ms, next_ms)
            self._dispatch(next_ms)
        for sequence in self._rank.ended:
            self._columns.left_open(sequence, self._completed_passes - 1)

    def outcome(self) -> Outcome:
        """The columns, after ``run``."""
        rank, columns = self._rank, self._columns
        for sequence in (*rank.running, *rank.waiting):
            columns.left_open(sequence, self._completed_passes - 1)
        return columns.outcome(
            rank.ends_ms,
            scheduler=self.worker,
            clock_ms=self.now_ms,
            passes=self._completed_passes + self._idle_passes,
            preemptions=rank.preemptions,
            committed_prefill_tokens=self._committed_prefill_tokens,
            gpus_per_worker=self._launch.gpus_per_worker,
        )
