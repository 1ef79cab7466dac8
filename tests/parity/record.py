"""Record random cases with the reference's results, as one file that run_cases.py reads.

    python tests/parity/record.py --seeds 0:40 [--backend vllm,trtllm] [--only WORD] -o FILE.json
    python tests/parity/record.py --like CASE.json… --backend vllm -o FILE.json

``--like`` takes the traces and sizes of recorded cases to another backend; ``--only`` keeps the
cases whose configuration or options mention a word (num_workers, dp_size …). What the reference
hangs on is left out. Needs the reference, as fuzz.py does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generator import BACKENDS, random_case
from reference import Reference


def retold(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """A recorded case of one pool for another backend, without what only its own reads."""
    launch = case["engine"]
    foreign = ("sglang", "prefill_decode_interval")
    engine = {k: v for k, v in launch["engine"].items() if k not in foreign} | {"backend": backend}
    kept = ("schema", "prefill_engine", "decode_engine", "replay", "trace")
    return {
        "name": f"{case['name']}_as_{backend}",
        "engine": {**launch, "engine": engine},
        **{key: case[key] for key in kept},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--seeds", help="FIRST:LAST, the last one not included")
    source.add_argument("--like", type=Path, nargs="+", metavar="CASE.json")
    parser.add_argument("--backend", default=",".join(BACKENDS))
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(argv)
    backends = tuple(args.backend.split(","))
    if args.like:
        cases = [retold(json.loads(path.read_bytes()), backends[0]) for path in args.like]
    else:
        first, last = map(int, args.seeds.split(":"))
        cases = [random_case(seed, backends) for seed in range(first, last)]
    checks = []
    with Reference() as reference:
        for case in cases:
            if args.only not in json.dumps(case):
                continue
            answer = reference.ask(case)
            if answer["status"] in ("ok", "error"):
                checks.append({**case, "expected": answer})
    lines = ",\n".join(json.dumps(check, separators=(",", ":")) for check in checks)
    args.output.write_text(f'{{"schema":1,"checks":[\n{lines}\n]}}\n')
    print(f"{len(checks)} cases in {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
