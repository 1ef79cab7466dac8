"""Replay one workload under several timing models and show where they part.

Give --timing once per model (the forms: passtime simulate --help). A profile brings its best
constants along, the two numbers that spend the same time in total on this workload, and its @pass
column if it was fitted on mixed passes too. Differences are to the first model, in percent.

  passtime compare --engine vllm.json --trace azure.csv --timing my-gpu.json --html page.html
  passtime compare --prefill-engine p.json --decode-engine d.json --workload code \\
      --request-rate 4 --timing my-gpu.json --timing fixed:40,12
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from passtime.outputs import refuse_unwritable
from passtime.replay_flags import USAGE, add_replay_arguments, files_read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime compare``."""
    parser.usage = (
        f"%(prog)s {USAGE}\n"
        "         --timing SPEC [--timing SPEC …] [--html OUT.html] [--json] [flags …]"
    )
    parser.add_argument(
        "--timing", action="append", required=True, metavar="SPEC", help="a model; give several"
    )
    report = add_replay_arguments(parser)
    report.add_argument("--json", action="store_true", help="print the comparison as JSON")
    report.add_argument("--html", metavar="OUT.html", help="write one self-contained page")
    report.add_argument("-o", "--output", metavar="OUT.json", help="write the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, print, write."""
    from passtime.comparison import compare, render
    from passtime.replay_inputs import replay_inputs
    from passtime.sched.replay.report import DEFAULT_PERCENTILES
    from passtime.sched.workload.files import replace_file

    refuse_unwritable((args.html, args.output), inputs=files_read(args, args.timing))
    if args.html is not None:
        from passtime.comparison_page import page, require_matplotlib

        require_matplotlib()
    inputs = replay_inputs(args)
    for note in inputs.notes:
        print(f"passtime compare: {note}", file=sys.stderr)
    started = time.perf_counter()
    comparison = compare(
        inputs.workload,
        inputs.deployment,
        args.timing,
        inputs.options,
        percentiles=inputs.percentiles or DEFAULT_PERCENTILES,
        slo=inputs.slo,
        progress=_say_model if sys.stderr.isatty() else None,
    )
    seconds = time.perf_counter() - started
    echo = {**inputs.echo, "timing": args.timing}
    document = comparison.document(echo).to_json()
    if args.output is not None:
        replace_file(Path(args.output), document)
    if args.html is not None:
        replace_file(Path(args.html), page(comparison, echo).encode())
    if args.json:
        sys.stdout.write(document.decode())
    else:
        from passtime.tables import stdout_console

        render(comparison, stdout_console())
    print(
        f"passtime compare: {len(inputs.workload)} requests under "
        f"{len(comparison.columns)} models, in {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0


def _say_model(title: str) -> None:
    print(f"passtime compare: replaying under {title}", file=sys.stderr)
