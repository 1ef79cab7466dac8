"""Oracle cases as they are on disk: small ones, large ones, and files of mini checks."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_CASES = Path(__file__).parent / "cases"


def shared_folder() -> Path:
    """Where the public data and traces lie: PASSTIME_SHARED, default beside the repository."""
    return REPOSITORY / os.environ.get("PASSTIME_SHARED", "../shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration, a trace and what the reference made of them."""

    name: str
    engine: dict[str, Any] | None
    prefill_engine: dict[str, Any] | None
    decode_engine: dict[str, Any] | None
    profiles: dict[str, Any]
    options: dict[str, Any]
    trace: list[dict[str, Any]]
    expected: dict[str, Any]

    @property
    def backend(self) -> str:
        """The scheduler the case is about."""
        launch = self.engine if self.engine is not None else self.prefill_engine
        assert launch is not None
        return str(launch.get("engine", {}).get("backend", "vllm"))


def load_cases(path: Path) -> Iterator[Case]:
    """The cases of a file: one, or the ``checks`` of a collection."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if "checks" in document:
        for check in document["checks"]:
            yield case_of(check, prefix=f"{path.stem}/")
        return
    if "trace" not in document:
        document["trace"] = _large_trace(document["trace_source"], path.parent / "data")
    yield case_of(document)


def case_of(document: dict[str, Any], prefix: str = "") -> Case:
    """The case that a parsed document holds."""
    return Case(
        name=prefix + document["name"],
        engine=document.get("engine"),
        prefill_engine=document.get("prefill_engine"),
        decode_engine=document.get("decode_engine"),
        profiles=document.get("profiles") or {},
        options=document.get("replay") or {},
        trace=document["trace"],
        expected=document["expected"],
    )


def _large_trace(source: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows of a large case, built from a public trace; its sha256 must match."""
    text = gzip.decompress((folder / source["file"]).read_bytes()).decode()
    first, last = source["rows"]
    if source["file"].endswith(".jsonl.gz"):
        rows = [json.loads(line) for line in text.splitlines()][first:last]
        trace = [_mooncake_row(i, row, rows[0], source) for i, row in enumerate(rows)]
    else:
        trace = list(_headed_rows(list(csv.DictReader(io.StringIO(text)))[first:last], source))
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in trace)
    if hashlib.sha256(lines.encode()).hexdigest() != source["sha256"]:
        raise ValueError(f"the trace built from {source['file']} does not match its sha256")
    return trace


def _mooncake_row(
    index: int, row: dict[str, Any], first: dict[str, Any], source: dict[str, Any]
) -> dict[str, Any]:
    elapsed = (row["timestamp"] - first["timestamp"]) * source["time_scale"]
    return {
        "timestamp": round(elapsed + index * source.get("nudge", 0), 3),
        "input_length": row["input_length"],
        "output_length": row["output_length"],
        "hash_ids": row["hash_ids"],
    }


def _headed_rows(rows: list[dict[str, str]], source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a trace without content; two of three get one of a few shared prompt heads."""
    start, block, heads = float(rows[0]["arrived_at"]), source["block"], source["heads"]
    fresh = 1_000_000
    for index, row in enumerate(rows):
        tokens = int(row["num_prefill_tokens"])
        blocks = -(-tokens // block)
        ids: list[int] = []
        if heads and index % 3:
            head = index % heads
            ids = [head * 8 + j for j in range(1 + head % 8)][:blocks]
        missing = blocks - len(ids)
        ids += range(fresh, fresh + missing)
        fresh += missing
        yield {
            "timestamp": round((float(row["arrived_at"]) - start) * source["time_scale"], 3),
            "input_length": tokens,
            "output_length": int(row["num_decode_tokens"]),
            "hash_ids": ids,
        }
