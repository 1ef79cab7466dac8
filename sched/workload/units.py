"""Times of traces in milliseconds, whatever unit the file uses."""

from __future__ import annotations

from decimal import Decimal

from passtime.sched.workload.names import TimeUnit

UNIT_IN_MS: dict[TimeUnit, float] = {"s": 1000.0, "ms": 1.0, "us": 0.001}


def scaled(value: float | str, unit_in_ms: float) -> float:
    """``value`` units in ms, rounded once: 4.314579 s are 4314.579 ms, no digit more."""
    if unit_in_ms == 1.0:
        return float(value)
    return float(Decimal(str(value)) * Decimal(str(unit_in_ms)))
