"""Run oracle cases: files or folders in the format of the reference's recorded results.

    python tests/parity/run_cases.py [--backend vllm[,sglang…]] [--core auto|literal] PATH…

One line per failing case with its first difference, then ``N passed, M failed, K skipped``.
Exit code 1 if any failed, 2 if nothing ran.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, load_cases
from comparing import first_difference


def case_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Files as given; of folders every case file directly inside."""
    for path in paths:
        if path.is_dir():
            yield from sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
        else:
            yield path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--backend", help="comma-separated backends to run; default: all")
    parser.add_argument("--core", choices=("auto", "literal"), default="auto")
    args = parser.parse_args(argv)
    backends = None if args.backend is None else set(args.backend.split(","))
    passed = failed = skipped = 0
    for path in case_files(args.paths):
        for case in load_cases(path):
            if backends is not None and case.backend not in backends:
                skipped += 1
                continue
            difference = first_difference(case, core=args.core)
            if difference is None:
                passed += 1
            else:
                failed += 1
                print(f"FAIL {case.name}: {difference}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    if passed + failed == 0:
        return 2
    return 1 if failed else 0


__all__ = ["Case", "case_files", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
