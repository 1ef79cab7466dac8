"""What a lock-step replay needs of a rank, and which rank serves which backend."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from passtime.sched.config import EngineConfig
from passtime.sched.lockstep.columns import Columns
from passtime.sched.lockstep.counts import CountedPool
from passtime.sched.lockstep.pool import Pool
from passtime.sched.lockstep.runs import RunPool
from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.lockstep.sglang import SglangLockstepRank
from passtime.sched.lockstep.step_columns import StepColumns
from passtime.sched.lockstep.steps import SteppedSequence
from passtime.sched.lockstep.vllm import LockstepRank
from passtime.sched.replay.outcome import Outcome
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload


class Counts(Protocol):
    """How much of a pool is not in use."""

    free: int
    evictable: int


class Rank(Protocol):
    """A rank in lock step. It and its columns agree on what a sequence is.

    ``ends_ms[t]`` is the end of pass t. ``ended`` and ``rejected`` are what the latest pass
    completed and rejected, in the order of its outputs; ``prefill_tokens`` what it prefilled.
    """

    ends_ms: array[float]
    ended: list[Any]
    rejected: list[Any]
    prefill_tokens: int
    preemptions: int
    waiting: deque[Any]
    running: dict[Any, None]

    def submit(self, sequence: Any) -> None:
        """A request arrived; a pass in flight does not see it."""
        ...

    def advance(self, now_ms: float, until_ms: float) -> float | None:
        """Make a pass, or several without an event; the end of the last, None if none is made."""
        ...


class TokenColumns(Protocol):
    """Where the times of a replay's requests are noted, as numbers of passes."""

    arrival_ms: array[float]

    def completed(self, sequence: Any, end_pass: int) -> None:
        """A request completed in ``end_pass``."""
        ...

    def rejected(self, row: int, end_pass: int) -> None:
        """A request was rejected in ``end_pass``."""
        ...

    def left_open(self, sequence: Any, last_pass: int) -> None:
        """The replay stopped after ``last_pass``, and the request had not ended (R-23)."""
        ...

    def outcome(
        self,
        ends_ms: array[float],
        *,
        scheduler: int,
        clock_ms: float,
        passes: int,
        preemptions: int,
        committed_prefill_tokens: int,
        gpus_per_worker: int,
    ) -> Outcome:
        """Pass numbers become times."""
        ...


class Parts(NamedTuple):
    """A rank, its columns and pool, and what makes a sequence of (row, prompt, output limit)."""

    rank: Rank
    columns: TokenColumns
    pool: Counts
    sequence: Callable[[int, int, int], Any]


def parts_of(
    engine: EngineConfig,
    timing: TimingModel,
    workload: Workload,
    *,
    horizon_ms: float,
    worker: int,
    capture_admissions: bool,
) -> Parts:
    """An empty rank of the configured backend for the requests of ``workload``."""
    if engine.backend == "sglang":
        steps = StepColumns(len(workload), capture_admissions=capture_admissions)
        sglang = SglangLockstepRank(
            engine, timing, workload, steps, horizon_ms=horizon_ms, worker=worker
        )
        return Parts(sglang, steps, sglang.pool, SteppedSequence)
    columns = Columns(len(workload), capture_admissions=capture_admissions)
    pool: Pool
    if engine.enable_prefix_caching:
        pool = RunPool(
            engine.num_gpu_blocks,
            engine.block_tokens,
            prompts=workload.block_ids,
            trace_block_tokens=workload.trace_block_size,
        )
    else:
        pool = CountedPool(engine.num_gpu_blocks, engine.block_tokens)
    vllm = LockstepRank(engine, timing, pool, columns, horizon_ms=horizon_ms)
    return Parts(vllm, columns, pool, Sequence)
