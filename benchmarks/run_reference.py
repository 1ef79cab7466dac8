"""The reference's side of the benchmark: one replay in a process of its own, its CPU time as JSON.

    REFERENCE_PYTHON benchmarks/run_reference.py CELL.json

Runs under the reference's own Python and imports nothing of ours. Its one call also loads the
trace; a replay that stops at time 0 tells how much of the CPU time that is, and it is taken off.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from dynamo.replay.api import run_trace_replay


def run(cell: dict[str, Any]) -> dict[str, Any]:
    def timed(**options: Any) -> tuple[float, Any]:
        start = time.process_time()
        report = run_trace_replay(
            cell["trace"], extra_engine_args=cell["engine"], **cell["replay"], **options
        )
        return (time.process_time() - start) * 1000.0, report

    timed(max_sim_time_ms=0.0)  # first call: lazy imports
    loading_ms, _ = timed(max_sim_time_ms=0.0)
    cpu_ms, report = timed(capture_per_request=cell["capture"])
    summary = report if isinstance(report, dict) else report.summary
    answer: dict[str, Any] = {"cpu_ms": cpu_ms - loading_ms, "summary": summary}
    if cell["capture"]:
        answer["records"] = len(report.per_request)
    return answer


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(run(json.load(file))))
