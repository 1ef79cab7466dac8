"""See all of it in a minute: measure this CPU, fit a model, compare it with constants.

A NumPy transformer is measured on one core (a real measurement of a real device; no GPU, torch or
download is needed), a timing model is fitted, and a conversation workload is replayed under it and
under constants. What is written goes into one folder; the same command goes on with a run that was
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ON_A_GPU = """The same on an NVIDIA GPU:
  pip install '.[gpu]'
  passtime devices
  passtime calibrate --device cuda --model llama-3.1-8b -o gpu.json
  passtime engine --timing gpu.json -o engine.json
  passtime compare --engine engine.json --workload conversation --request-rate 4 \\
    --timing gpu.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime demo``."""
    parser.add_argument(
        "-o", "--output", default="demo", metavar="DIR", help="folder to write to; default: demo"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for measuring; default: 30",
    )
    parser.add_argument("--seed", type=int, default=0, help="of plan and workload; default: 0")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, compare, print."""
    from passtime.calibrate.progress import progress_bar
    from passtime.calibrate.tables import calibration_table
    from passtime.comparison import render
    from passtime.demo import prepare_demo, run_demo
    from passtime.tables import stdout_console

    def say(sentence: str) -> None:
        print(f"passtime demo: {sentence}", file=sys.stderr)

    folder = Path(args.output)
    preparation = prepare_demo(budget_s=args.budget, seed=args.seed)
    say(f"measuring {preparation.facts.name} for {preparation.budget_s:g} s")
    try:
        with progress_bar(preparation.facts.name) as progress:
            demo = run_demo(preparation, folder, progress=progress, say=say)
    except KeyboardInterrupt:
        say(f"interrupted; what was measured is in {folder}, the same command goes on from there")
        return 130
    if args.json:
        sys.stdout.write(demo.document.to_json().decode())
        return 0
    console = stdout_console()
    console.print(calibration_table(demo.calibration, demo.files[0]))
    console.print(
        f"\n{len(demo.workload)} conversations at {demo.request_rate:g} requests/s, replayed under "
        f"the measured model and under constants.\n{demo.guess.sentence}.\n",
        highlight=False,
    )
    render(demo.comparison, console)
    console.print(f"\nWritten: {', '.join(map(str, demo.files))}", highlight=False)
    console.print(f"\n{ON_A_GPU}", highlight=False, markup=False)
    return 0
