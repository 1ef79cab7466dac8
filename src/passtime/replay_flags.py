"""The flags that ``simulate`` and ``compare`` share; :mod:`passtime.replay_inputs` reads them."""

from __future__ import annotations

import argparse

from passtime.sched.workload.names import KINDS, TIME_UNITS, TRACE_FORMATS

# Flags that say something of one source of requests only.
TRACE_FLAGS = ("trace_format", "trace_block_size", "trace_time_unit")
LOAD_FLAGS = (
    "num_prompts",
    "request_rate",
    "burstiness",
    "constant_intervals",
    "input_len",
    "output_len",
    "shared_prefix_ratio",
    "num_prefix_groups",
    "seed",
)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that :func:`replay_inputs` reads."""
    parser.add_argument(
        "--engine", required=True, metavar="ENGINE.json", help="engine or launch configuration"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="trace to replay, may be gzipped")
    source.add_argument("--workload", choices=KINDS, help="synthetic workload to replay")
    _add_trace_arguments(parser.add_argument_group("with --trace"))
    _add_load_arguments(parser.add_argument_group("with --workload"))
    _add_replay_options(parser.add_argument_group("replay"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentiles",
        type=_percentiles,
        default=(),
        metavar="P,P,…",
        help="nearest rank, 0 … 100 (default 50,90,99)",
    )
    report.add_argument(
        "--goodput", nargs="+", metavar="KEY:MS", help="bounds: ttft:500 tpot:50 e2e:9000"
    )


def _add_trace_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace-format", choices=TRACE_FORMATS, help="default: by the first line")
    group.add_argument(
        "--trace-block-size", type=int, metavar="TOKENS", help="tokens per hash id (default 512)"
    )
    group.add_argument(
        "--trace-time-unit", choices=TIME_UNITS, help="unit of the times (mooncake ms, others s)"
    )


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests (default 1000)")
    group.add_argument(
        "--request-rate", type=float, metavar="R", help="requests/s (default inf: all at once)"
    )
    group.add_argument(
        "--burstiness", type=float, metavar="B", help="1 = Poisson (default), smaller = burstier"
    )
    group.add_argument(
        "--constant-intervals", action="store_true", default=None, help="equal intervals"
    )
    group.add_argument("--input-len", type=int, metavar="TOKENS", help="prompts of constant")
    group.add_argument("--output-len", type=int, metavar="TOKENS", help="outputs of constant")
    group.add_argument(
        "--shared-prefix-ratio", type=float, metavar="SHARE", help="0 … 1 of every prompt"
    )
    group.add_argument(
        "--num-prefix-groups", type=int, metavar="N", help="different shared prefixes (default 1)"
    )
    group.add_argument("--seed", type=int, metavar="S", help="of all that is drawn (default 0)")


def _add_replay_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N sessions at any time"
    )
    group.add_argument("--num-workers", type=int, default=1, metavar="N", help="default 1")
    group.add_argument(
        "--arrival-speedup-ratio", type=float, default=1.0, metavar="R", help="divides arrivals"
    )
    group.add_argument(
        "--max-sim-time-ms", type=float, metavar="T", help="stop the simulated clock there"
    )


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers like 50,90,99, found {text!r}"
        ) from None
    if not all(0.0 <= percent <= 100.0 for percent in percentiles):
        raise argparse.ArgumentTypeError(f"expected 0 … 100, found {text!r}")
    return percentiles
