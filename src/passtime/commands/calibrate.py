"""Measure passes on a device, fit a timing model to them, and write it as a profile.

Every visit goes into the log as it ends: the same command, started again after a kill or Ctrl-C,
goes on where it was. Without a GPU, --device cpu profiles a NumPy transformer on one core: a real
measurement of a real device, for trying everything out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime calibrate``."""
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda[:I]", help="default: cpu")
    parser.add_argument(
        "--model",
        metavar="NAME|CONFIG.json",
        help="model shape: a shipped name, a shape file or a Hugging Face config.json",
    )
    parser.add_argument("-o", "--output", metavar="PROFILE.json", help="where the profile goes")
    parser.add_argument("--log", metavar="LOG.jsonl", help="default: PROFILE.log.jsonl")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time for measuring; default: 30 on a CPU, 300 on a GPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the plan and the order; default: 0")
    parser.add_argument(
        "--label", metavar="NAME", help="the device's name, if its own says nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    parser.add_argument("--json", action="store_true", help="print the plan or the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan, and measure unless it is a dry run."""
    from passtime.calibrate.calibration import Wish, calibrate, prepare
    from passtime.calibrate.progress import progress_bar
    from passtime.calibrate.tables import (
        calibration_document,
        calibration_table,
        plan_document,
        plan_table,
    )
    from passtime.errors import InputError
    from passtime.outputs import refuse_unwritable
    from passtime.tables import stdout_console

    preparation = prepare(
        Wish(
            device=args.device,
            model=args.model,
            budget_s=args.budget,
            seed=args.seed,
            label=args.label,
        )
    )
    if args.dry_run:
        if args.json:
            sys.stdout.write(plan_document(preparation))
        else:
            stdout_console().print(plan_table(preparation))
        return 0
    if args.output is None:
        raise InputError("-o PROFILE.json is missing: where does the profile go?")
    refuse_unwritable([args.output, args.log], inputs=[args.model])
    output = Path(args.output)
    log = Path(args.log) if args.log else output.with_suffix(".log.jsonl")

    def say(sentence: str) -> None:
        print(f"passtime calibrate: {sentence}", file=sys.stderr)

    try:
        with progress_bar(preparation.facts.name) as progress:
            done = calibrate(preparation, output=output, log=log, progress=progress, say=say)
    except KeyboardInterrupt:
        say(f"interrupted; what was measured is in {log}, and the same command goes on from there")
        return 130
    if args.json:
        sys.stdout.write(calibration_document(done, output))
    else:
        stdout_console().print(calibration_table(done, output))
    return 0
