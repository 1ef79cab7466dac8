"""CPU time of a replay, ours against the reference, on the same workloads.

    python benchmarks/versus_reference.py [--quick] [--backend vllm,sglang] [--only GROUP,…]
                                          [--repeat N] [--json]

Each cell runs ours and the reference alternately, every run in a process of its own on one core,
and reports the median CPU time of each: that of the replay alone, without imports and loading.
Ours runs under the Python that runs this script; which core that has, compiled or plain sources,
is said first.
The summaries must agree. A quick run is too small for fair ratios: what a run costs whatever its
size, some milliseconds here, weighs ten times as much. The reference's Python is
PASSTIME_REFERENCE_PYTHON, by default .venv-reference/bin/python. Groups: grid, uneven, recorded,
speculation, trace length and prompt length. Exit code 1 if a result differed, or if a full run of
the compiled core took more of the reference's time than it may; 2 without the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cells import Cell, grid, recorded, scaling, speculative, uneven

from passtime.sched.lockstep import vllm

HERE = Path(__file__).resolve().parent

SKETCHED = ("itl_ms", "output_token_throughput_per_user")
WALL_CLOCK = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
MUST_MEAN = 6.0  # geometric mean of the grid
MEASURES_MEMORY = ("trace length", "prompt length")


def core() -> str:
    """Which build of the lock-step core is measured."""
    return "plain sources" if vllm.__file__.endswith(".py") else "compiled"


def reference_python() -> Path:
    """Its interpreter."""
    default = HERE.parent / ".venv-reference" / "bin" / "python"
    return Path(os.environ.get("PASSTIME_REFERENCE_PYTHON", default))


def cells_of(backends: list[str], groups: list[str]) -> Iterator[Cell]:
    """All cells that were asked for."""
    for backend in backends:
        every = [*grid(backend), *uneven(backend), *recorded(backend), *scaling(backend)]
        if backend == "vllm":
            every += speculative()
        yield from (cell for cell in every if not groups or cell.group in groups)


def run(python: Path, script: str, cell_file: Path) -> dict[str, Any]:
    """One run in a process of its own, on one core."""
    core = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [str(python), str(HERE / script), str(cell_file)],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(cell: Cell, share: float, repeat: int, folder: Path) -> dict[str, Any]:
    """Both CPU times of a cell, their ratio, and in what the results differ."""
    trace = folder / "trace.jsonl"
    rows = cell.rows(share)
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cell_file = folder / "cell.json"
    spec = {
        "trace": str(trace),
        "engine": cell.engine,
        "replay": cell.replay,
        "capture": cell.capture,
        "memory": False,
    }
    cell_file.write_text(json.dumps(spec))
    ours, theirs = [], []
    for _ in range(repeat):
        ours.append(run(Path(sys.executable), "run_passtime.py", cell_file))
        theirs.append(run(reference_python(), "run_reference.py", cell_file))
    passtime_ms = median(answer["cpu_ms"] for answer in ours)
    reference_ms = median(answer["cpu_ms"] for answer in theirs)
    found: dict[str, Any] = {
        "name": cell.name,
        "group": cell.group,
        "backend": cell.backend,
        "prefix_cache": cell.engine["engine"].get("enable_prefix_caching", True),
        "concurrency": cell.replay.get("replay_concurrency"),
        "output": cell.output,
        "requests": len(rows),
        "reference_ms": round(reference_ms, 3),
        "passtime_ms": round(passtime_ms, 3),
        "ratio": round(reference_ms / passtime_ms, 3),
        "must": cell.must,
        "grid": cell.group == "grid",
        "differences": differences(theirs[0]["summary"], ours[0]["summary"]),
    }
    if cell.group in MEASURES_MEMORY:
        cell_file.write_text(json.dumps({**spec, "memory": True}))
        peak = run(Path(sys.executable), "run_passtime.py", cell_file)["peak_bytes"]
        found["peak_bytes_per_request"] = round(peak / len(rows))
    return found


def differences(reference: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Summary keys in which the results disagree; sketched percentiles are not compared (R-52)."""
    found = []
    for key, value in reference.items():
        sketched = key.endswith(SKETCHED) and not key.startswith(("mean_", "min_", "max_", "std_"))
        if key in WALL_CLOCK or key not in ours or sketched or not isinstance(value, int | float):
            continue
        mine = ours[key] or 0.0
        if not math.isclose(value, mine, rel_tol=1e-9, abs_tol=1e-6):
            found.append(f"{key}: reference {value}, passtime {mine}")
    return found


def too_slow(measured: list[dict[str, Any]], mean: float | None) -> list[str]:
    """What the compiled core may not take so long for, in words."""
    bars = [(found["name"], found["ratio"], found["must"]) for found in measured]
    if mean is not None:
        bars.append(("geometric mean of the grid", mean, MUST_MEAN))
    return [f"{name}: {ratio:.2f}x, must {must:g}x" for name, ratio, must in bars if ratio < must]


def geometric_mean(ratios: list[float]) -> float | None:
    """Of ratios; None of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def report_line(found: dict[str, Any]) -> str:
    """A cell for people."""
    memory = found.get("peak_bytes_per_request")
    return (
        f"{found['name']:<48} {found['reference_ms']:>10.1f} ms {found['passtime_ms']:>9.1f} ms "
        f"{found['ratio']:>7.2f}x" + (f" {memory:>8,} bytes per request" if memory else "")
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one run")
    parser.add_argument("--backend", default="vllm,sglang")
    parser.add_argument("--only", default="", help="comma-separated groups")
    parser.add_argument("--repeat", type=int, help="runs of each side per cell; default 3")
    parser.add_argument("--json", action="store_true", help="one document instead of lines")
    args = parser.parse_args(argv)
    if not reference_python().exists():
        print(
            f"no reference at {reference_python()}: run `make .venv-reference/.done`",
            file=sys.stderr,
        )
        return 2
    share, repeat = (0.1, 1) if args.quick else (1.0, 3)
    groups = [group.strip() for group in args.only.split(",") if group.strip()]
    measured = []
    if not args.json:
        title = f"CPU time of a replay ({core()})"
        print(f"{title:<48} {'reference':>13} {'passtime':>12} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells_of(args.backend.split(","), groups):
            found = measure(cell, share, args.repeat or repeat, Path(folder))
            measured.append(found)
            if not args.json:
                print(report_line(found), *found["differences"], sep="\n  ", flush=True)
    means = {
        backend: geometric_mean(
            [m["ratio"] for m in measured if m["grid"] and m["backend"] == backend]
        )
        for backend in args.backend.split(",")
    }
    overall = geometric_mean([m["ratio"] for m in measured if m["grid"]])
    if args.json:
        document = {
            "core": core(),
            "cells": measured,
            "geometric_mean": overall,
            "by_backend": means,
        }
        print(json.dumps(document, indent=1))
    elif overall is not None:
        parts = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items() if mean)
        print(f"geometric mean of the grid: {overall:.2f} ({parts})")
    fair = core() == "compiled" and not args.quick
    slow = too_slow(measured, overall) if fair else []
    for line in slow:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if slow or any(found["differences"] for found in measured) else 0


if __name__ == "__main__":
    raise SystemExit(main())
