"""Random cases for the comparison with the reference: small, tight and full of coincidences.

Prompts repeat and share heads, lengths are multiples of the block as often as not, pools are tight,
budgets are near the number of running requests, arrivals coincide: where schedulers go wrong.
"""

from __future__ import annotations

import random
from typing import Any

BACKENDS = ("vllm", "trtllm", "sglang")


def random_case(seed: int, backends: tuple[str, ...] = BACKENDS) -> dict[str, Any]:
    """A case without expected results; the same seed gives the same case."""
    rng = random.Random(seed)
    backend = rng.choice(backends)
    block = rng.choice([1, 4, 4, 8, 16] if backend == "sglang" else [2, 4, 4, 8, 16])
    pools = rng.random() < 0.2
    trace, trace_block = _trace(rng, block, sessions=not pools and rng.random() < 0.15)
    options: dict[str, Any] = {"trace_block_size": trace_block}
    case: dict[str, Any] = {
        "schema": 1,
        "name": f"fuzz_{seed}",
        "engine": None,
        "prefill_engine": None,
        "decode_engine": None,
        "replay": options,
        "trace": trace,
    }
    if rng.random() < 0.4:
        options["replay_concurrency"] = rng.choice([1, 2, 4, 8, 16])
    elif rng.random() < 0.2:
        options["arrival_speedup_ratio"] = rng.choice([0.5, 2.0, 3.0])
    if pools:
        shared = _engine(rng, backend, block, trace)
        for role in ("prefill", "decode"):
            engine = {**shared, **_sizes(rng, block, trace), "worker_type": role}
            case[f"{role}_engine"] = _launch(rng, engine, backend)
            options[f"num_{role}_workers"] = rng.choice([1, 1, 2, 3])
        return case
    engine = _engine(rng, backend, block, trace)
    case["engine"] = _launch(rng, engine, backend)
    if rng.random() < 0.2:
        options["num_workers"] = rng.choice([2, 3])
    return case


