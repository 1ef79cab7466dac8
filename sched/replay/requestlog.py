"""What happens to each request of a replay, collected event by event into an Outcome."""

from __future__ import annotations

from collections import Counter

import numpy as np

from passtime.sched.replay.admissions import AdmissionLog
from passtime.sched.replay.outcome import Outcome, PoolTimes, Status, compress_gaps
from passtime.sched.timing import FloatArray, IntArray

NEVER = float("nan")


class RequestLog:
    """Columns that fill as requests arrive, are admitted, emit and end (R-4, R-50, R-51)."""

    def __init__(self, requests: int, *, capture_admissions: bool) -> None:
        """Columns for ``requests`` requests; admission histories only if asked for."""
        self.arrival_ms = [NEVER] * requests
        self.first_admit_ms = [NEVER] * requests
        self.first_token_ms = [NEVER] * requests
        self.second_token_ms = [NEVER] * requests
        self.last_token_ms = [NEVER] * requests
        self.terminal_ms = [NEVER] * requests
        self.output_tokens = [0] * requests
        self.status = [int(Status.INCOMPLETE)] * requests
        self.reused_tokens = [0] * requests
        self.first_reused_tokens = [0] * requests
        self.admission_count = [0] * requests
        self.scheduler = [-1] * requests
        self.admissions = AdmissionLog() if capture_admissions else None
        self.committed_prefill_tokens = 0
        self.passes = 0
        self.preemptions = 0
        self._gaps: Counter[float] = Counter()
        self._open_gaps: dict[int, list[float]] = {}

    def arrived(self, index: int, now_ms: float) -> None:
        """A request was released to its worker."""
        self.arrival_ms[index] = now_ms

    def admitted(
        self, index: int, now_ms: float, reused_tokens: int, pool: str | None = None
    ) -> None:
        """A request moved to running; ``pool`` only in a prefill/decode replay (R-61)."""
        if self.admission_count[index] == 0:
            self.first_admit_ms[index] = now_ms
            self.first_reused_tokens[index] = reused_tokens
        self.admission_count[index] += 1
        self.reused_tokens[index] = max(self.reused_tokens[index], reused_tokens)
        if self.admissions is not None:
            self.admissions.add(index, now_ms, reused_tokens, pool)

    def token(self, index: int, now_ms: float) -> None:
        """A token became visible."""
        count = self.output_tokens[index]
        if count == 0:
            self.first_token_ms[index] = now_ms
        else:
            if count == 1:
                self.second_token_ms[index] = now_ms
            gap = now_ms - self.last_token_ms[index]
            self._open_gaps.setdefault(index, []).append(gap)
        self.last_token_ms[index] = now_ms
        self.output_tokens[index] = count + 1

    def ended(self, index: int, now_ms: float, status: Status) -> None:
        """A request reached its terminal state; its gaps count only if it completed (R-51)."""
        self.terminal_ms[index] = now_ms
        self.status[index] = int(status)
        gaps = self._open_gaps.pop(index, ())
        if status is Status.COMPLETED:
            self._gaps.update(gaps)

    def outcome(
        self,
        *,
        clock_ms: float,
        workers: dict[str, int],
        gpus_per_worker: dict[str, int],
        pools: PoolTimes | None = None,
    ) -> Outcome:
        """The finished columns."""
        gap_ms, gap_count = compress_gaps(
            np.array(list(self._gaps.keys()), dtype=np.float64),
            np.array(list(self._gaps.values()), dtype=np.int64),
        )
        return Outcome(
            arrival_ms=_floats(self.arrival_ms),
            first_admit_ms=_floats(self.first_admit_ms),
            first_token_ms=_floats(self.first_token_ms),
            second_token_ms=_floats(self.second_token_ms),
            last_token_ms=_floats(self.last_token_ms),
            terminal_ms=_floats(self.terminal_ms),
            output_tokens=_integers(self.output_tokens),
            status=_integers(self.status),
            reused_tokens=_integers(self.reused_tokens),
            first_reused_tokens=_integers(self.first_reused_tokens),
            admission_count=_integers(self.admission_count),
            scheduler=_integers(self.scheduler),
            gap_ms=gap_ms,
            gap_count=gap_count,
            admissions=None
            if self.admissions is None
            else self.admissions.histories(len(self.status)),
            pools=pools,
            clock_ms=clock_ms,
            passes=self.passes,
            preemptions=self.preemptions,
            committed_prefill_tokens=self.committed_prefill_tokens,
            workers=workers,
            gpus_per_worker=gpus_per_worker,
        )


def _floats(values: list[float]) -> FloatArray:
    return np.array(values, dtype=np.float64)


def _integers(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
