"""Fit a timing profile to a measurement log, to a table of passes, or to a profile's own points.

Prints the errors: in sample, held out (five folds pooled), extrapolation along each axis, the noise
floor and the worst regime. A table (CSV or JSON lines with new_tokens, prefix_tokens, decodes,
kv_tokens, latency_ms) needs --model and --device; a log and a profile say both themselves. Data
that are physically impossible, and coefficients outside their range, are refused unless --force is
given.
"""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime fit``."""
    parser.add_argument("log", metavar="LOG.jsonl|TABLE|PROFILE", help="what was measured")
    parser.add_argument("-o", "--output", required=True, metavar="PROFILE.json")
    parser.add_argument(
        "--model-class",
        choices=("step", "affine", "roofline"),
        default="step",
        help="default: step",
    )
    parser.add_argument("--model", metavar="NAME|CONFIG.json", help="model of a table")
    parser.add_argument("--device", metavar="NAME", help="card of a table: h100, rtx4090 …")
    parser.add_argument("--force", action="store_true", help="fit impossible data all the same")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON")


def run(args: argparse.Namespace) -> int:
    """Fit, write, print."""
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # small matrices: threads only get in the way

    from passtime.fitting import fit, fit_report
    from passtime.outputs import refuse_unwritable
    from passtime.profile_tables import errors_table
    from passtime.profiles.document import save_profile
    from passtime.tables import stdout_console

    refuse_unwritable([args.output], inputs=[args.log, args.model])
    profile = fit(
        args.log,
        model_class=args.model_class,
        force=args.force,
        model=args.model,
        device=args.device,
    )
    save_profile(profile, args.output)
    if args.json:
        sys.stdout.write(fit_report(profile, args.output))
    else:
        stdout_console().print(errors_table(profile.errors))
        print(f"passtime fit: wrote {args.output}", file=sys.stderr)
    return 0
