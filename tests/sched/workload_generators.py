"""Random replays that go where a scheduler breaks: tight pools, shared prefixes, odd budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypedDict

from passtime.sched.config import Backend, EngineConfig, FixedConfig, LaunchConfig, PolynomialConfig
from passtime.sched.simulate import ReplayOptions
from passtime.sched.workload.rows import Workload


@dataclass(frozen=True)
class Case:
    """One replay to try."""

    seed: int
    workload: Workload
    launch: LaunchConfig
    options: ReplayOptions


def random_case(seed: int, *, backend: Backend = "vllm", sessions: bool = True) -> Case:
    """A replay by seed: the same seed, the same replay."""
    rng = random.Random(seed)
    block_tokens = rng.choice((2, 3, 4, 4, 8, 16))
    workload = _workload(rng, block_tokens, sessions=sessions)
    concurrency = rng.choice((None, None, 1, 2, 3, 5, 8, 12))
    independent = concurrency is None and workload.session_ids is None
    seqs = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, None))
    options = ReplayOptions(
        concurrency=concurrency,
        num_workers=rng.choice((2, 3)) if independent and rng.random() < 0.2 else 1,
        arrival_speedup_ratio=rng.choice((1.0, 1.0, 0.5, 3.0)),
        max_sim_time_ms=rng.uniform(0, 300) if rng.random() < 0.1 else None,
        capture_admissions=True,
    )
    engine = EngineConfig(
        backend=backend,
        block_size=block_tokens,
        num_gpu_blocks=_pool_blocks(
            rng, workload, block_tokens, min(seqs or 99, concurrency or 99)
        ),
        max_num_seqs=seqs,
        max_num_batched_tokens=_budget(rng, seqs or 16, block_tokens),
        max_model_len=rng.randint(4, 80) if rng.random() < 0.2 else None,
        enable_prefix_caching=rng.random() < 0.75,
        enable_chunked_prefill=backend == "sglang" or rng.random() < 0.8,
        preemption_mode=rng.choice(("lifo", "fifo")),
        speedup_ratio=rng.choice((1.0, 1.0, 1.0, 0.0, 2.5)),
        decode_speedup_ratio=rng.choice((1.0, 1.0, 1.0, 0.0, 3.0)),
        timing_model=_timing(rng),
    )
    return Case(seed, workload, LaunchConfig(engine=engine), options)


def _workload(rng: random.Random, block_tokens: int, *, sessions: bool) -> Workload:
    requests = rng.choice((1, 2, 5, 10, 20, 30, 40))
    trace_tokens = rng.choice((block_tokens, 2 * block_tokens, 4 * block_tokens, 3, 5, 7, 10))
    share = rng.choice((0.0, 0.5, 0.9))
    repeats = rng.choice((0.0, 0.2, 0.8))
    whole = rng.choice((0.0, 0.5, 1.0))
    longest = rng.choice((2, 6, 12)) * block_tokens
    outputs = rng.choice(
        (
            (0, 1),
            (0, 1, 2, 5),
            (1, 4, 9, 20),
            (8, 30, 60),
            (0, 1, 40),
            (40, 80),
            (20, 30, 40),
            (0, 0, 0, 9),
        )
    )
    heads = [[rng.randrange(4) for _ in range(longest)] for _ in range(rng.choice((1, 2, 4)))]
    prompts: list[int] = []
    block_ids: list[list[int]] = []
    fresh = 1000
    for _ in range(requests):
        if prompts and rng.random() < repeats:  # exactly an earlier prompt
            again = rng.randrange(len(prompts))
            prompts.append(prompts[again])
            block_ids.append(block_ids[again])
            continue
        tokens = rng.randint(1, longest)
        if rng.random() < whole:
            tokens = -(-tokens // block_tokens) * block_tokens
        blocks = -(-tokens // trace_tokens)
        shared = rng.randint(0, blocks) if rng.random() < share else 0
        ids = rng.choice(heads)[:shared]
        ids = ids + list(range(fresh, fresh + blocks - len(ids)))
        fresh += blocks
        prompts.append(tokens)
        block_ids.append(ids)
    return Workload(
        source="random",
        timestamp_ms=_timestamps(rng, requests),
        input_tokens=prompts,
        output_tokens=[rng.choice(outputs) for _ in range(requests)],
        block_ids=None if rng.random() < 0.05 else block_ids,
        trace_block_size=trace_tokens,
        **_sessions(rng, requests, wanted=sessions),
    )


class _Sessions(TypedDict, total=False):
    session_ids: list[str]
    delay_ms: list[float]


def _sessions(rng: random.Random, requests: int, *, wanted: bool) -> _Sessions:
    if not wanted or rng.random() < 0.8:
        return {}
    ids = [f"s{rng.randrange(1 + requests // 2)}" for _ in range(requests)]
    seen: set[str] = set()
    delays = []
    for name in ids:
        delays.append(rng.choice((0.0, 1.0, 7.5)) if name in seen else 0.0)
        seen.add(name)
    return {"session_ids": ids, "delay_ms": delays}


def _timestamps(rng: random.Random, requests: int) -> list[float]:
    mean = rng.choice((0.0, 0.5, 3.0, 40.0))
    now, stamps = rng.choice((0.0, 1000.0)), []
    for _ in range(requests):
        if mean and rng.random() < 0.7:
            now += rng.choice((rng.expovariate(1 / mean), float(round(mean))))
        stamps.append(now)
    return stamps


def _pool_blocks(rng: random.Random, workload: Workload, block_tokens: int, seqs: int) -> int:
    """0.2 … 1.1 of what the longest requests need at once; sometimes plenty, sometimes too few."""
    needs = sorted(
        -(-(prompt + output) // block_tokens)
        for prompt, output in zip(workload.input_tokens, workload.output_tokens, strict=True)
    )
    draw = rng.random()
    if draw < 0.1:
        return 2 * sum(needs)
    if draw < 0.15:
        return rng.randint(1, needs[-1])
    return max(needs[-1], int(sum(needs[-seqs:]) * rng.uniform(0.2, 1.1)))


def _budget(rng: random.Random, seqs: int, block_tokens: int) -> int | None:
    """Around the batch size, around a few blocks, or no bound at all."""
    around = max(1, seqs + rng.randint(-3, 3))
    return rng.choice((around, around, 2 * block_tokens, 5 * block_tokens + 1, 64, 8192, None))


def _timing(rng: random.Random) -> FixedConfig | PolynomialConfig:
    if rng.random() < 0.3:
        return PolynomialConfig()
    return FixedConfig(
        prefill_ms=rng.choice((0.0, 10.0, 3.7)), decode_ms=rng.choice((0.0, 1.0, 1.0, 0.37))
    )
