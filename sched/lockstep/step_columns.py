"""Token times of a lock-step SGLang rank: one from a prefill pass, then one per decode step."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import pairwise

import numpy as np

from passtime.sched.lockstep.steps import NEVER, SteppedSequence
from passtime.sched.replay.admissions import AdmissionLog
from passtime.sched.replay.outcome import Outcome, Status, compress_gaps
from passtime.sched.timing import FloatArray, IntArray

Series = tuple[int, int, int]
"""(pass of the leading token or NEVER, first step, last step); no steps: last < first."""


class StepColumns:
    """One entry per request of a workload; token times are numbers of passes and of steps.

    ``step_passes`` is the pass number of each step. Nothing is noted per token.
    """

    def __init__(self, requests: int, *, capture_admissions: bool) -> None:
        """Nobody has arrived."""
        self.arrival_ms = array("d", [np.nan]) * requests
        self.step_passes = array("q")
        self._first_admit_ms = array("d", [np.nan]) * requests
        self._lead_pass = array("q", [NEVER]) * requests
        self._first_step = array("q", [0]) * requests
        self._last_step = array("q", [NEVER]) * requests
        self._end_pass = array("q", [NEVER]) * requests
        self._reused_tokens = array("q", [0]) * requests
        self._first_reused_tokens = array("q", [0]) * requests
        self._readmissions: dict[int, int] = {}
        self._rejected: list[int] = []
        self._broken: dict[int, list[Series]] = {}
        self._open: dict[int, list[Series]] = {}
        self._admissions = AdmissionLog() if capture_admissions else None

    def admitted(self, row: int, now_ms: float, reused_tokens: int) -> None:
        """A request's first chunk was admitted (S-40)."""
        if self._first_admit_ms[row] >= 0.0:
            self._readmissions[row] = self._readmissions.get(row, 0) + 1
            self._reused_tokens[row] = max(self._reused_tokens[row], reused_tokens)
        else:
            self._first_admit_ms[row] = now_ms
            self._reused_tokens[row] = self._first_reused_tokens[row] = reused_tokens
        if self._admissions is not None:
            self._admissions.add(row, now_ms, reused_tokens)

    def completed(self, sequence: SteppedSequence, end_pass: int) -> None:
        """A request completed in ``end_pass``."""
        row = sequence.row
        self._end_pass[row] = end_pass
        if sequence.earlier is None:
            self._lead_pass[row] = sequence.lead_pass
            self._first_step[row] = sequence.first_step
            self._last_step[row] = sequence.last_step
        else:
            self._broken[row] = self._series(sequence, end_pass)

    def rejected(self, row: int, end_pass: int) -> None:
        """A request was rejected in ``end_pass``."""
        self._end_pass[row] = end_pass
        self._rejected.append(row)

    def left_open(self, sequence: SteppedSequence, last_pass: int) -> None:
        """The replay stopped after ``last_pass``, and the request had not ended (R-23)."""
        series = self._series(sequence, last_pass)
        if series:
            self._open[sequence.row] = series

    def _series(self, sequence: SteppedSequence, last_pass: int) -> list[Series]:
        """All tokens of a sequence up to ``last_pass``."""
        steps = bisect_right(self.step_passes, last_pass)
        present = (sequence.lead_pass, sequence.first_step, sequence.last_step)
        series = []
        for lead, first, last in (*(sequence.earlier or ()), present):
            kept = lead if lead <= last_pass else NEVER
            until = min(last, steps - 1)
            if kept >= 0 or until >= first:
                series.append((kept, first, until))
        return series

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
        steps = ends[_integers(self.step_passes)] if self.step_passes else np.zeros(0)
        end_pass = _integers(self._end_pass)
        lead, first, last = map(_integers, (self._lead_pass, self._first_step, self._last_step))
        lead_ms = _at(ends, lead, lead >= 0)
        stepped = last >= first
        led = lead >= 0
        output_tokens = np.where(stepped, last - first + 1, 0) + led
        first_step_ms, last_step_ms = _at(steps, first, stepped), _at(steps, last, stepped)
        first_ms = np.where(led, lead_ms, first_step_ms)
        last_ms = np.where(stepped, last_step_ms, lead_ms)
        second_ms = np.where(led, first_step_ms, _at(steps, first + 1, last > first))
        gap_ms, gap_count = self._gaps(ends, steps, lead_ms, first_step_ms, first, last)
        for row, series in (self._broken | self._open).items():
            times = _token_times(series, ends, steps)
            output_tokens[row] = len(times)
            first_ms[row], last_ms[row] = times[0], times[-1]
            if len(times) > 1:
                second_ms[row] = times[1]
        status = np.where(end_pass >= 0, int(Status.COMPLETED), int(Status.INCOMPLETE))
        status[self._rejected] = int(Status.REJECTED)
        arrival_ms = np.frombuffer(self.arrival_ms)
        first_admit_ms = np.frombuffer(self._first_admit_ms)
        admission_count = (first_admit_ms >= 0.0).astype(np.int64)
        for row, readmissions in self._readmissions.items():
            admission_count[row] += readmissions
        return Outcome(
            arrival_ms=arrival_ms,
            first_admit_ms=first_admit_ms,
            first_token_ms=first_ms,
            second_token_ms=second_ms,
            last_token_ms=last_ms,
            terminal_ms=_at(ends, end_pass, end_pass >= 0),
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
        self,
        ends: FloatArray,
        steps: FloatArray,
        lead_ms: FloatArray,
        first_step_ms: FloatArray,
        first: IntArray,
        last: IntArray,
    ) -> tuple[FloatArray, IntArray]:
        """The distribution of token gaps over all completed requests (R-51).

        Between two steps lies one gap per request that has a token in both; a leading token and
        the first step, and the series of a broken request, are joined by one gap each.
        """
        broken = [(a, b) for series in self._broken.values() for _, a, b in series if b >= a]
        starts, stops = np.array(broken, dtype=np.int64).reshape(-1, 2).T
        stepped = last >= first
        count = len(steps)
        opened = np.bincount(np.concatenate((first[stepped], starts)) + 1, minlength=count + 1)
        closed = np.bincount(np.concatenate((last[stepped], stops)) + 1, minlength=count + 1)
        ongoing = np.cumsum(opened - closed)[1:count]
        several = ongoing > 0
        joints = first_step_ms - lead_ms
        joints = joints[~np.isnan(joints)]
        others = [gap for series in self._broken.values() for gap in _joints(series, ends, steps)]
        return compress_gaps(
            np.concatenate((np.diff(steps)[several], joints, np.array(others, dtype=np.float64))),
            np.concatenate((ongoing[several], np.ones(len(joints) + len(others), dtype=np.int64))),
        )


def _token_times(series: list[Series], ends: FloatArray, steps: FloatArray) -> FloatArray:
    """When each token of a request came."""
    parts = []
    for lead, first, last in series:
        if lead >= 0:
            parts.append(ends[lead : lead + 1])
        parts.append(steps[first : last + 1])
    return np.concatenate(parts)


def _joints(series: list[Series], ends: FloatArray, steps: FloatArray) -> list[float]:
    """Gaps of a request that are not from one step to the next within one series."""
    runs: list[tuple[float, float]] = []
    for lead, first, last in series:
        if lead >= 0:
            runs.append((float(ends[lead]), float(ends[lead])))
        if last >= first:
            runs.append((float(steps[first]), float(steps[last])))
    return [later[0] - earlier[1] for earlier, later in pairwise(runs)]


def _integers(values: array[int]) -> IntArray:
    return np.frombuffer(values, dtype=np.int64).copy() if values else np.zeros(0, dtype=np.int64)


def _at(times: FloatArray, places: IntArray, happened: np.ndarray) -> FloatArray:
    """Times at ``places``, NaN where nothing happened."""
    found = np.full(len(places), np.nan)
    found[happened] = times[places[happened]]
    return found
