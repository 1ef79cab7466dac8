"""How long one question to a profile takes: alone, and inside a replay.

    python benchmarks/queries.py [PROFILE] [--json]

Alone: every query has sizes never asked before. In a replay: batches drift as they do while
requests decode. Medians of repeats, in µs; loading a profile in ms. No two queries are cached
anywhere: both figures are of the same code.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np

from passtime.profiles.document import load_profile
from passtime.profiles.predict import decode_shape, prefill_shape
from passtime.profiles.provider import ProfileTiming
from passtime.sched.timing import PassShape

REPEATS = 7
QUERIES = 3000


def microseconds(ask: Callable[..., object], questions: Iterable[tuple[object, ...]]) -> float:
    """Median over repeats of the mean time of a question."""
    asked = list(questions)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for question in asked:
            ask(*question)
        times.append((time.perf_counter() - started) / len(asked))
    return 1e6 * statistics.median(times)


def measure(name: str) -> dict[str, float]:
    """All figures of one profile."""
    started = time.perf_counter()
    timing = ProfileTiming(load_profile(name))
    loading = 1e3 * (time.perf_counter() - started)
    rng = random.Random(0)

    def size(low: int, high: int) -> int:
        drawn: float = low * (high / low) ** rng.random()
        return round(drawn)

    def whole(prompts: int, new: int, decodes: int, context: int) -> PassShape:
        prefill, decode = prefill_shape(prompts, new, 0), decode_shape(decodes, decodes * context)
        return PassShape(*prefill[:4], *decode[4:7], 10**6)

    decodes = [(size(1, 256), size(256, 10**6), 0, 10**6) for _ in range(QUERIES)]
    prefills = [(size(1, 8), size(300, 4000), size(1, 250)) for _ in range(QUERIES)]
    wholes = [
        (whole(size(1, 4), size(16, 2000), size(1, 256), size(16, 8000)),) for _ in range(QUERIES)
    ]
    drifting = [(64, 64 * (500 + step), 500 + step, 10**6) for step in range(QUERIES)]
    stretch = np.arange(64 * 500, 64 * 500 + 64 * QUERIES, 64)
    return {
        "load_ms": loading,
        "decode_alone_us": microseconds(timing.predict_decode_ms, decodes),
        "decode_in_replay_us": microseconds(timing.predict_decode_ms, drifting),
        "decode_in_stretch_us": microseconds(
            timing.predict_decode_many, [(64, stretch, 10**6)] * 20
        )
        / QUERIES,
        "prefill_alone_us": microseconds(timing.predict_prefill_ms, prefills),
        "whole_pass_alone_us": microseconds(timing.predict_pass_ms, wholes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", nargs="?", default="cpu-demo", metavar="PROFILE")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = measure(args.profile)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name}: {value:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
