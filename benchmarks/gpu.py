"""Everything that needs an NVIDIA GPU, in one command of under ten minutes, without a network.

    python benchmarks/gpu.py --output FOLDER [--model NAME] [--budget SECONDS]

Tests marked ``gpu``, a calibration and a second one to hold against the intervals of the first,
the kernels against cuBLAS and flash attention, and the questions of ``questions.py``. Each step
is a process of its own: one that fails or runs out of time does not stop the others. FOLDER then
holds eight files; ``report.json`` sums them up. Exits with 1 if a step failed, 3 without a GPU.

Needs Python 3.11, torch, triton, numpy, scipy, msgspec, rich, pytest and hypothesis; better with
nvidia-ml-py. From a checkout that is not installed: PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from passtime.errors import PasstimeError

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S = 580.0
FILES = (
    "tests.txt",
    "profile.json",
    "profile.log.jsonl",
    "questions.json",
    "kernels.json",
    "repeat.json",
    "repeat.log.jsonl",
    "report.json",
)


@dataclass(frozen=True)
class Step:
    """A command, its share of the time, and the file its output is added to (None: stderr)."""

    name: str
    command: Sequence[str]
    limit_s: float
    output: str | None = None


@dataclass(frozen=True)
class Outcome:
    """``code`` is None where the time was up."""

    name: str
    code: int | None
    seconds: float


def steps(folder: Path, *, model: str, budget_s: float) -> list[Step]:
    """In the order of what one would miss most if the time were up."""
    python = sys.executable
    benchmarks = ROOT / "benchmarks"

    def calibration(name: str, seed: int) -> Step:
        profile, log = folder / f"{name}.json", folder / f"{name}.log.jsonl"
        command = [
            *(python, "-m", "passtime", "calibrate", "--device", "cuda", "--model", model),
            *("--budget", str(budget_s), "--seed", str(seed)),
            *("--output", str(profile), "--log", str(log), "--json"),
        ]
        return Step(name, command, budget_s + 60)

    def tests(name: str, folder: str, *options: str, limit_s: float) -> Step:
        # On a newer Python or NumPy than ours a warning is no failure.
        command = [*(python, "-m", "pytest", "-m", "gpu", "-W", "default"), *options]
        return Step(name, [*command, str(ROOT / "tests" / folder)], limit_s, "tests.txt")

    # Compiling takes most of the kernels' tests, so they share the cores; those of the runner
    # time passes, so they are alone.
    cores = ["-n", "8"] if find_spec("xdist") else []
    return [
        tests("kernel tests", "kernels", *cores, limit_s=150),
        tests("runner tests", "calibrate", limit_s=60),
        calibration("profile", 0),
        Step(
            "questions",
            [
                *(python, str(benchmarks / "questions.py"), "--model", model),
                *("--output", str(folder / "questions.json")),
            ],
            120,
        ),
        Step(
            "kernels",
            [python, str(benchmarks / "kernels.py"), "--output", str(folder / "kernels.json")],
            150,
        ),
        calibration("repeat", 1),
    ]


def run_step(step: Step, folder: Path, deadline: float) -> Outcome:
    """Run it to its end or the time's; what it printed is kept either way."""
    started = time.monotonic()
    limit_s = min(step.limit_s, deadline - started)
    if limit_s <= 0:
        return Outcome(step.name, None, 0.0)
    print(f"== {step.name}: {' '.join(step.command)}", file=sys.stderr, flush=True)
    sink = (folder / step.output).open("a") if step.output else None
    try:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            timeout=limit_s,
            stdout=sink or sys.stderr,
            stderr=subprocess.STDOUT if sink else None,
        )
        code: int | None = done.returncode
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if sink is not None:
            sink.close()
    return Outcome(step.name, code, round(time.monotonic() - started, 1))


def repeatability(first: Path, second: Path) -> dict[str, Any]:
    """How the points of a second calibration lie within the intervals of the first profile."""
    from passtime.profiles.document import load_profile
    from passtime.profiles.predict import Predictor
    from passtime.sched.timing import PassShape

    profile, repeat = load_profile(first), load_profile(second)
    predictor = Predictor.of(profile)
    inside, errors = 0, []
    for point in repeat.points:
        shape = PassShape(
            prefill_requests=point.prefill_requests,
            prefill_new_tokens=point.prefill_new_tokens,
            prefill_prefix_tokens=point.prefill_prefix_tokens,
            prefill_pairs=point.prefill_pairs,
            decode_requests=point.decode_requests,
            decode_kv_tokens=point.decode_kv_tokens,
            decode_kv_max=point.decode_kv_max,
            total_kv_tokens=0,
        )
        errors.append(abs(predictor.pass_ms(shape) / point.latency_ms - 1))
        interval = predictor.interval(shape)
        inside += interval is not None and interval.low_ms <= point.latency_ms <= interval.high_ms
    return {
        "points": len(repeat.points),
        "level_percent": profile.intervals and profile.intervals.level_percent,
        "inside_percent": round(100 * inside / len(repeat.points), 2),
        "mape_percent": round(100 * sum(errors) / len(errors), 3),
    }


def summary(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What each step came to, and the figures one looks at first."""
    document: dict[str, Any] = {
        "schema": 1,
        "steps": {o.name: {"exit_code": o.code, "seconds": o.seconds} for o in outcomes},
    }
    profile, repeat = folder / "profile.json", folder / "repeat.json"
    if profile.exists():
        found = json.loads(profile.read_bytes())
        document["profile"] = {
            "device": found["device"]["name"],
            "points": len(found["points"]),
            "errors": found["errors"],
        }
    if profile.exists() and repeat.exists():
        document["repeat"] = repeatability(profile, repeat)
    return document


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, metavar="FOLDER")
    parser.add_argument("--model", default="llama-3.1-8b", metavar="NAME|CONFIG.json")
    parser.add_argument(
        "--budget", type=float, default=110.0, metavar="SECONDS", help="of each calibration"
    )
    args = parser.parse_args()
    from passtime.calibrate.devices import device

    try:
        facts = device("cuda")
    except PasstimeError as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"benchmarks/gpu.py: {facts.name}", file=sys.stderr)
    folder = Path(args.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:  # a calibration would go on with the log of an earlier run
        (folder / name).unlink(missing_ok=True)
    deadline = time.monotonic() + TOTAL_S
    outcomes = [
        run_step(step, folder, deadline)
        for step in steps(folder, model=args.model, budget_s=args.budget)
    ]
    text = json.dumps(summary(folder, outcomes), indent=1)
    (folder / "report.json").write_text(text + "\n")
    print(text)
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
