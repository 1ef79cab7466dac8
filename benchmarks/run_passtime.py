"""Our side of the benchmark: one replay in a process of its own, its CPU time as JSON.

    python benchmarks/run_passtime.py CELL.json

Timed is the replay with the summary, and with the records where the cell asks for them; imports,
the trace's loading and the configuration are not. With ``"memory": true`` it is not timed but
traced: ``peak_bytes`` is what the replay allocates at most, beside the workload.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from passtime.providers import live_timing
from passtime.sched.config import launch_config
from passtime.sched.replay.records import request_records
from passtime.sched.replay.report import summary
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.workload.formats import load_trace


def run(cell: dict[str, Any]) -> dict[str, Any]:
    given = dict(cell["replay"])
    workload = load_trace(
        Path(cell["trace"]), trace_format="mooncake", trace_block_size=given["trace_block_size"]
    ).workload
    launch = launch_config(cell["engine"], source="cell")
    timing = live_timing(launch.engine.timing_model, source="cell")
    options = ReplayOptions(
        concurrency=given.get("replay_concurrency"),
        num_workers=given.get("num_workers", 1),
        arrival_speedup_ratio=given.get("arrival_speedup_ratio", 1.0),
        capture_admissions=cell["capture"],
    )
    answer: dict[str, Any] = {}
    if cell["memory"]:
        tracemalloc.start()
        outcome = replay(workload, launch, timing, options)
        answer["peak_bytes"] = tracemalloc.get_traced_memory()[1]
        return answer
    start = time.process_time()
    outcome = replay(workload, launch, timing, options)
    answer["summary"] = summary(outcome, workload)
    if cell["capture"]:
        answer["records"] = len(request_records(outcome, workload))
    answer["cpu_ms"] = (time.process_time() - start) * 1000.0
    return answer


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
