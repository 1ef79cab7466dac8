"""Every admission of a replay in the order it happened, and the histories they become (R-61)."""

from __future__ import annotations

from passtime.sched.replay.outcome import AdmissionRecord


class AdmissionLog:
    """``rows[k]`` is the request of the k-th admission, ``records[k]`` what it was."""

    __slots__ = ("records", "rows")

    def __init__(self) -> None:
        """Nobody was admitted."""
        self.rows: list[int] = []
        self.records: list[AdmissionRecord] = []

    def add(self, row: int, now_ms: float, reused_tokens: int, pool: str | None = None) -> None:
        """A request moved to running; ``pool`` only in a prefill/decode replay."""
        self.rows.append(row)
        self.records.append(AdmissionRecord(now_ms, reused_tokens, pool))

    def histories(self, requests: int) -> list[list[AdmissionRecord]]:
        """The admissions of each of ``requests`` requests."""
        histories: list[list[AdmissionRecord]] = [[] for _ in range(requests)]
        for row, record in zip(self.rows, self.records, strict=True):
            histories[row].append(record)
        return histories
