"""From a workload's rows to the requests that a rank is given (R-31, R-33)."""

from __future__ import annotations

from uuid import UUID

from passtime.sched.contract import Request, RequestId
from passtime.sched.workload.rows import Workload


def request_id(row: int) -> RequestId:
    """The id of a workload row in a replay."""
    return UUID(int=row + 1)


def row_of(request: RequestId) -> int:
    """The workload row behind a replay's request id."""
    return request.int - 1


class Prompts:
    """Spells prompts out: a trace block is its interned id, repeated (R-31)."""

    def __init__(self, workload: Workload) -> None:
        """Ids are interned as they are first asked for: any injective numbering will do."""
        self._workload = workload
        self._interned: dict[int, int] = {}

    def request(self, row: int) -> Request:
        """The request of a row. Output tokens are the rank's own (V-66): no report shows them."""
        workload = self._workload
        return Request(
            request_id=request_id(row),
            tokens=self._tokens(row),
            max_output_tokens=workload.output_tokens[row],
        )

    def _tokens(self, row: int) -> list[int]:
        workload = self._workload
        length = workload.input_tokens[row]
        if workload.block_ids is None:
            return [row] * length  # a first block of its own: nothing is shared
        tokens: list[int] = []
        for block_id in workload.block_ids[row]:
            interned = self._interned.setdefault(block_id, len(self._interned))
            tokens += [interned] * workload.trace_block_size
        return tokens[:length]
