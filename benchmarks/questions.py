"""Four questions that only silicon answers, about the way passes are measured and simulated.

    python benchmarks/questions.py [--model NAME] [-o FILE]

1. Does a mixed pass add, when prefill and decode attention are launched apart?
2. Is a pass linear in its layers, and is the scaled stack the whole model?
3. How far is a pass from the sum of its operators, each timed alone?
4. What does one launch by the host cost, and what does a node of a graph?

Answers go to standard output as JSON, with every time behind them. Exits with 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from passtime.calibrate.cuda_device import find_device
from passtime.calibrate.devices import device
from passtime.calibrate.log import Batch
from passtime.calibrate.nvml import Watch
from passtime.calibrate.runners.gpu import GpuRunner, computed_model
from passtime.calibrate.selfchecks import host_launch
from passtime.calibrate.stack import (
    ANCHORS,
    linearity,
    measured_layers,
    scaled_s,
    stack_bytes,
    weight_bytes,
)
from passtime.errors import PasstimeError
from passtime.kernels.operators import Operators
from passtime.kernels.work import end_operators, layer_operators
from passtime.profiles.shapes import load_model

MIXES: Mapping[str, Batch] = {
    "512 new, 16 decodes of 1k": Batch(prefill=((512, 0),), decode=(1024,) * 16),
    "512 new, 64 decodes of 4k": Batch(prefill=((512, 0),), decode=(4096,) * 64),
    "2048 new, 64 decodes of 2k": Batch(prefill=((2048, 0),), decode=(2048,) * 64),
    "256 new on 4096, 128 decodes of 1k": Batch(prefill=((256, 4096),), decode=(1024,) * 128),
    "8 chunks of 256, 32 decodes of 8k": Batch(prefill=((256, 0),) * 8, decode=(8192,) * 32),
}


# --- 1. Mixed passes -----------------------------------------------------------------------------


def mixed_adds(runner: GpuRunner, mixes: Mapping[str, Batch] = MIXES) -> dict[str, Any]:
    """Mixed attention over its two parts, and a mixed pass over a composed one.

    Composed: a pass whose decodes are prompts of one token (the same rows for every matrix
    product), and the decode attention timed alone.
    """
    answers = {}
    for name, batch in mixes.items():
        prompts = Batch(prefill=batch.prefill)
        decodes = Batch(decode=batch.decode)
        rows = Batch(prefill=(*batch.prefill, *((1, 0),) * len(batch.decode)))
        attention = {
            part: attention_s(runner, one)
            for part, one in (("mixed", batch), ("prefill", prompts), ("decode", decodes))
        }
        passes = {
            part: runner.stack_s(one, layers=runner.layers)
            for part, one in (
                ("mixed", batch), ("prefill", prompts), ("decode", decodes), ("rows", rows)
            )
        }  # fmt: skip
        composed = passes["rows"] + attention["decode"]
        apart = attention["prefill"] + attention["decode"]
        answers[name] = {
            "attention_ms": milliseconds(attention),
            "pass_ms": milliseconds(passes),
            "attention_over_parts": round(attention["mixed"] / apart, 4),
            "pass_over_composed": round(passes["mixed"] / composed, 4),
            "pass_over_calls": round(passes["mixed"] / (passes["prefill"] + passes["decode"]), 4),
        }
    return answers


def attention_s(runner: GpuRunner, batch: Batch) -> float:
    """Seconds of the attention of all layers of the stack, nothing between the layers."""
    model, inputs = runner.model, runner.inputs(batch)
    shape = (inputs.layout.rows, model.heads, model.head_dim)
    q = torch.empty(shape, dtype=runner.pages[0].k.dtype, device=runner.graphs.device).normal_()

    def run(_: int) -> None:
        for pages in runner.pages:
            runner.operators.attend(q, pages, inputs)

    return runner.timed_s(run)


# --- 2. Layers -----------------------------------------------------------------------------------


def linear_in_layers(runner: GpuRunner, anchors: Mapping[str, Batch] = ANCHORS) -> dict[str, Any]:
    """Times by number of layers up to the runner's stack, the line through them, and the error of
    scaling the usual stack up to all of it."""
    usual = min(measured_layers(runner.model), runner.layers)
    counts = sorted({1, 2, usual, *(runner.layers * part // 4 for part in (1, 2, 3, 4))} - {0})
    answers = {}
    for name, batch in anchors.items():
        if not runner.fits(batch):
            continue
        seconds = {count: runner.stack_s(batch, layers=count) for count in [0, *counts]}
        line = linearity({count: s for count, s in seconds.items() if count})
        scaled = scaled_s(seconds[usual], seconds[0], measured=usual, layers=runner.layers)
        answers[name] = {
            "pass_ms": milliseconds(seconds),
            "curvature": round(line.curvature, 5),
            "scaled_from": usual,
            "scaled_error": round(scaled / seconds[runner.layers] - 1, 5),
        }
    return answers


# --- 3. Operators --------------------------------------------------------------------------------


class Recorder:
    """Operators that remember their calls, to make each of them again, alone."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self.calls: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        if not callable(operator):
            return operator

        def recorded(*arguments: Any) -> Any:
            self.calls.append(lambda: operator(*arguments))
            return operator(*arguments)

        return recorded


