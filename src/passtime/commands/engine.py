"""Write an engine configuration for a profile: KV blocks from its device's memory.

Shows the sum: device memory times utilization, less weights, activations and a reserve, over the
KV bytes of a block. The configuration names the profile as its external timing model and loads in
the reference as well. --model refuses a profile that was measured with another shape.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime engine``."""
    parser.add_argument("--timing", required=True, metavar="PROFILE", help="shipped name or file")
    parser.add_argument("--model", metavar="NAME|CONFIG.json", help="default: the profile's own")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    parser.add_argument("--backend", choices=("vllm", "sglang", "trtllm"), default="vllm")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="default: the backend's")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--reserve-gib", type=_gib, metavar="GIB", help="default: 0.7")
    parser.add_argument("--composition", choices=("calls", "pass"), default="calls")
    parser.add_argument("-o", "--output", metavar="ENGINE.json", help="default: standard output")
    parser.add_argument("--json", action="store_true", help="print the sum as JSON")


def run(args: argparse.Namespace) -> int:
    """Derive, write, show the sum."""
    from passtime.engine import EngineWish, engine_for, memory_document, profile_name
    from passtime.memory import GIB
    from passtime.outputs import refuse_unwritable
    from passtime.profile_tables import memory_table
    from passtime.profiles.document import load_profile
    from passtime.profiles.shapes import load_model
    from passtime.sched.workload.files import replace_file
    from passtime.tables import stdout_console

    refuse_unwritable([args.output], inputs=[args.timing, args.model])
    wish = EngineWish(
        backend=args.backend,
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        composition=args.composition,
        reserve_bytes=None if args.reserve_gib is None else int(args.reserve_gib * GIB),
    )
    engine = engine_for(
        load_profile(args.timing),
        profile_name(args.timing),
        wish,
        model=None if args.model is None else load_model(args.model),
    )
    if args.output is None:
        sys.stdout.write(engine.to_json().decode())
        return 0
    replace_file(Path(args.output), engine.to_json())
    if args.json:
        sys.stdout.write(memory_document(engine))
    else:
        stdout_console().print(memory_table(engine.memory))
    return 0


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0.0 <= gib < math.inf:
        raise argparse.ArgumentTypeError(f"expected GiB >= 0, found {text!r}")
    return gib
