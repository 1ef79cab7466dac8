"""One request on a lock-step rank: what differs between requests, not what moves in step."""

from __future__ import annotations

from collections.abc import Sequence as Column
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from passtime.sched.lockstep.runs import DuplicateBlock, Run


class Sequence:
    """A request from its arrival to its end. Counts are tokens unless a name says otherwise.

    While it decodes undisturbed (``Decodes``) nothing of it is touched: ``known_tokens`` and
    ``computed_tokens`` are then out of date and follow from ``delta`` and the pass number.

    ``row``              of the workload.
    ``output_limit``     tokens it will have produced when it ends.
    ``known_tokens``     prompt and produced tokens (L of V-1).
    ``computed_tokens``  whose KV is there; a sequence being computed over several passes.
    ``furthest_tokens``  its highest ``computed_tokens`` before it was preempted; 0: it never was.
    ``order``            its place in ``running``: a number that rises with each admission.
    ``first_pass``, ``last_pass``  its present unbroken series of tokens, one per pass; the last is
                         planned ahead. ``last_pass`` is -1 where there is no such series.
    ``earlier``          the series before it, (first pass, last pass) each; None if there was none.
    The last five belong to the prefix cache (``RunPool``).
    """

    __slots__ = (
        "block_ids",
        "computed_tokens",
        "delta",
        "duplicate",
        "earlier",
        "first_pass",
        "furthest_tokens",
        "known_tokens",
        "last_pass",
        "order",
        "output_limit",
        "prompt_tokens",
        "row",
        "run",
        "tail",
        "whole_blocks",
    )

    block_ids: Column[int]
    delta: int
    duplicate: DuplicateBlock | None
    first_pass: int
    order: int
    run: Run
    tail: Run | None
    whole_blocks: int

    def __init__(self, row: int, prompt_tokens: int, output_limit: int) -> None:
        """A request that waits for the first time."""
        self.row = row
        self.prompt_tokens = prompt_tokens
        self.output_limit = output_limit
        self.known_tokens = prompt_tokens
        self.computed_tokens = 0
        self.furthest_tokens = 0
        self.last_pass = -1
        self.earlier: list[tuple[int, int]] | None = None

    def end_series(self, last_pass: int) -> None:
        """The present series of tokens is over, with ``last_pass`` or before it began."""
        if self.last_pass >= 0 and self.first_pass <= last_pass:
            if self.earlier is None:
                self.earlier = []
            self.earlier.append((self.first_pass, last_pass))

    def series_until(self, last_pass: int) -> list[tuple[int, int]]:
        """All series of tokens, as far as they were produced in passes up to ``last_pass``."""
        series = list(self.earlier or ())
        if self.last_pass >= 0 and self.first_pass <= last_pass:
            series.append((self.first_pass, min(self.last_pass, last_pass)))
        return series
