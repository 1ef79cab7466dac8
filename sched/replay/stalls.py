"""How a replay says that it cannot go on (R-15, S-63, V-86)."""

from __future__ import annotations

from passtime.errors import DeadEndError, LiveLockError, RunError

SAME_INSTANT_RETRIES = 1024
STALLED_PASSES = 10_000


def exhausted(worker: int, at_ms: float) -> DeadEndError:
    """A pass changed nothing, and repeating it would not either."""
    return DeadEndError(
        f"offline replay detected an effect-free zero-duration pass of worker {worker} at {at_ms} "
        "ms: its in-flight requests can never be scheduled (does one outgrow the KV pool or the "
        "prefill budget?)"
    )


def too_many_retries(worker: int, at_ms: float) -> RunError:
    """A rank asks for one repetition after the other at the same instant."""
    return RunError(
        f"worker {worker} asked for more than {SAME_INSTANT_RETRIES} retries at {at_ms} ms (R-15)"
    )


def live_lock(at_ms: float) -> LiveLockError:
    """Passes follow one another, and nothing gets ahead."""
    return LiveLockError(
        f"live-lock at {at_ms} ms: {STALLED_PASSES} passes without output or progress "
        "(requests keep taking each other's KV blocks)"
    )
