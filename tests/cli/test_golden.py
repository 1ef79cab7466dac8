"""Reports that may not change by accident.

After a wanted change: ``PASSTIME_REWRITE_GOLDEN=1 pytest tests/cli/test_golden.py``, then read the
difference.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from passtime.comparison import Column, Comparison, compare
from passtime.deployment import Pools
from passtime.replay_inputs import ReplayInputs
from passtime.sched.replay.metrics import Slo
from passtime.sched.replay.report import Report, report, summary
from passtime.sched.workload.formats import LoadedTrace, load_trace
from passtime.sched.workload.synthetic import SyntheticLoad

GOLDEN = Path(__file__).parent / "golden"

ENGINE = {
    "backend": "vllm",
    "block_size": 16,
    "num_gpu_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
}
ARGUMENTS = (
    "--workload", "constant", "--input-len", 100, "--output-len", 20, "--num-prompts", 12,
    "--request-rate", 10, "--seed", 1, "--shared-prefix-ratio", 0.5, "--goodput", "ttft:100",
    "--percentiles", "50,99.9", "--constant-intervals",
)  # fmt: skip


POOL = {**ENGINE, "kv_transfer_bytes_per_token": 131_072, "kv_transfer_bandwidth": 25.0}


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("simulate", ()),
        ("compare", ("--timing", "polynomial", "--timing", "fixed:from=polynomial")),
    ],
)
def test_the_document_is_the_one_on_record(
    passtime: Callable[..., Any], tmp_path: Path, name: str, argv: tuple[object, ...]
) -> None:
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps(ENGINE))
    ran = passtime(name, "--engine", engine, *ARGUMENTS, *argv, "--json")
    assert_on_record(ran.out, f"{name}.json")


def test_the_report_of_two_pools_is_the_one_on_record(
    passtime: Callable[..., Any], tmp_path: Path
) -> None:
    flags: list[object] = []
    for pool in ("prefill", "decode"):
        path = tmp_path / f"{pool}.json"
        path.write_text(json.dumps({**POOL, "worker_type": pool}))
        flags += [f"--{pool}-engine", path]
    records = tmp_path / "records.jsonl"
    ran = passtime(
        "simulate", *flags, "--num-decode-workers", 2, *ARGUMENTS, "--json",
        "--per-request", records,
    )  # fmt: skip
    assert_on_record(ran.out, "simulate-pools.json")
    assert_on_record(records.read_text(), "simulate-pools.jsonl")


def assert_on_record(text: str, name: str) -> None:
    golden = GOLDEN / name
    if os.environ.get("PASSTIME_REWRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    "constructor",
    [Column, Comparison, LoadedTrace, Pools, ReplayInputs, Report, Slo, SyntheticLoad],
)
def test_public_constructors_take_keywords_only(constructor: type) -> None:
    """C04."""
    parameters = inspect.signature(constructor).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (load_trace, ["path"]),
        (summary, ["outcome", "workload"]),
        (report, ["outcome", "workload"]),
        (compare, ["workload", "deployment", "specs", "options"]),
    ],
)
def test_public_functions_grow_by_keywords(
    function: Callable[..., Any], positional: list[str]
) -> None:
    """C04."""
    found = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert found == positional