def _trace(rng: random.Random, block: int, *, sessions: bool) -> tuple[list[dict[str, Any]], int]:
    trace_block = rng.choice([block, block, 2 * block, 3 * block, 5, 6, 16])
    requests = rng.randrange(2, 40)
    longest = rng.choice([3, 6, 12]) * max(block, 4)
    outputs = rng.choice([1, 4, 12, 40])
    heads = [
        [1000 * head + depth for depth in range(longest // trace_block + 2)]
        for head in range(rng.choice([1, 2, 4]))
    ]
    sharing = rng.choice([0.0, 0.3, 0.8])
    spread_ms = rng.choice([0.0, 1.0, 10.0, 60.0])
    decimals = rng.choice([0, 3])  # whole milliseconds meet the ends of passes
    clock, fresh, seen = 0.0, 100_000, set[tuple[int, int]]()
    trace: list[dict[str, Any]] = []
    for _ in range(requests):
        length = rng.randrange(1, longest + 1)
        if rng.random() < 0.5:
            length = -(-length // block) * block
        output = rng.randrange(outputs + 1) if rng.random() < 0.3 else rng.randrange(1, outputs + 1)
        while (length, output) in seen:  # lengths identify a request in the reference's report
            output += 1
        seen.add((length, output))
        blocks = -(-length // trace_block)
        ids: list[int] = []
        if rng.random() < sharing:
            ids = rng.choice(heads)[: rng.choice([blocks, rng.randrange(blocks + 1)])]
        ids = ids[:blocks] + list(range(fresh, fresh + blocks - len(ids[:blocks])))
        fresh += blocks
        if rng.random() < 0.6:
            clock = round(clock + rng.expovariate(1.0) * spread_ms, decimals)
        trace.append(
            {
                "timestamp": clock,
                "input_length": length,
                "output_length": output,
                "hash_ids": ids,
            }
        )
    if sessions:
        _into_sessions(rng, trace)
    return trace, trace_block


def _into_sessions(rng: random.Random, trace: list[dict[str, Any]]) -> None:
    """Make later rows follow-up turns of earlier ones, after a delay."""
    names: list[str] = []
    for row in trace:
        if names and rng.random() < 0.5:
            row["session_id"] = rng.choice(names)
            row["delay"] = rng.choice([0.0, 5.0, 12.5])
            del row["timestamp"]
        else:
            row["session_id"] = f"s{len(names)}"
            names.append(row["session_id"])


def _sizes(rng: random.Random, block: int, trace: list[dict[str, Any]]) -> dict[str, Any]:
    """A pool between "nothing fits" and "everything fits", and limits around the batch."""
    blocks = [-(-(r["input_length"] + r["output_length"]) // block) for r in trace]
    need = sum(sorted(blocks)[-8:])
    pool = max(1, int(need * rng.choice([0.2, 0.35, 0.5, 0.7, 1.1, 3.0])))
    if rng.random() < 0.8:
        pool = max(pool, max(blocks))
    seqs = rng.choice([1, 2, 3, 4, 8, 64])
    budget = rng.choice([seqs, seqs + 1, 2 * seqs, 8, 17, 32, 64, 512])
    return {
        "num_gpu_blocks": pool,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(1, budget),
    }


def _engine(
    rng: random.Random, backend: str, block: int, trace: list[dict[str, Any]]
) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "backend": backend,
        "block_size": block,
        **_sizes(rng, block, trace),
        "enable_prefix_caching": rng.random() < 0.7,
        "timing_model": _timing(rng),
    }
    if backend != "sglang":
        engine["enable_chunked_prefill"] = rng.random() < 0.8
        engine["preemption_mode"] = rng.choice(["lifo", "fifo"])
    if rng.random() < 0.2:
        longest = max(r["input_length"] for r in trace)
        engine["max_model_len"] = rng.choice([longest - 1, longest, longest + 1, longest + 5]) or 1
    if rng.random() < 0.2:
        engine["speedup_ratio"] = rng.choice([0.0, 0.3, 2.0, 7.0])
    if rng.random() < 0.25:
        engine["aic_nextn"] = rng.choice([1, 2, 3, 5])
        engine["aic_nextn_accept_rates"] = rng.choice(["0.7,0.5,0.3", "1,1", "0", "0.9, 1, 0.5, 1"])
        engine["aic_mtp_seed"] = rng.randrange(2**32)
    elif rng.random() < 0.1:
        engine["decode_speedup_ratio"] = rng.choice([0.0, 0.5, 3.0])
    if backend == "sglang":
        _sglang(rng, engine, block)
    if rng.random() < 0.3:
        engine["kv_transfer_bytes_per_token"] = 1000
        engine["kv_transfer_bandwidth"] = rng.choice([0.0, 0.01, 1.0])
        engine["kv_transfer_timing_mode"] = rng.choice(["full_prompt", "destination_missing"])
    return engine


def _sglang(rng: random.Random, engine: dict[str, Any], block: int) -> None:
    engine["sglang"] = {
        "schedule_policy": rng.choice(["fifo", "lpm"]),
        "max_prefill_tokens": rng.choice([16, 64, 16384]),
        "chunked_prefill_size": block * rng.choice([1, 2, 5, 512]),
        "clip_max_new_tokens": rng.choice([0, 4, 4096]),
        "schedule_conservativeness": rng.choice([0.0, 0.3, 1.0, 2.0]),
    }
    if rng.random() < 0.3:
        engine["prefill_decode_interval"] = rng.choice([1, 2, 5])


def _timing(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "polynomial"}
    durations = [0.0, 1 / 3, 1.0, 2.5, 10.0]
    return {
        "type": "fixed",
        "prefill_ms": rng.choice(durations),
        "decode_ms": rng.choice(durations),
    }


def _launch(rng: random.Random, engine: dict[str, Any], backend: str) -> dict[str, Any]:
    launch: dict[str, Any] = {"engine": engine}
    if rng.random() < 0.2:
        chunk = engine.get("sglang", {}).get("chunked_prefill_size", 8192)
        launch["dp_size"] = min(chunk, rng.choice([2, 3]))
    if backend == "vllm" and rng.random() < 0.15:
        engine["prefill_schedule_interval"] = rng.choice([2, 3, 5])
    return launch
