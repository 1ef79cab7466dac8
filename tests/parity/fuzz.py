"""Random workloads, ours against the reference, request by request and exactly.

    python tests/parity/fuzz.py [--minutes M | --runs N] [--backend vllm,trtllm,sglang]
                                [--seed S] [--core auto|literal] [--failures FOLDER]

A failing seed is shrunk and written as a case file that run_cases.py reads. Runs that the reference
cannot finish (it hangs or aborts) are counted by what we say of them, not skipped. Exit code 1 if
anything differed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import case_of
from comparing import CoreName, first_difference, outcome_class
from generator import BACKENDS, random_case
from reference import Reference, reference_python


def compare(case: dict[str, Any], reference: Reference, core: CoreName) -> tuple[str, str | None]:
    """(what the reference did, first difference or None)."""
    answer = reference.ask(case)
    if answer["status"] in ("hung", "aborted"):
        ours = outcome_class(case_of({**case, "expected": {"status": "ok"}}), core=core)
        return f"reference {answer['status']}, ours {ours}", None
    expected = {**case, "expected": answer}
    return f"reference {answer['status']}", first_difference(case_of(expected), core=core)


def shrink(case: dict[str, Any], reference: Reference, core: CoreName) -> dict[str, Any]:
    """Drop trace rows, halves first, for as long as the difference stays."""
    size = max(1, len(case["trace"]) // 2)
    while size:
        start, progressed = 0, False
        while start < len(case["trace"]) and len(case["trace"]) > 1:
            rows = case["trace"][:start] + case["trace"][start + size :]
            smaller = {**case, "trace": rows}
            if rows and compare(smaller, reference, core)[1] is not None:
                case, progressed = smaller, True
            else:
                start += size
        if not progressed or size == 1:
            size //= 2
    return case


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, help="stop after so many runs instead")
    parser.add_argument("--backend", default=",".join(BACKENDS))
    parser.add_argument("--seed", type=int, default=0, help="first seed; then one after the other")
    parser.add_argument("--core", choices=("auto", "literal"), default="auto")
    parser.add_argument("--failures", type=Path, default=Path("parity-failures"))
    args = parser.parse_args(argv)
    if not reference_python().exists():
        print(f"no reference at {reference_python()}: run `make parity`", file=sys.stderr)
        return 2
    backends = tuple(args.backend.split(","))
    counts: Counter[str] = Counter()
    differing = runs = 0
    end = time.monotonic() + 60 * args.minutes
    with Reference() as reference:
        while runs < args.runs if args.runs is not None else time.monotonic() < end:
            case = random_case(args.seed + runs, backends)
            runs += 1
            status, difference = compare(case, reference, args.core)
            counts[status] += 1
            if difference is None:
                continue
            differing += 1
            case = shrink(case, reference, args.core)
            answer = reference.ask(case)
            difference = first_difference(case_of({**case, "expected": answer}), core=args.core)
            args.failures.mkdir(parents=True, exist_ok=True)
            path = args.failures / f"{case['name']}.json"
            path.write_text(json.dumps({**case, "expected": answer}, indent=1) + "\n")
            print(f"DIFFERS {path}: {difference}", flush=True)
    for status, number in sorted(counts.items()):
        print(f"{number:7d} {status}")
    print(f"{runs - differing} passed, {differing} failed")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
