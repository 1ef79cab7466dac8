"""From token times to metrics: TTFT, TTST, TPOT, ITL, E2E and their distributions (R-50 … R-52)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from passtime.errors import InputError
from passtime.sched.replay.outcome import BoolArray, Outcome
from passtime.sched.timing import FloatArray, IntArray

METRICS = (
    "ttft_ms",
    "ttst_ms",
    "tpot_ms",
    "itl_ms",
    "e2e_latency_ms",
    "output_token_throughput_per_user",
)


@dataclass(frozen=True)
class Distribution:
    """Samples ascending; ``counts`` says how often each occurred (None: once)."""

    values: FloatArray
    counts: IntArray | None = None

    @cached_property
    def size(self) -> int:
        """Number of samples."""
        return len(self.values) if self.counts is None else int(self.counts.sum())

    @cached_property
    def _samples_up_to(self) -> IntArray:
        """Number of samples up to and including each value."""
        assert self.counts is not None
        samples: IntArray = np.cumsum(self.counts)
        return samples

    def mean(self) -> float | None:
        """Arithmetic mean; None without samples."""
        return self._mean_of(self.values) if self.size else None

    def std(self) -> float | None:
        """Standard deviation of the population; None without samples."""
        mean = self.mean()
        return None if mean is None else math.sqrt(self._mean_of((self.values - mean) ** 2))

    def percentile(self, percent: float) -> float | None:
        """Nearest rank, halves up, no interpolation (R-52): 0 is the minimum, 100 the maximum."""
        if not self.size:
            return None
        rank = math.floor((self.size - 1) * percent / 100.0 + 0.5)
        if self.counts is None:
            return float(self.values[rank])
        return float(self.values[np.searchsorted(self._samples_up_to, rank, side="right")])

    def _mean_of(self, values: FloatArray) -> float:
        # No dot product: BLAS sums in an order that depends on the processor.
        weighted = values if self.counts is None else values * self.counts
        return float(weighted.sum() / self.size)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Per-request metrics (R-50) in workload order, ms; NaN where not defined."""

    ttft_ms: FloatArray
    ttst_ms: FloatArray
    tpot_ms: FloatArray
    e2e_ms: FloatArray

    @staticmethod
    def of(outcome: Outcome) -> Latencies:
        """Latencies of every request, counted or not, each floored at 0."""
        tokens = outcome.output_tokens
        first, last = outcome.first_token_ms, outcome.last_token_ms
        between = np.where(tokens >= 2, last - first, np.nan)
        second = np.where(tokens >= 2, outcome.second_token_ms - first, np.nan)
        some = tokens >= 1
        return Latencies(
            ttft_ms=_floored(np.where(some, first - outcome.arrival_ms, np.nan)),
            ttst_ms=_floored(second),
            tpot_ms=_floored(between / np.maximum(tokens - 1, 1)),
            e2e_ms=_floored(np.where(some, last - outcome.arrival_ms, np.nan)),
        )


def _floored(values: FloatArray) -> FloatArray:
    floored: FloatArray = np.maximum(values, 0.0)  # NaN stays NaN
    return floored


def distributions(outcome: Outcome) -> dict[str, Distribution]:
    """The distribution of every metric of ``METRICS`` over counted requests (R-51)."""
    latencies, counted = Latencies.of(outcome), outcome.counted()
    positive = outcome.gap_ms > 0
    gaps, counts = outcome.gap_ms, outcome.gap_count
    return {
        "ttft_ms": _sorted(latencies.ttft_ms, counted),
        "ttst_ms": _sorted(latencies.ttst_ms, counted),
        "tpot_ms": _sorted(latencies.tpot_ms, counted),
        "itl_ms": Distribution(gaps, counts),
        "e2e_latency_ms": _sorted(latencies.e2e_ms, counted),
        "output_token_throughput_per_user": Distribution(
            (1000.0 / gaps[positive])[::-1], counts[positive][::-1]
        ),
    }


def _sorted(values: FloatArray, counted: BoolArray) -> Distribution:
    samples = values[counted]
    return Distribution(np.sort(samples[~np.isnan(samples)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds that a request must keep to count as good (R-56), ms; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        """At least one bound, each a positive number."""
        bounds = self.bounds()
        if not bounds:
            raise InputError("goodput needs a bound on ttft, tpot or e2e")
        for name, bound in bounds.items():
            if not (bound > 0 and math.isfinite(bound)):
                raise InputError(f"goodput bound {name} must be a positive time, found {bound:g}")

    def bounds(self) -> dict[str, float]:
        """The bounds that are given."""
        given = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: bound for name, bound in given.items() if bound is not None}

    def good(self, outcome: Outcome) -> BoolArray:
        """Mask of counted requests within every bound.

        TPOT binds from two tokens on; a request without a token is good only under a bound on
        E2E alone, which its end then keeps.
        """
        latencies = Latencies.of(outcome)
        good = outcome.counted()
        if self.ttft_ms is not None:
            good &= latencies.ttft_ms <= self.ttft_ms
        if self.tpot_ms is not None:
            tokens = outcome.output_tokens
            tpot_ms = (latencies.e2e_ms - latencies.ttft_ms) / np.maximum(tokens - 1, 1)
            good &= (tokens >= 1) & ((tokens <= 1) | (tpot_ms <= self.tpot_ms))
        if self.e2e_ms is not None:
            until_end = outcome.terminal_ms - outcome.arrival_ms
            tokenless = outcome.output_tokens == 0
            good &= np.where(tokenless, until_end, latencies.e2e_ms) <= self.e2e_ms
        return good
