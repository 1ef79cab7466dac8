"""Check whether a table, a measurement log or a profile is physically possible.

Bytes and FLOPs over time against the datasheet, more work in less time, isolated outliers, the
spread of repeats, units off by a thousand, copies. Exit code 1 if a fault was found; warnings are
shown and pass. Published tables are recognised by their columns; --model and --device say what a
table was measured on where its place (HARDWARE/MODEL/tpN) does not.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime check``."""
    parser.add_argument("target", metavar="TABLE|LOG|PROFILE")
    parser.add_argument("--model", metavar="NAME|CONFIG.json", help="model of a table")
    parser.add_argument("--device", metavar="NAME", help="card of a table: h100, rtx4090 …")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Check, print."""
    from passtime.checking import check, findings_document, findings_lines

    checked = check(args.target, device=args.device, model=args.model)
    if args.json:
        sys.stdout.write(findings_document(checked))
    else:
        for line in findings_lines(checked):
            print(line)
    return 0 if checked.ok else 1
