"""Token times as pass numbers: what a lock-step replay notes, and the outcome it becomes."""

from __future__ import annotations

import itertools
from array import array

import numpy as np

from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.replay.admissions import AdmissionLog
from passtime.sched.replay.outcome import Outcome, Status, compress_gaps
from passtime.sched.timing import FloatArray, IntArray

_NEVER = -1


class Columns:
    """One entry per request of a workload; token times are numbers of passes.

    A request that ends has one token in each pass from its first to its last, unless its series
    was broken by a preemption or a stall: those that were are in ``_broken``, all series of them.
    Nothing is noted per token.
    """

    def __init__(self, requests: int, *, capture_admissions: bool) -> None:
        """Nobody has arrived."""
        self.arrival_ms = array("d", [np.nan]) * requests
        self._first_admit_ms = array("d", [np.nan]) * requests
        self._first_pass = array("q", [_NEVER]) * requests
        self._end_pass = array("q", [_NEVER]) * requests
        self._reused_tokens = array("q", [0]) * requests
        self._first_reused_tokens = array("q", [0]) * requests
        self._readmissions: dict[int, int] = {}
        self._rejected: list[int] = []
        self._broken: dict[int, list[tuple[int, int]]] = {}
        self._open: dict[int, list[tuple[int, int]]] = {}
        self._admissions = AdmissionLog() if capture_admissions else None

    def admitted(self, row: int, now_ms: float, reused_tokens: int) -> None:
        """A request moved to running (C-20)."""
        if self._first_admit_ms[row] >= 0.0:
            self._readmissions[row] = self._readmissions.get(row, 0) + 1
            self._reused_tokens[row] = max(self._reused_tokens[row], reused_tokens)
        else:
            self._first_admit_ms[row] = now_ms
            if reused_tokens:
                self._reused_tokens[row] = self._first_reused_tokens[row] = reused_tokens
        if self._admissions is not None:
            self._admissions.add(row, now_ms, reused_tokens)

    def completed(self, sequence: Sequence, end_pass: int) -> None:
        """A request completed in ``end_pass``."""
        row = sequence.row
        self._end_pass[row] = end_pass
        if sequence.earlier is not None:
            self._broken[row] = sequence.series_until(end_pass)
        elif sequence.output_limit:
            self._first_pass[row] = sequence.first_pass

    def rejected(self, row: int, end_pass: int) -> None:
        """A request was rejected in ``end_pass``."""
        self._end_pass[row] = end_pass
        self._rejected.append(row)

    def left_open(self, sequence: Sequence, last_pass: int) -> None:
        """The replay stopped after ``last_pass``, and the request had not ended (R-23)."""
        series = sequence.series_until(last_pass)
        if series:
            self._open[sequence.row] = series

    # --- The outcome ----------------------------------------------------------------------------

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
        """Pass numbers become times; ``ends_ms`` are the ends of all passes."""
        ends = np.frombuffer(ends_ms) if ends_ms else np.zeros(0)
        first, end = _integers(self._first_pass), _integers(self._end_pass)
        unbroken = first >= 0
        output_tokens = np.where(unbroken, end - first + 1, 0)
        gap_ms, gap_count = self._gaps(ends, first[unbroken], end[unbroken])
        second = np.where(output_tokens > 1, first + 1, _NEVER)
        last = np.where(unbroken, end, _NEVER)
        for row, series in (self._broken | self._open).items():
            first[row], last[row] = series[0][0], series[-1][1]
            output_tokens[row] = sum(b - a + 1 for a, b in series)
            if output_tokens[row] > 1:
                second[row] = first[row] + 1 if series[0][1] > series[0][0] else series[1][0]
        status = np.where(end >= 0, int(Status.COMPLETED), int(Status.INCOMPLETE))
        status[self._rejected] = int(Status.REJECTED)
        arrival_ms, first_admit_ms = (
            np.frombuffer(self.arrival_ms),
            np.frombuffer(self._first_admit_ms),
        )
        admission_count = (first_admit_ms >= 0.0).astype(np.int64)
        for row, readmissions in self._readmissions.items():
            admission_count[row] += readmissions
        return Outcome(
            arrival_ms=arrival_ms,
            first_admit_ms=first_admit_ms,
            first_token_ms=_times(ends, first),
            second_token_ms=_times(ends, second),
            last_token_ms=_times(ends, last),
            terminal_ms=_times(ends, end),
            output_tokens=output_tokens,
            status=status,
            reused_tokens=_integers(self._reused_tokens),
            first_reused_tokens=_integers(self._first_reused_tokens),
            admission_count=admission_count,
            scheduler=np.where(arrival_ms >= 0.0, scheduler, -1),
            gap_ms=gap_ms,
            gap_count=gap_count,
            admissions=None
            if self._admissions is None
            else self._admissions.histories(len(arrival_ms)),
            clock_ms=clock_ms,
            passes=passes,
            preemptions=preemptions,
            committed_prefill_tokens=committed_prefill_tokens,
            gpus_per_worker={"decode": gpus_per_worker},
        )

    def _gaps(
        self, ends: FloatArray, first: IntArray, last: IntArray
    ) -> tuple[FloatArray, IntArray]:
        """The distribution of token gaps over all completed requests (R-51).

        Between two passes lies one gap per series that goes on from the first to the second, and
        one more between each two series of a broken request.
        """
        broken = [span for series in self._broken.values() for span in series]
        starts, stops = np.array(broken, dtype=np.int64).reshape(-1, 2).T
        passes = len(ends)
        opened = np.bincount(np.concatenate((first, starts)) + 1, minlength=passes + 1)
        closed = np.bincount(np.concatenate((last, stops)) + 1, minlength=passes + 1)
        ongoing = np.cumsum(opened - closed)[1:passes]
        gaps = np.diff(ends)
        several = ongoing > 0
        joints = [
            ends[later[0]] - ends[earlier[1]]
            for series in self._broken.values()
            for earlier, later in itertools.pairwise(series)
        ]
        return compress_gaps(
            np.concatenate((gaps[several], np.array(joints, dtype=np.float64))),
            np.concatenate((ongoing[several], np.ones(len(joints), dtype=np.int64))),
        )


def _integers(values: array[int]) -> IntArray:
    return np.frombuffer(values, dtype=np.int64).copy()


def _times(ends: FloatArray, passes: IntArray) -> FloatArray:
    """Ends of ``passes``, NaN for those that never happened."""
    happened = passes >= 0
    times = np.full(len(passes), np.nan)
    times[happened] = ends[passes[happened]]
    return times
