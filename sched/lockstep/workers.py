"""Several independent workers: each replays its share of the requests alone (R-10, R-11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from passtime.sched.lockstep.arrivals import Source, TimedSource, arrival_times
from passtime.sched.replay.outcome import Outcome, compress_gaps
from passtime.sched.workload.rows import Workload


class Share(NamedTuple):
    """What one worker replays: ``rows`` of the whole workload, as a workload of their own."""

    worker: int
    workload: Workload
    source: Source
    rows: Sequence[int]


def shares_of_workers(
    workload: Workload, num_workers: int, arrival_speedup_ratio: float
) -> list[Share]:
    """Round-robin placement in order of arrival; a worker that gets nothing has no share."""
    times_ms = arrival_times(workload, arrival_speedup_ratio)
    order = sorted(range(len(workload)), key=times_ms.__getitem__)
    shares = []
    for worker in range(min(num_workers, len(order))):
        rows = order[worker::num_workers]
        blocks = workload.block_ids
        part = Workload(
            source=workload.source,
            timestamp_ms=[workload.timestamp_ms[row] for row in rows],
            input_tokens=[workload.input_tokens[row] for row in rows],
            output_tokens=[workload.output_tokens[row] for row in rows],
            block_ids=None if blocks is None else [blocks[row] for row in rows],
            trace_block_size=workload.trace_block_size,
        )
        shares.append(Share(worker, part, TimedSource([times_ms[row] for row in rows]), rows))
    return shares


def merged(outcomes: Sequence[Outcome], rows: Sequence[Sequence[int]], num_workers: int) -> Outcome:
    """One outcome of many: ``rows[k]`` says which requests ``outcomes[k]`` is about."""
    first = outcomes[0]
    total = sum(map(len, rows))
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(Outcome):
        parts = [getattr(outcome, field.name) for outcome in outcomes]
        if isinstance(parts[0], np.ndarray) and not field.name.startswith("gap_"):
            column = np.empty(total, dtype=parts[0].dtype)
            for part, places in zip(parts, rows, strict=True):
                column[places] = part
            columns[field.name] = column
    gap_ms, gap_count = compress_gaps(
        np.concatenate([outcome.gap_ms for outcome in outcomes]),
        np.concatenate([outcome.gap_count for outcome in outcomes]),
    )
    if first.admissions is not None:
        histories: list[Any] = [None] * total
        columns["admissions"] = histories
        for outcome, places in zip(outcomes, rows, strict=True):
            for place, history in zip(places, outcome.admissions or (), strict=True):
                histories[place] = history
    return dataclasses.replace(
        first,
        **columns,
        gap_ms=gap_ms,
        gap_count=gap_count,
        clock_ms=max(outcome.clock_ms for outcome in outcomes),
        passes=sum(outcome.passes for outcome in outcomes),
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        committed_prefill_tokens=sum(outcome.committed_prefill_tokens for outcome in outcomes),
        workers={"decode": num_workers},
    )