def operators_against_pass(
    runner: GpuRunner, anchors: Mapping[str, Batch] = ANCHORS
) -> dict[str, Any]:
    """Each operator timed alone over all layers of the stack, their sum, and the pass."""
    layers = min(measured_layers(runner.model), runner.layers)
    answers = {}
    for name, batch in anchors.items():
        if not runner.fits(batch):
            continue
        recorder, inputs = Recorder(runner.operators), runner.inputs(batch)
        runner.graphs.eager_s(
            partial(runner.run, inputs, layers=layers, operators=cast(Operators, recorder))
        )
        alone = {
            operator: runner.timed_s(partial(call_all, calls))
            for operator, calls in by_operator(runner, recorder.calls, layers).items()
        }
        whole, total = runner.stack_s(batch, layers=layers), sum(alone.values())
        answers[name] = {
            "layers": layers,
            "operators_ms": milliseconds(alone),
            "sum_ms": round(1e3 * total, 5),
            "pass_ms": round(1e3 * whole, 5),
            "pass_over_sum": round(whole / total, 4),
            "gap_us_per_call": round(1e6 * (whole - total) / len(recorder.calls), 3),
        }
    return answers


def call_all(calls: Sequence[Callable[[], Any]], _: int) -> None:
    for call in calls:
        call()


def by_operator(
    runner: GpuRunner, calls: Sequence[Callable[[], Any]], layers: int
) -> dict[str, Sequence[Callable[[], Any]]]:
    """The calls of a recorded pass under the names of :mod:`passtime.kernels.work`.

    Prefill and decode attention are one call, and so is everything that experts do.
    """
    embedding, *after = end_operators(runner.model, Batch())
    names = [name for name in layer_operators(runner.model, Batch()) if "experts_" not in name]
    names.remove("decode_attention")
    renamed = {"prefill_attention": "attention", "router": "experts"}
    last = len(calls) - len(after)
    assert last - 1 == layers * len(names), "a pass is the embedding, layers, and the other end"
    grouped: dict[str, Sequence[Callable[[], Any]]] = {embedding: calls[:1]}
    for place, name in enumerate(names):
        grouped[renamed.get(name, name)] = calls[1 + place : last : len(names)]
    for name, call in zip(after, calls[last:], strict=True):
        grouped[name] = [call]
    return grouped


# --- All of it -----------------------------------------------------------------------------------


def milliseconds(seconds: Mapping[Any, float]) -> dict[str, float]:
    return {str(key): round(1e3 * value, 5) for key, value in seconds.items()}


def open_whole(model_name: str) -> GpuRunner:
    """A runner of all layers where they fit beside a pool, else of the usual stack."""
    from passtime.calibrate.graphs import CudaGraphs

    facts, model = device("cuda"), computed_model(load_model(model_name))
    place, uuid = find_device(facts)
    wanted = [
        batch
        for batch in [*ANCHORS.values(), *MIXES.values()]
        if 2 * stack_bytes(model, batch) < facts.memory_bytes
    ]
    whole = 2 * weight_bytes(model, model.layers) < facts.memory_bytes
    return GpuRunner(
        facts=facts,
        model=model,
        batches=wanted,
        graphs=CudaGraphs(place),
        watch=Watch(uuid),
        layers=model.layers if whole else None,
    )


def answers(runner: GpuRunner) -> dict[str, Any]:
    fitting = {name: batch for name, batch in MIXES.items() if runner.fits(batch)}
    return {
        "schema": 1,
        "device": runner.facts.name,
        "model": runner.model.name,
        "layers": runner.layers,
        "software": dict(runner.software),
        "mixed_adds": mixed_adds(runner, fitting),
        "linear_in_layers": linear_in_layers(runner),
        "operators_against_pass": operators_against_pass(runner),
        "host_launch": host_launch(runner, ANCHORS["decode 1"]),
    }


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", metavar="NAME|CONFIG.json")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the answers there too")
    args = parser.parse_args()
    try:
        runner = open_whole(args.model)
        try:
            text = json.dumps(answers(runner), indent=1)
        finally:
            runner.close()
    except PasstimeError as error:
        print(f"benchmarks/questions.py: {error}", file=sys.stderr)
        return error.exit_code
    if args.output:
        Path(args.output).write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
