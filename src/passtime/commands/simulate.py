"""Replay a trace or a synthetic workload through simulated workers under one timing model.

Prints TTFT, TPOT, ITL, E2E, throughput and goodput. Workers either do all (--engine), or one pool
of them prefills and hands every request over to another that decodes (--prefill-engine with
--decode-engine): then TTFT holds the handoff too, and --timing is asked by both pools.

  passtime simulate --engine vllm.json --trace azure.csv --goodput ttft:500 tpot:50
  passtime simulate --engine vllm.json --workload code --request-rate 4 --timing my-gpu.json
  passtime simulate --prefill-engine p.json --decode-engine d.json --num-decode-workers 2 \\
      --workload conversation --request-rate 8 --json -o report.json

--timing takes
  config                  what the engine file says (the default)
  polynomial              the reference's default
  fixed:PREFILL,DECODE    two constants, in ms
  fixed:from=SPEC         the two constants that spend the same time as SPEC on this workload
  PROFILE[@calls|@pass]   a profile file or a shipped profile, asked by two calls per pass (the
                          default) or for the whole pass at once; also NVIDIA's .npz

--intervals replays the workload under draws of the profile, each as far off as its calibration may
be, and reports the range of every figure: what the fit's error means for TTFT and TPOT.

A goodput bound that nothing meets gives a goodput of 0 and a sentence: it is a figure, not a gate,
and the exit code stays 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from passtime.outputs import refuse_unwritable
from passtime.replay_flags import USAGE, Once, add_replay_arguments, files_read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime simulate``."""
    parser.usage = f"%(prog)s {USAGE}\n         [--timing SPEC] [--json] [-o OUT.json] [flags …]"
    parser.add_argument("--timing", action=Once, metavar="SPEC", help="default: config")
    report = add_replay_arguments(parser)
    report.add_argument("--per-request", metavar="OUT.jsonl", help="write a record per request")
    report.add_argument(
        "--write-trace", metavar="OUT.jsonl", help="write the workload as a mooncake trace"
    )
    report.add_argument(
        "--intervals",
        nargs="?",
        type=int,
        const=20,
        metavar="DRAWS",
        help="how sure the figures are: replay so many draws of the profile (20)",
    )
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    report.add_argument("-o", "--output", metavar="OUT.json", help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, write."""
    import msgspec

    from passtime.replay_inputs import replay_inputs
    from passtime.sched.replay.records import request_lines
    from passtime.sched.workload.files import replace_file
    from passtime.sched.workload.mooncake import write_mooncake
    from passtime.simulation import coverage_sentence, goodput_sentence, simulate

    refuse_unwritable(
        (args.per_request, args.write_trace, args.output),
        inputs=files_read(args, [args.timing or "config"]),
    )
    inputs = replay_inputs(args)
    for note in inputs.notes:
        print(f"passtime simulate: {note}", file=sys.stderr)
    if args.per_request is not None:
        inputs = replace(inputs, options=replace(inputs.options, capture_admissions=True))
    if args.write_trace is not None:
        write_mooncake(inputs.workload, args.write_trace)
    started = time.perf_counter()
    timing = "config" if args.timing is None else args.timing
    simulation = simulate(inputs, timing)
    document = simulation.report
    if args.intervals is not None:
        from passtime.uncertainty import uncertainty

        intervals = uncertainty(inputs, timing, count=args.intervals, seed=args.seed or 0)
        document = msgspec.structs.replace(document, intervals=intervals)
    seconds = time.perf_counter() - started
    if args.per_request is not None:
        lines = request_lines(simulation.outcome, inputs.workload)
        replace_file(Path(args.per_request), lines)
    if args.output is not None:
        replace_file(Path(args.output), document.to_json())
    sentences = (goodput_sentence(inputs, document), coverage_sentence(document))
    told = [sentence for sentence in sentences if sentence is not None]
    if args.json:
        sys.stdout.write(document.to_json().decode())
        for sentence in told:
            print(f"passtime simulate: {sentence}", file=sys.stderr)
    else:
        from passtime.tables import interval_table, latency_table, run_table, stdout_console

        console = stdout_console()
        console.print(latency_table(document, inputs.percentiles), "")
        if document.intervals is not None:
            console.print(interval_table(document, inputs.percentiles), "")
        console.print(run_table(document))
        for sentence in told:
            console.print(sentence)
    print(
        f"passtime simulate: {document.counts['arrived_requests']} requests, "
        f"{simulation.outcome.clock_ms / 1000.0:.1f} s of serving, in {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0
