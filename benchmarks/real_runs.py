"""Real vLLM servers against the simulator: 300 requests each, per-request errors.

The timing model is fitted on 200 points of the same card's own table, within the KV capacity of
the server; nothing of it is chosen by looking at a run. The one quantity that is, the server's
front end (tokenizer, HTTP, hand-over: what a request waits beside the passes), is fitted on one
run and used on the other. No host time is added to passes: vLLM schedules the next one while the
GPU works.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from public_tables import CARDS, SHARED, whole_passes

from passtime.memory import memory_sum
from passtime.profiles.predict import Predictor
from passtime.sched.config import LaunchConfig, launch_config
from passtime.sched.simulate import replay
from passtime.sched.timing import FloatArray, PassShape
from passtime.sched.workload.rows import Workload

POINTS = 200
SHARES = {"prefill": 0.15, "decode": 0.15, "mixed": 0.70}
BLOCK_SIZE = 16
FRONT_END_MS = np.arange(0.0, 201.0, 1.0)


@dataclass(frozen=True)
class Times:
    """Per request, in ms: time to first token, per output token, to the last."""

    ttft: FloatArray
    tpot: FloatArray
    e2e: FloatArray


class PassTiming:
    """A fitted model that is asked for whole passes."""

    composition = "pass"

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict_pass_ms(self, shape: PassShape) -> float:
        return self.predictor.pass_ms(shape)

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        raise AssertionError("whole passes only")

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        raise AssertionError("whole passes only")


def real_run_errors(card: str) -> dict[str, float]:
    """MAPE in percent of E2E, TTFT and TPOT on one run, the front end from the other."""
    other = next(name for name in CARDS if name != card)
    front_end = fitted_front_end_ms(other)
    measured, simulated = measured_times(card), simulated_times(card)
    return {
        "front_end_ms": front_end,
        "e2e": _mape(simulated.e2e + front_end, measured.e2e),
        "ttft": _mape(simulated.ttft + front_end, measured.ttft),
        "tpot": _mape(simulated.tpot, measured.tpot),
    }


@cache
def fitted_front_end_ms(card: str) -> float:
    """The constant per request that brings simulated TTFTs of a run nearest to the real ones.

    The smallest within one standard error of the best: a run of long queues cannot tell.
    """
    measured, simulated = measured_times(card), simulated_times(card)
    waits = FRONT_END_MS[:, None]
    errors = 100.0 * np.abs((simulated.ttft + waits) / measured.ttft - 1.0)
    mean = errors.mean(axis=1)
    best = int(np.argmin(mean))
    allowed = mean[best] + errors[best].std() / np.sqrt(errors.shape[1])
    return float(FRONT_END_MS[int(np.argmax(mean <= allowed))])


@cache
def measured_times(card: str) -> Times:
    """What the server's clients saw."""
    column = _requests(card)
    ttft = 1e3 * (column["first_token_s"] - column["arrival_s"])
    e2e = 1e3 * (column["last_token_s"] - column["arrival_s"])
    return _times(ttft, e2e, column["output_toks"])


@cache
def simulated_times(card: str) -> Times:
    """The same requests through the simulated scheduler."""
    column, launch = _requests(card), _launch(card)
    workload = Workload(
        source=card,
        timestamp_ms=(1e3 * column["arrival_s"]).tolist(),
        input_tokens=column["input_toks"].astype(int).tolist(),
        output_tokens=column["output_toks"].astype(int).tolist(),
    )
    timing = PassTiming(_predictor(card, launch.engine.total_kv_tokens))
    outcome = replay(workload, launch, timing)
    ttft = outcome.first_token_ms - outcome.arrival_ms
    e2e = outcome.last_token_ms - outcome.arrival_ms
    return _times(ttft, e2e, outcome.output_tokens.astype(float))


def _predictor(card: str, kv_capacity: int) -> Predictor:
    """A fit of 200 spread-out points that the server's KV pool could hold."""
    table = whole_passes(card)
    _, new, prefix, decodes, mean, _ = table.sizes.T
    fits = decodes * mean + prefix + new <= kv_capacity
    rows = [
        table.spread_out(np.flatnonzero(fits & (table.regime == regime)), round(POINTS * share), 0)
        for regime, share in SHARES.items()
    ]
    return table.fit(np.concatenate(rows)).predictor()


def _launch(card: str) -> LaunchConfig:
    """The server's own settings; its number of KV blocks, where recorded, else derived."""
    meta = json.loads((_folder() / f"{card}_Llama-3.1-8B_meta.json").read_text())
    settings = meta["engine_kwargs"]
    blocks = meta.get("kv_cache", {}).get("num_gpu_blocks")
    if blocks is None:
        bench = whole_passes(card).bench()
        blocks = memory_sum(
            bench.model,
            device_bytes=bench.device.memory_bytes,
            utilization=0.9,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_num_seqs=settings["max_num_seqs"],
        ).num_gpu_blocks
    engine: dict[str, Any] = {
        "backend": "vllm",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": blocks,
        "max_num_seqs": settings["max_num_seqs"],
        "max_num_batched_tokens": settings["max_num_batched_tokens"],
    }
    return launch_config({"engine": engine}, source=card)


@cache
def _requests(card: str) -> dict[str, FloatArray]:
    path = _folder() / f"{card}_Llama-3.1-8B_requests.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def _folder() -> Any:
    return SHARED / "data/llmservingsim/vllm_runs"


def _times(ttft: FloatArray, e2e: FloatArray, tokens: FloatArray) -> Times:
    return Times(ttft=ttft, tpot=(e2e - ttft) / np.maximum(tokens - 1.0, 1.0), e2e=e2e)


def _mape(predicted: FloatArray, measured: FloatArray) -> float:
    return float(100.0 * np.abs(predicted / measured - 1.0).mean())
