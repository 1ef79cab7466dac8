"""What ``simulate`` and ``compare`` have in common: a deployment, a workload, replay options."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from passtime import __version__
from passtime.deployment import Deployment
from passtime.engine_files import echo_deployment, read_deployment
from passtime.errors import InputError
from passtime.replay_flags import (
    LOAD_FLAGS,
    ONE_POOL_FLAGS,
    TRACE_FLAGS,
    TWO_POOL_FLAGS,
    refuse_idle,
)
from passtime.sched.replay.metrics import Slo
from passtime.sched.simulate import ReplayOptions
from passtime.sched.workload.formats import load_trace
from passtime.sched.workload.rows import Workload
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic

GOODPUT_KEYS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInputs:
    """Everything a replay needs but the timing model.

    ``echo`` is what the report repeats of it; ``notes`` are sentences for the user.
    """

    workload: Workload
    deployment: Deployment
    options: ReplayOptions = field(default_factory=ReplayOptions)
    percentiles: tuple[float, ...] = ()
    slo: Slo | None = None
    echo: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def replay_inputs(args: argparse.Namespace) -> ReplayInputs:
    """Read deployment and workload as the flags say. Raises InputError."""
    deployment, engine_notes = read_deployment(args)
    options, echoed_options = _options(args)
    slo = parse_goodput(args.goodput) if args.goodput else None
    workload, source, notes = _trace(args) if args.trace is not None else _synthetic(args)
    echo: dict[str, Any] = {
        "passtime": __version__,
        **source,
        "replay": echoed_options,
        "percentiles": list(args.percentiles),
        "goodput": slo.bounds() if slo else None,
        **echo_deployment(deployment),
    }
    return ReplayInputs(
        workload=workload,
        deployment=deployment,
        options=options,
        percentiles=args.percentiles,
        slo=slo,
        echo=echo,
        notes=(*engine_notes, *notes),
    )


def _options(args: argparse.Namespace) -> tuple[ReplayOptions, dict[str, Any]]:
    """Replay options, and those of them that mean something for this deployment."""
    names = ONE_POOL_FLAGS if args.engine is not None else TWO_POOL_FLAGS
    asked = {
        "concurrency": args.concurrency,
        **{name: 1 if (workers := getattr(args, name)) is None else workers for name in names},
        "arrival_speedup_ratio": args.arrival_speedup_ratio,
        "max_sim_time_ms": args.max_sim_time_ms,
    }
    return ReplayOptions(**asked), asked


def parse_goodput(bounds: list[str]) -> Slo:
    """``["ttft:500", "tpot:50"]`` as bounds in ms. Raises InputError."""
    given: dict[str, float] = {}
    for text in bounds:
        key, _, number = text.partition(":")
        if key not in GOODPUT_KEYS:
            raise InputError(f"--goodput {text}: known keys: {', '.join(GOODPUT_KEYS)}")
        name = GOODPUT_KEYS[key]
        if name in given:
            raise InputError(f"--goodput {text}: {key} is given twice")
        try:
            given[name] = float(number)
        except ValueError:
            raise InputError(f"--goodput {text}: expected {key}:MILLISECONDS") from None
    return Slo(**given)


def _trace(args: argparse.Namespace) -> tuple[Workload, dict[str, Any], list[str]]:
    refuse_idle(args, LOAD_FLAGS, "--workload")
    loaded = load_trace(
        args.trace,
        trace_format=args.trace_format,
        trace_block_size=args.trace_block_size,
        time_unit=args.trace_time_unit,
    )
    workload = loaded.workload
    echo = {
        "path": args.trace,
        "format": loaded.trace_format,
        "block_size": workload.trace_block_size if workload.block_ids is not None else None,
        "time_unit": args.trace_time_unit,
        "requests": len(workload),
    }
    return workload, {"trace": echo}, loaded.notes


def _synthetic(args: argparse.Namespace) -> tuple[Workload, dict[str, Any], list[str]]:
    refuse_idle(args, TRACE_FLAGS, "--trace")
    if args.concurrency is not None:
        refuse_idle(args, ("request_rate",), "an open loop, without --concurrency,")
    given = {name: getattr(args, name) for name in LOAD_FLAGS if getattr(args, name) is not None}
    load = SyntheticLoad(kind=args.workload, **{"num_prompts": 1000, **given})
    echo = msgspec.structs.asdict(load)
    if math.isinf(load.request_rate):
        echo["request_rate"] = "inf"
    workload = synthetic(load)
    return workload, {"workload": echo}, _sharing_notes(workload)


def _sharing_notes(workload: Workload) -> list[str]:
    """Prompts too short to share what was asked for would give a quiet nothing (T12)."""
    if workload.block_ids is None or len(workload) == 1:
        return []
    heads = {blocks[0] for blocks in workload.block_ids}
    if len(heads) < len(workload):
        return []
    return [
        "no two prompts share a block: too short for this shared_prefix_ratio in blocks of "
        f"{workload.trace_block_size} tokens, or too many groups"
    ]
