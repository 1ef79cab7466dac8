"""The reference's side of a comparison: runs under the reference's own Python, one case a line.

Reads JSON lines ``{"engine", "prefill_engine", "decode_engine", "profiles", "replay", "trace"}``
on standard input and answers each with ``{"status": "ok", "columns", "requests", "summary"}`` or
``{"status": "error", "error": {"stage", "type", "text", "class"}}`` on standard output. Imports
nothing of ours: ``ai-dynamo`` and its numpy-free standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from typing import Any

from dynamo import _core
from dynamo.replay.api import run_trace_replay

COLUMNS = [
    "index", "arrival_ms", "first_admit_ms", "first_token_ms", "last_token_ms", "terminal_ms",
    "ttft_ms", "ttst_ms", "e2e_ms", "itl_mean_ms", "output_length", "reused_input_tokens",
    "admission_count", "terminal_status", "dp_rank", "worker", "admissions",
]  # fmt: skip
POOL_COLUMNS = [
    "prefill_worker", "decode_worker", "prefill_admit_ms", "source_held_ms",
    "destination_reserved_ms", "destination_activated_ms", "decode_admit_ms",
    "source_released_ms", "decode_reused_input_tokens",
]  # fmt: skip
WALL_CLOCK = (
    "wall_time_ms",
    "processed_tokens_per_s",
    "processed_output_tokens_per_s",
)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What the reference makes of a case."""
    engines = {key: case.get(key) for key in ("engine", "prefill_engine", "decode_engine")}
    stage = "config"
    with tempfile.TemporaryDirectory() as folder:
        try:
            for engine in engines.values():
                if engine is not None:
                    _core._normalize_mocker_config(engine)
            stage = "replay"
            path = os.path.join(folder, "trace.jsonl")
            with open(path, "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in case["trace"])
            report = run_trace_replay(
                path,
                extra_engine_args=engines["engine"],
                prefill_engine_args=engines["prefill_engine"],
                decode_engine_args=engines["decode_engine"],
                capture_per_request=case.get("capture", True),
                **case["replay"],
            )
        except Exception as error:
            text = str(error)
            return {
                "status": "error",
                "error": {
                    "stage": stage,
                    "type": type(error).__name__,
                    "text": text,
                    "class": re.sub(r"\d+(\.\d+)?", "<n>", text),
                },
            }
    summary = {k: v for k, v in report.summary.items() if k not in WALL_CLOCK}
    answer: dict[str, Any] = {"status": "ok", "summary": summary}
    if report.per_request is not None:
        pools = engines["engine"] is None
        answer["columns"] = COLUMNS + (POOL_COLUMNS if pools else [])
        answer["requests"] = rows(case, report.per_request, pools=pools)
    return answer


def rows(case: dict[str, Any], records: list[dict[str, Any]], *, pools: bool) -> list[list[Any]]:
    """One row per trace row. Records carry random ids: (input, output) lengths identify them."""
    by_lengths = {(r["input_length"], r["requested_output_length"]): r for r in records}
    assert len(by_lengths) == len(records), "input and output lengths must be unique together"
    launch = case.get("engine") or case["prefill_engine"]
    dp_size = launch.get("dp_size") or 1
    found = []
    for index, line in enumerate(case["trace"]):
        record = by_lengths.get((line["input_length"], line["output_length"]))
        if record is None:
            columns = COLUMNS + (POOL_COLUMNS if pools else [])
            blank: dict[str, Any] = dict.fromkeys(columns)
            blank |= {"index": index, "terminal_status": "no_record"}
            found.append(list(blank.values()))
            continue
        found.append(row(index, record, dp_size, pools=pools))
    return found


def row(index: int, record: dict[str, Any], dp_size: int, *, pools: bool) -> list[Any]:
    """A record in the column order of the oracle cases."""
    history = record["routing_history"]
    number = history[0]["scheduler_id"] if history else record["decode_worker_idx"]
    tokens = record["output_length"]
    admissions = [
        [a["at_ms"], a["reused_input_tokens"], *([a["pool"]] if pools else [])]
        for a in record["admission_history"]
    ]
    values = [
        index, record["arrival_time_ms"], record["first_admit_ms"], record["first_token_ms"],
        record["last_token_ms"], record["terminal_time_ms"], record["ttft_ms"],
        record["ttst_ms"], record["e2e_latency_ms"] if tokens else None, record["itl_ms"],
        tokens, record["reused_input_tokens"], record["admission_count"],
        record["terminal_status"], number % dp_size, number // dp_size, admissions,
    ]  # fmt: skip
    if pools:
        values += [
            record["prefill_worker_idx"], record["decode_worker_idx"],
            record["prefill_admit_ms"], record["source_held_ms"],
            record["destination_reserved_ms"], record["destination_activated_ms"],
            record["decode_admit_ms"], record["source_released_ms"],
            record["decode_reused_input_tokens"],
        ]  # fmt: skip
    return values


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
