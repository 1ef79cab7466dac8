"""How long one question to a profile takes, alone and inside a replay; and how long a fit.

    python benchmarks/queries.py [PROFILE] [--json]

Alone: every query has sizes never asked before. In a replay: batches drift as they do while
requests decode. Medians of repeats, in µs; loading a profile in ms. No two queries are cached
anywhere: both figures are of the same code. The fit is of 200 seeded synthetic points, its held-out
and extrapolation refits included, once, in s.
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

from passtime.calibrate.fit import fit_profile
from passtime.calibrate.laws import Bench
from passtime.calibrate.log import Batch
from passtime.calibrate.points import measured_point
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import EngineFacts, MeasuredPoint, Provenance, load_profile
from passtime.profiles.predict import decode_shape, prefill_shape
from passtime.profiles.provider import ProfileTiming
from passtime.profiles.shapes import load_model
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
        "fit_200_points_s": fit_s(200),
    }


def fit_s(count: int) -> float:
    """Seconds of a whole fit of an imaginary GPU: prompts, decodes and both, with 1 % noise."""
    bench = Bench(
        model=load_model("llama-3.1-8b"),
        engine=EngineFacts(),
        device=DeviceFacts(
            kind="cuda",
            name="imaginary GPU",
            memory_bytes=80 * 2**30,
            peak_flops=9e14,
            peak_bytes_per_s=3e12,
        ),
    )
    rng = random.Random(0)
    points = [_synthetic(rng, number) for number in range(count)]
    provenance = Provenance(made_by="a benchmark", timed="nothing")
    started = time.perf_counter()
    fit_profile(bench, points, name="imaginary", provenance=provenance, source="benchmark")
    return time.perf_counter() - started


def _synthetic(rng: random.Random, number: int) -> MeasuredPoint:
    def size(low: int, high: int) -> int:
        drawn: float = low * (high / low) ** rng.random()
        return round(drawn)

    prompts = tuple((size(16, 2048), rng.choice([0, size(16, 8192)])) for _ in range(size(1, 3)))
    batch = Batch(
        prefill=prompts if number % 3 != 1 else (),
        decode=(size(16, 8192),) * size(1, 128) if number % 3 else (),
    )
    new = sum(chunk for chunk, _ in batch.prefill)
    pairs = sum(chunk * prefix + chunk * (chunk + 1) / 2 for chunk, prefix in batch.prefill)
    decodes, kv_tokens = len(batch.decode), sum(batch.decode)
    passed = 0.4 + max(6.2, 0.026 * (new + decodes)) + 1.1e-6 * pairs + 5.2e-5 * kv_tokens
    samples = [passed * rng.lognormvariate(0.0, 0.01) for _ in range(7)]
    return measured_point(batch, statistics.median(samples), samples)


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
