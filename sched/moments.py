"""The variances of forward-pass metrics (C-23)."""

from __future__ import annotations

from collections.abc import Sequence


def variance(values: Sequence[int]) -> float:
    """Population variance; 0 of nothing."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)
