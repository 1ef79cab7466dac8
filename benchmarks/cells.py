"""What the benchmark replays: workloads that both simulators read, by name."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))

from cases import load_cases, shared_folder

Row = dict[str, Any]

TRACE_BLOCK = 512
BLOCK = 16
CONCURRENCY = (16, 64, 256, 1024)
OUTPUT = (64, 256, 1024)
FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload under one configuration. ``rows`` makes its trace, of a share of its size.

    ``must``: how many times less CPU time than the reference the compiled core takes at least.
    """

    name: str
    group: str
    engine: dict[str, Any]
    replay: dict[str, Any]
    rows: Callable[[float], list[Row]]
    output: int | None = None
    capture: bool = False
    must: float = 0.0

    @property
    def backend(self) -> str:
        return str(self.engine["engine"]["backend"])


def equal_rows(requests: int, input_tokens: int, output_tokens: int) -> list[Row]:
    """Prompts of one length that share nothing."""
    blocks = -(-input_tokens // TRACE_BLOCK)
    return [
        {
            "timestamp": 0.0,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": list(range(row * blocks, (row + 1) * blocks)),
        }
        for row in range(requests)
    ]


def uneven_rows(requests: int, mean_output: int, interval_ms: float = 0.0) -> list[Row]:
    """Prompts of 100 … 900 tokens, outputs of 1 … twice the mean, Poisson arrivals."""
    rng = random.Random(1)
    now_ms, rows = 0.0, []
    for row in range(requests):
        now_ms += rng.expovariate(1 / interval_ms) if interval_ms else 0.0
        rows.append(
            {
                "timestamp": round(now_ms, 3),
                "input_length": rng.randint(100, 900),
                "output_length": rng.randint(1, 2 * mean_output),
                "hash_ids": [2 * row, 2 * row + 1],
            }
        )
    return rows


def shared_rows(requests: int, mean_output: int) -> list[Row]:
    """Prompts of 2 … 12 trace blocks of 64 tokens, the first of them from one of eight heads."""
    rng = random.Random(2)
    heads = [[100 * head + depth for depth in range(12)] for head in range(8)]
    fresh, rows = 10_000, []
    for _ in range(requests):
        blocks = rng.randint(4, 12)
        common = rng.randint(2, blocks)
        fresh += 12
        rows.append(
            {
                "timestamp": 0.0,
                "input_length": 64 * blocks - rng.randint(0, 63),
                "output_length": rng.randint(1, 2 * mean_output),
                "hash_ids": rng.choice(heads)[:common]
                + list(range(fresh, fresh + blocks - common)),
            }
        )
    return rows


def first_rows(requests: int, trace: list[Row]) -> list[Row]:
    """The beginning of a recorded trace."""
    return trace[:requests]


def sized(
    requests: int, make: Callable[..., list[Row]], *args: Any
) -> Callable[[float], list[Row]]:
    """Rows made by ``make(number, *args)`` for a share of ``requests``."""
    return lambda share: make(int(requests * share), *args)


def launch(
    backend: str, concurrency: int, input_tokens: int, output_tokens: int, **engine: Any
) -> dict[str, Any]:
    """A launch configuration with a pool of 1.25 times what ``concurrency`` requests need."""
    need = concurrency * -(-(input_tokens + output_tokens) // BLOCK)
    settings = {
        "backend": backend,
        "block_size": BLOCK,
        "num_gpu_blocks": need * 5 // 4,
        "max_num_seqs": concurrency,
        "timing_model": FIXED,
    }
    return {"engine": settings | engine}


def closed(concurrency: int, trace_block: int = TRACE_BLOCK) -> dict[str, Any]:
    """Replay options of a closed loop."""
    return {"trace_block_size": trace_block, "replay_concurrency": concurrency}


def grid(backend: str, requests: int = 4096) -> Iterator[Cell]:
    """Closed loop, 512 input tokens, all prompts different, fixed timing."""
    for prefix_cache in (False, True):
        for concurrency in CONCURRENCY:
            for output in OUTPUT:
                cache = "on" if prefix_cache else "off"
                yield Cell(
                    name=f"{backend}, cache {cache}, {concurrency} x {output}",
                    group="grid",
                    engine=launch(
                        backend, concurrency, 512, output, enable_prefix_caching=prefix_cache
                    ),
                    replay=closed(concurrency),
                    rows=sized(requests, equal_rows, 512, output),
                    output=output,
                    must=25.0 if (prefix_cache, concurrency, output) == (False, 256, 1024) else 1.0,
                )


def uneven(backend: str) -> Iterator[Cell]:
    """Loads on which more happens than decoding."""

    def cell(name: str, rows: Callable[[float], list[Row]], **options: Any) -> Cell:
        concurrency = options.pop("concurrency", 64)
        replay = options.pop("replay", closed(concurrency))
        output = options.pop("output", 256)
        engine = launch(backend, concurrency, 900, 2 * output, **options)
        return Cell(
            name=f"{backend}, {name}",
            group="uneven",
            engine=engine,
            replay=replay,
            rows=rows,
            output=output,
            must=1.0,
        )

    for concurrency in (16, 64, 256):
        yield cell(
            f"unequal lengths, {concurrency} x 256",
            sized(4096, uneven_rows, 256),
            concurrency=concurrency,
        )
    yield cell("unequal lengths, 64 x 64", sized(4096, uneven_rows, 64), output=64)
    for output in (64, 256):
        yield cell(
            f"shared prefixes, 64 x {output}",
            sized(4096, shared_rows, output),
            output=output,
            replay=closed(64, 64),
        )
    tight = 64 * -(-(500 + 256) // BLOCK) * 6 // 10
    for mode in ("lifo", "fifo") if backend == "vllm" else ("lifo",):  # sglang has one way
        yield cell(
            f"pool at 0.6 of the need, {mode}, 64 x 256",
            sized(2048, uneven_rows, 256),
            num_gpu_blocks=tight,
            preemption_mode=mode,
        )
    small: dict[str, Any] = {"max_num_batched_tokens": 128}
    if backend == "sglang":
        small = {"sglang": {"max_prefill_tokens": 128, "chunked_prefill_size": 128}}
    yield cell("128 tokens a pass, 64 x 64", sized(1024, uneven_rows, 64), output=64, **small)
    yield cell(
        "Poisson arrivals, mean output 256",
        sized(4096, uneven_rows, 256, 20.0),
        replay={"trace_block_size": TRACE_BLOCK},
    )


def speculative() -> Iterator[Cell]:
    """Speculation draws per request and pass: the literal core's work."""
    yield Cell(
        name="vllm, speculation of 2, 64 x 64",
        group="speculation",
        engine=launch("vllm", 64, 512, 128, aic_nextn=2, aic_nextn_accept_rates="0.7,0.4"),
        replay=closed(64),
        rows=sized(512, equal_rows, 512, 64),
        output=64,
    )


def recorded(backend: str) -> Iterator[Cell]:
    """The large oracle cases, with one record per request on both sides; none without the data."""
    folder = shared_folder() / "oracles" / "large"
    for path in sorted(folder.glob("*.json.gz")):
        for case in load_cases(path):
            if case.backend != backend or case.engine is None:
                continue
            trace = case.trace
            yield Cell(
                name=f"{case.name}, with records",
                group="recorded",
                engine=case.engine,
                replay=case.options,
                rows=sized(len(trace), first_rows, trace),
                capture=True,
                must=6.0 if backend == "vllm" else 2.0,
            )


def scaling(backend: str) -> Iterator[Cell]:
    """How time and memory grow with the trace and with the prompt."""
    for requests in (1_000, 4_000, 16_000, 64_000, 256_000):
        yield Cell(
            name=f"{backend}, {requests:,} requests, 64 x 64",
            group="trace length",
            engine=launch(backend, 64, 512, 64),
            replay=closed(64),
            rows=sized(requests, equal_rows, 512, 64),
            output=64,
        )
    for tokens in (128, 512, 2_048, 8_192, 32_768):
        yield Cell(
            name=f"{backend}, prompts of {tokens:,} tokens, 16 x 64",
            group="prompt length",
            engine=launch(backend, 16, tokens, 64),
            replay=closed(16),
            rows=sized(1024, equal_rows, tokens, 64),
            output=64,
        )
