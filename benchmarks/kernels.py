"""Each kernel against cuBLAS and torch's flash attention, and against what the GPU can do.

    python benchmarks/kernels.py [--json] [-o FILE]

Copy bandwidth and matrix rate are measured first, in the same run, and every kernel is put beside
the roofline of those two. Inputs rotate through more memory than the L2 cache holds, every timing
is a CUDA graph of all rotations between two events, and each result is compared with the
baseline's. Exits with 1 if a kernel could not run, with 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_cases import Bench, Case, Grid, cases
from torch import Tensor

from passtime.errors import DeviceError, PasstimeError
from passtime.kernels.operators import TimedOperators
from passtime.profiles.shapes import load_model

SAMPLES = 15
SAMPLE_S = 2e-4
L2_MULTIPLE = 3


# --- Timing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """What this GPU did in this run: bytes/s of a large copy, FLOP/s of a large cuBLAS product."""

    bytes_per_s: float
    flops_per_s: float


def seconds_each(graphs: Any, run: Callable[[int], Any], rotations: int) -> float:
    """Median seconds of one call: graphs of all rotations, repeated until a sample is long."""
    graph = graphs.capture(run, rotations)
    once = min(graphs.seconds(graph) for _ in range(3))
    repeats = max(1, ceil(SAMPLE_S / once))
    if repeats > 1:
        graphs.release(graph)
        graph = graphs.capture(lambda call: run(call % rotations), rotations * repeats)
    graphs.seconds(graph)
    samples = [graphs.seconds(graph) for _ in range(SAMPLES)]
    graphs.release(graph)
    return float(median(samples) / (rotations * repeats))


def ceilings(graphs: Any, bench: Bench, *, copied: int = 2**31, side: int = 8192) -> Ceilings:
    """Measured first: everything else is put beside it."""
    pair = torch.empty(2, copied, dtype=torch.uint8, device=bench.device).random_(0, 255)
    copy_s = seconds_each(graphs, lambda _: pair[1].copy_(pair[0]), 1)
    a, b = bench.normal(side, side), bench.normal(side, side, seed=1, std=0.02)
    product_s = seconds_each(graphs, lambda _: torch.mm(a, b.t()), 1)
    return Ceilings(bytes_per_s=2 * copied / copy_s, flops_per_s=2 * side**3 / product_s)


def timed(graphs: Any, case: Case, limits: Ceilings) -> dict[str, Any]:
    """One row of the report; microseconds per call. What cannot run here says why."""
    row: dict[str, Any] = {"kernel": case.kernel, "size": case.size}
    try:
        found = case.run(0)
        ours_s = seconds_each(graphs, case.run, case.rotations)
    except (RuntimeError, DeviceError) as error:
        return row | {"failed": str(error).partition("\n")[0]}
    floor_s = case.work.floor_s(flops_per_s=limits.flops_per_s, bytes_per_s=limits.bytes_per_s)
    row |= {
        "us": round(1e6 * ours_s, 3),
        "tflop_per_s": round(case.work.flops / ours_s / 1e12, 2),
        "gb_per_s": round(case.work.bytes / ours_s / 1e9, 1),
        "share_of_roofline": round(floor_s / ours_s, 4),
    }
    return row if case.baseline is None else row | rival(graphs, case, case.baseline, found, ours_s)


def rival(
    graphs: Any, case: Case, baseline: Callable[[int], Tensor], found: Tensor, ours_s: float
) -> dict[str, Any]:
    """How far apart the two results are, and how fast the baseline is."""
    try:
        compared = {"error": relative_error(found, baseline(0))}
        if not case.baseline_name:
            return compared
        theirs_s = seconds_each(graphs, baseline, case.rotations)
    except (RuntimeError, DeviceError) as error:
        return {"no_baseline": str(error).partition("\n")[0]}
    return compared | {
        "baseline": case.baseline_name,
        "baseline_us": round(1e6 * theirs_s, 3),
        "speed_to_baseline": round(theirs_s / ours_s, 4),
    }


def relative_error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm()
    return float(f"{float(difference / wanted.double().norm()):.2e}")


# --- Report --------------------------------------------------------------------------------------


def report(bench: Bench, graphs: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Ceilings, then a row for every case."""
    limits = ceilings(graphs, bench)
    rows = []
    for case in cases(bench):
        say(f"{case.kernel}, {case.size}")
        rows.append(timed(graphs, case, limits))
    return {
        "schema": 1,
        "device": torch.cuda.get_device_name(bench.device),
        "torch": torch.__version__,
        "dtype": str(bench.dtype),
        "copy_gb_per_s": round(limits.bytes_per_s / 1e9, 1),
        "product_tflop_per_s": round(limits.flops_per_s / 1e12, 1),
        "kernels": rows,
    }


def print_table(document: dict[str, Any]) -> None:
    from rich.table import Table

    from passtime.tables import stdout_console

    table = Table(
        title=f"{document['device']}: copies at {document['copy_gb_per_s']:.0f} GB/s, cuBLAS at "
        f"{document['product_tflop_per_s']:.0f} TFLOP/s, torch {document['torch']}"
    )
    for column in ("kernel", "size"):
        table.add_column(column)
    for column in ("µs", "TFLOP/s", "GB/s", "of roofline", "baseline, µs", "speed", "rel. error"):
        table.add_column(column, justify="right")
    for row in document["kernels"]:
        if "failed" in row:
            table.add_row(row["kernel"], row["size"], "failed", *[""] * 5, row["failed"])
            continue
        rival = f"{row['baseline']} {row['baseline_us']:.1f}" if "baseline" in row else "–"
        table.add_row(
            row["kernel"],
            row["size"],
            f"{row['us']:.1f}",
            f"{row['tflop_per_s']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['share_of_roofline']:.0%}",
            rival,
            f"{row['speed_to_baseline']:.2f} ×" if "baseline" in row else "–",
            f"{row['error']:.1e}" if "error" in row else "–",
        )
    stdout_console().print(table)


def open_bench(grid: Grid) -> Bench:
    """On the first CUDA device. DeviceError if there is none."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"no CUDA device: torch {torch.__version__} finds none to time kernels on"
        )
    device = torch.device("cuda", 0)
    return Bench(
        operators=TimedOperators.on(device),
        model=load_model("llama-3.1-8b"),
        experts=load_model("qwen3-30b-a3b"),
        grid=grid,
        device=device,
        cold_bytes=L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size,
    )


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the JSON report there too")
    args = parser.parse_args()
    try:
        bench = open_bench(Grid())
        from passtime.calibrate.graphs import CudaGraphs

        def say(text: str) -> None:
            print(text, file=sys.stderr)

        document = report(bench, CudaGraphs(bench.device), say)
    except PasstimeError as error:
        print(f"benchmarks/kernels.py: {error}", file=sys.stderr)
        return error.exit_code
    text = json.dumps(document, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n")
    if args.json:
        print(text)
    else:
        print_table(document)
    return 1 if any("failed" in row for row in document["kernels"]) else 0


if __name__ == "__main__":
    sys.exit(main())
