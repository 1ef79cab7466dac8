"""The flags that ``simulate`` and ``compare`` share; :mod:`passtime.replay_inputs` reads them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from passtime.errors import InputError
from passtime.sched.workload.names import KINDS, TIME_UNITS, TRACE_FORMATS

# The two forms of a deployment.
ONE_POOL_FLAGS = ("num_workers",)
TWO_POOL_FLAGS = ("num_prefill_workers", "num_decode_workers")

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


# What argparse would make of these flags by itself fills half a screen, at every mistyped one.
USAGE = (
    "(--engine E.json | --prefill-engine P.json --decode-engine D.json)\n"
    "         (--trace FILE | --workload {" + ",".join(KINDS) + "})"
)


class Once(argparse.Action):
    """A value that may be given once: what somebody named is never quietly ignored.

    Its default is None.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value, the first time."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "given twice")
        setattr(namespace, self.dest, values)


def add_replay_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags that :func:`replay_inputs` reads; the group for those of the report."""
    _add_engine_arguments(parser.add_argument_group("what serves: one pool of workers, or two"))
    requests = parser.add_argument_group("what arrives")
    source = requests.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", action=Once, metavar="FILE", help="trace to replay, may be gzipped"
    )
    source.add_argument(
        "--workload", choices=KINDS, help="synthetic: lengths as in Azure's traces, or constant"
    )
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
        "--goodput",
        nargs="+",
        action="extend",
        metavar="KEY:MS",
        help="bounds: ttft:500 tpot:50 e2e:9000",
    )
    return report


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine", action=Once, metavar="E.json", help="engine or launch configuration"
    )
    group.add_argument(
        "--num-workers", type=int, metavar="N", help="workers of --engine (default 1)"
    )
    for pool in ("prefill", "decode"):
        group.add_argument(
            f"--{pool}-engine",
            action=Once,
            metavar=f"{pool[0].upper()}.json",
            help=f"the same, of the {pool} pool (worker_type {pool})",
        )
    for pool in ("prefill", "decode"):
        group.add_argument(
            f"--num-{pool}-workers", type=int, metavar="N", help=f"{pool} workers (default 1)"
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


def refuse_idle(args: argparse.Namespace, names: tuple[str, ...], needed: str) -> None:
    """Raise InputError for a flag that could change nothing: it was meant for something else."""
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with {needed} only")


def files_read(args: argparse.Namespace, timings: Sequence[str]) -> list[str | None]:
    """What a replay reads: engines, trace, and whatever of ``timings`` may name a profile."""
    specs = [spec.removeprefix("fixed:from=") for spec in timings]
    profiles = [name for spec in specs for name in (spec, spec.rpartition("@")[0]) if name]
    return [args.engine, args.prefill_engine, args.decode_engine, args.trace, *profiles]
