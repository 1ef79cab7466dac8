"""Random workloads through the literal core and the lock-step one; every bit must agree.

    python tests/parity/fuzz_lockstep.py --runs 2000 --seed 1

Prints each difference, and exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sched"))

from lockstep_comparison import differences
from workload_generators import random_case


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="first seed; then one after the other")
    args = parser.parse_args(argv)
    failed = 0
    for seed in range(args.seed, args.seed + args.runs):
        found = differences(random_case(seed))
        if found:
            failed += 1
            print(f"seed {seed} differs:", *found, sep="\n  ", flush=True)
    print(f"{args.runs} random workloads, {failed} with differences")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
