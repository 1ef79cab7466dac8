"""What a replay leaves behind: columns, one entry per request, and a few totals.

Every core writes this and the report reads it, so that equal columns mean equal reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from passtime.sched.timing import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


class Status(IntEnum):
    """How a request ended; INCOMPLETE until it does (R-23)."""

    INCOMPLETE = 0
    COMPLETED = 1
    REJECTED = 2
    CANCELED = 3
    FAILED = 4


class AdmissionRecord(Struct, frozen=True, gc=False):
    """One admission of a request; ``pool`` only in a prefill/decode replay (R-61)."""

    at_ms: float
    reused_input_tokens: int
    pool: str | None = None


@dataclass(slots=True, kw_only=True)
class PoolTimes:
    """Handoff columns of a prefill/decode replay (R-61), times in ms, NaN = did not happen.

    ``prefill_reused_tokens`` is the largest reuse over the prefill pool's admissions: what the
    per-request list reports as reused, while the summary counts both pools' (R-54).
    """

    prefill_scheduler: IntArray
    prefill_admit_ms: FloatArray
    source_held_ms: FloatArray
    destination_reserved_ms: FloatArray
    destination_activated_ms: FloatArray
    decode_admit_ms: FloatArray
    source_released_ms: FloatArray
    prefill_reused_tokens: IntArray
    decode_reused_tokens: IntArray


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The columns of a replay, in workload order. Times in ms; NaN where nothing happened.

    ``arrival_ms`` is NaN for a request that never arrived (R-23). ``reused_tokens`` is the
    largest reuse over a request's admissions, ``first_reused_tokens`` that of the first (R-54).
    ``scheduler`` is the global scheduler number (R-10), -1 before dispatch. ``admissions`` holds
    every admission of each request, only if capture was asked for.
    ``gap_ms``/``gap_count`` is the distribution of all token gaps of counted requests (R-51):
    distinct values ascending, and how often each occurred.
    """

    arrival_ms: FloatArray
    first_admit_ms: FloatArray
    first_token_ms: FloatArray
    second_token_ms: FloatArray
    last_token_ms: FloatArray
    terminal_ms: FloatArray
    output_tokens: IntArray
    status: IntArray
    reused_tokens: IntArray
    first_reused_tokens: IntArray
    admission_count: IntArray
    scheduler: IntArray
    gap_ms: FloatArray
    gap_count: IntArray
    admissions: list[list[AdmissionRecord]] | None = None
    pools: PoolTimes | None = None
    clock_ms: float = 0.0  # last timestamp reached
    passes: int = 0
    preemptions: int = 0
    committed_prefill_tokens: int = 0  # Σ FPM.sum_prefill_tokens
    workers: dict[str, int] = field(default_factory=lambda: {"decode": 1})
    gpus_per_worker: dict[str, int] = field(default_factory=lambda: {"decode": 1})

    def counted(self) -> BoolArray:
        """Mask of requests the report counts: admitted and completed (R-51)."""
        mask: BoolArray = (self.status == Status.COMPLETED) & (self.admission_count > 0)
        return mask


def compress_gaps(gap_ms: FloatArray, weight: IntArray) -> tuple[FloatArray, IntArray]:
    """Distinct gaps ascending with summed weights, from gaps in any order."""
    values, inverse = np.unique(gap_ms, return_inverse=True)
    counts = np.zeros(len(values), dtype=np.int64)
    np.add.at(counts, inverse, weight)
    return values, counts
