"""A workload in memory: one column per property, one entry per request, in file order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passtime.errors import TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to replay (R-20 … R-35).

    ``timestamp_ms``     arrival; None where a later turn of a session gives none.
    ``input_tokens``     prompt length, >= 1.
    ``output_tokens``    requested output length, >= 0.
    ``block_ids``        per request the trace blocks of its prompt, cut to
                         ceil(input_tokens / trace_block_size): two prompts are equal exactly as
                         far as their leading ids are equal (R-31). None: no two prompts share
                         anything (traces without content).
    ``trace_block_size`` tokens per trace block.
    ``session_ids``      per request; equal ids are turns of one session, in file order.
                         None: every request is a session of its own.
    ``delay_ms``         per request, wait after the previous turn's end; 0 on first turns.
                         None: no delays.
    """

    source: str
    timestamp_ms: Sequence[float | None]
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    block_ids: Sequence[Sequence[int]] | None = None
    trace_block_size: int = 512
    session_ids: Sequence[str] | None = None
    delay_ms: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Refuse what no replay can use."""
        if not self.input_tokens:
            raise TraceError(f"{self.source}: the trace holds no requests")
        if self.trace_block_size < 1:
            raise TraceError(
                f"{self.source}: trace_block_size must be > 0, found {self.trace_block_size}"
            )
        lengths = {len(self.timestamp_ms), len(self.input_tokens), len(self.output_tokens)}
        for column in (self.block_ids, self.session_ids, self.delay_ms):
            if column is not None:
                lengths.add(len(column))
        assert len(lengths) == 1, "columns of one workload have one length"

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.input_tokens)
