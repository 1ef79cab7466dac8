"""Prefill and decode pools through ``passtime simulate`` and ``passtime compare``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "parity" / "cases"

ENGINE = {
    "backend": "vllm",
    "block_size": 16,
    "num_gpu_blocks": 500,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
}
PREFILL = {
    **ENGINE,
    "worker_type": "prefill",
    "timing_model": {"type": "fixed", "prefill_ms": 100.0, "decode_ms": 1.0},
    "kv_transfer_bytes_per_token": 1_000_000,
    "kv_transfer_bandwidth": 1.0,  # GB/s: a token takes a millisecond
}
DECODE = {
    **ENGINE,
    "worker_type": "decode",
    "timing_model": {"type": "fixed", "prefill_ms": 50.0, "decode_ms": 7.0},
}
LOAD = ("--workload", "constant", "--input-len", 64, "--output-len", 4, "--num-prompts", 20,
        "--request-rate", 15)  # fmt: skip

Command = Callable[..., Any]


def engine_file(path: Path, engine: dict[str, Any]) -> Path:
    path.write_text(json.dumps(engine))
    return path


@pytest.fixture
def pools(tmp_path: Path) -> tuple[object, ...]:
    """Flags of both pools."""
    return (
        "--prefill-engine", engine_file(tmp_path / "p.json", PREFILL),
        "--decode-engine", engine_file(tmp_path / "d.json", DECODE),
    )  # fmt: skip


def report_of(passtime: Command, *argv: object) -> dict[str, Any]:
    ran = passtime("simulate", *argv, "--json")
    assert ran.code == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


def records_of(passtime: Command, folder: Path, *argv: object) -> list[dict[str, Any]]:
    target = folder / "records.jsonl"
    report_of(passtime, *argv, "--per-request", target)
    return [json.loads(line) for line in target.read_text().splitlines()]


def trace_of(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- What the replay gives ----------------------------------------------------------------------

# The case's names of the record's columns.
COLUMNS = {
    "arrival_ms": "arrival_time_ms",
    "terminal_ms": "terminal_time_ms",
    "e2e_ms": "e2e_latency_ms",
    "itl_mean_ms": "itl_ms",
    "prefill_worker": "prefill_worker_idx",
    "decode_worker": "decode_worker_idx",
}


@pytest.mark.parametrize("name", ["disagg_0", "disagg_1", "disagg_2"])
def test_the_command_gives_the_references_records(
    passtime: Command, tmp_path: Path, name: str
) -> None:
    case = json.loads((CASES / f"{name}.json").read_text())
    flags = [
        part
        for key, value in case["replay"].items()
        for part in (f"--{key.removeprefix('replay_').replace('_', '-')}", value)
    ]
    found = records_of(
        passtime, tmp_path,
        "--prefill-engine", engine_file(tmp_path / "p.json", case["prefill_engine"]),
        "--decode-engine", engine_file(tmp_path / "d.json", case["decode_engine"]),
        "--trace", trace_of(tmp_path, case["trace"]), *flags,
    )  # fmt: skip
    columns = case["expected"]["columns"]
    compared = [name for name in columns if COLUMNS.get(name, name) in found[0]]
    assert {"ttft_ms", "source_held_ms", "decode_admit_ms", "prefill_worker"} <= set(compared)
    ours = {int(record["uuid"].rpartition("-")[2], 16) - 1: record for record in found}
    assert len(ours) == len(case["expected"]["requests"])
    for values in case["expected"]["requests"]:
        expected = dict(zip(columns, values, strict=True))
        record = ours[expected["index"]]
        assert {name: record[COLUMNS.get(name, name)] for name in compared} == {
            name: expected[name] for name in compared
        }


def test_the_first_token_waits_for_both_pools_and_the_transfer(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    """100 ms of prefill, 64 tokens over the wire, and one step of 7 ms."""
    row = {"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [1]}
    (record,) = records_of(passtime, tmp_path, *pools, "--trace", trace_of(tmp_path, [row]))
    assert record["prefill_admit_ms"] == 0.0
    assert record["source_held_ms"] == record["destination_reserved_ms"] == 100.0
    assert record["destination_activated_ms"] == record["source_released_ms"] == 164.0
    assert record["decode_admit_ms"] == 164.0
    assert record["ttft_ms"] == 171.0
    assert record["itl_ms"] == 7.0
    assert (record["prefill_worker_idx"], record["decode_worker_idx"]) == (0, 0)
    assert [admission["pool"] for admission in record["admission_history"]] == ["prefill", "decode"]


def test_what_never_happened_is_null(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    """A prompt that no prefill worker can hold never reaches the decode pool."""
    row = {"timestamp": 0, "input_length": 9000, "output_length": 4, "hash_ids": list(range(18))}
    (record,) = records_of(passtime, tmp_path, *pools, "--trace", trace_of(tmp_path, [row]))
    assert record["terminal_status"] == "rejected"
    assert record["prefill_worker_idx"] == 0
    for name in (
        "first_admit_ms",
        "ttft_ms",
        "source_held_ms",
        "destination_reserved_ms",
        "decode_admit_ms",
        "decode_worker_idx",
        "decode_reused_input_tokens",
    ):
        assert record[name] is None, name


def test_reuse_of_a_record_is_that_of_the_prefill_pool(passtime: Command, tmp_path: Path) -> None:
    """Prefill remembers prompts here, decode does not."""
    prefill = engine_file(tmp_path / "p.json", PREFILL)
    decode = engine_file(tmp_path / "d.json", {**DECODE, "enable_prefix_caching": False})
    row = {"input_length": 64, "output_length": 2, "hash_ids": [1]}
    trace = trace_of(tmp_path, [{**row, "timestamp": 0}, {**row, "timestamp": 500}])
    flags = ("--prefill-engine", prefill, "--decode-engine", decode, "--trace", trace)
    second = records_of(passtime, tmp_path, *flags)[1]
    assert second["reused_input_tokens"] == 48
    assert second["decode_reused_input_tokens"] == 0


def test_each_role_has_its_worker_seconds_and_gpus(passtime: Command, tmp_path: Path) -> None:
    """R-55: every worker counts to the last timestamp."""
    prefill = engine_file(tmp_path / "p.json", {"engine": PREFILL, "tensor_parallel_size": 4})
    decode = engine_file(tmp_path / "d.json", {"engine": DECODE, "dp_size": 2})
    found = report_of(
        passtime, "--prefill-engine", prefill, "--decode-engine", decode, *LOAD,
        "--num-prefill-workers", 2, "--num-decode-workers", 3,
    )["summary"]  # fmt: skip
    seconds = found["duration_ms"] / 1000
    assert found["prefill_worker_seconds"] == pytest.approx(2 * seconds)
    assert found["decode_worker_seconds"] == pytest.approx(3 * seconds)
    assert (found["prefill_gpus_per_worker"], found["decode_gpus_per_worker"]) == (4, 2)
    assert found["gpu_hours"] == pytest.approx((2 * 4 + 3 * 2) * seconds / 3600)


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-prefill-workers", 2),
        ("--num-decode-workers", 2),
        ("--timing", "fixed:90,6"),
        ("--arrival-speedup-ratio", 1.5),
        ("--max-sim-time-ms", 500),
    ],
    ids=lambda flags: str(flags[0]),
)
def test_every_flag_changes_the_result(
    passtime: Command, pools: tuple[object, ...], flags: tuple[object, ...]
) -> None:
    base = report_of(passtime, *pools, *LOAD)
    varied = report_of(passtime, *pools, *LOAD, *flags)
    assert varied["summary"] != base["summary"]
    assert varied["inputs"] != base["inputs"]


def test_both_engines_and_both_pool_sizes_are_echoed(
    passtime: Command, pools: tuple[object, ...]
) -> None:
    inputs = report_of(passtime, *pools, *LOAD, "--num-decode-workers", 3)["inputs"]
    assert "engine" not in inputs
    assert inputs["prefill_engine"]["engine"]["timing_model"]["prefill_ms"] == 100.0
    assert inputs["decode_engine"]["engine"]["timing_model"]["prefill_ms"] == 50.0
    assert inputs["replay"]["num_prefill_workers"] == 1
    assert inputs["replay"]["num_decode_workers"] == 3
    assert "num_workers" not in inputs["replay"]


def test_an_exported_workload_gives_the_same_report(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    exported = tmp_path / "exported.jsonl"
    first = report_of(passtime, *pools, *LOAD, "--write-trace", exported)
    again = report_of(passtime, *pools, "--trace", exported, "--trace-block-size", 16)
    assert again["summary"] == first["summary"]


# --- Timing models ------------------------------------------------------------------------------


def test_config_is_what_each_engine_file_says(passtime: Command, pools: tuple[object, ...]) -> None:
    found = report_of(passtime, *pools, *LOAD)["summary"]
    assert found["min_ttft_ms"] == pytest.approx(100.0 + 64.0 + 7.0)
    assert found["median_itl_ms"] == 7.0


def test_a_model_that_is_named_is_asked_by_both_pools(
    passtime: Command, pools: tuple[object, ...]
) -> None:
    found = report_of(passtime, *pools, *LOAD, "--timing", "fixed:30,2")["summary"]
    assert found["min_ttft_ms"] == pytest.approx(30.0 + 64.0 + 2.0)
    assert found["median_itl_ms"] == 2.0


def test_best_constants_are_one_pair_from_the_calls_of_both_pools(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    """With 100 ms in one pool and 7 ms in the other, the pair is these two."""
    found = report_of(passtime, *pools, *LOAD, "--timing", "fixed:from=config")
    timing = found["inputs"]["timing"]
    assert (timing["prefill_ms"], timing["decode_ms"]) == (100.0, 7.0)
    assert timing["prefill_calls"] + timing["decode_calls"] == found["counts"]["passes"]
    assert found["summary"] == report_of(passtime, *pools, *LOAD)["summary"]


def test_a_provider_that_is_unknown_is_named_with_its_pool(
    passtime: Command, tmp_path: Path
) -> None:
    unknown = {"type": "external", "provider": "nobody"}
    prefill = engine_file(tmp_path / "p.json", PREFILL)
    decode = engine_file(tmp_path / "d.json", {**DECODE, "timing_model": unknown})
    ran = passtime("simulate", "--prefill-engine", prefill, "--decode-engine", decode, *LOAD)
    assert ran.code == 2
    assert "decode_engine.timing_model: unknown timing provider 'nobody'" in ran.err


def test_models_are_compared_over_both_pools(
    passtime: Command, pools: tuple[object, ...], profile: Path
) -> None:
    ran = passtime("compare", *pools, *LOAD, "--timing", profile, "--timing", "config", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    calls, whole, constants, config = document["columns"]
    asked = constants["facts"]["prefill_calls"] + constants["facts"]["decode_calls"]
    assert sum(calls["coverage"].values()) == asked == calls["counts"]["passes"]
    assert sum(whole["coverage"].values()) == whole["counts"]["passes"]
    assert config["coverage"] is None
    alone = report_of(passtime, *pools, *LOAD, "--percentiles", "50,90,99")
    assert config["summary"] == alone["summary"]
    assert set(document["inputs"]) >= {"prefill_engine", "decode_engine"}


# --- Half-given and idle settings ---------------------------------------------------------------


def refusal(passtime: Command, *argv: object) -> str:
    ran = passtime("simulate", *argv, *LOAD)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    return str(ran.err)


def test_nothing_that_serves_is_refused(passtime: Command) -> None:
    message = refusal(passtime)
    assert "--engine E.json" in message
    assert "--prefill-engine P.json and --decode-engine D.json" in message


def test_half_of_a_deployment_is_refused(passtime: Command, pools: tuple[object, ...]) -> None:
    assert "--prefill-engine is half of a deployment: give --decode-engine too" in refusal(
        passtime, *pools[:2]
    )
    assert "--decode-engine is half of a deployment: give --prefill-engine too" in refusal(
        passtime, *pools[2:]
    )


def test_both_forms_at_once_are_refused(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    engine = ("--engine", engine_file(tmp_path / "e.json", ENGINE))
    for pool in (pools[:2], pools[2:]):
        message = refusal(passtime, *engine, *pool)
        assert f"--engine is one pool that does all, {pool[0]} is of two" in message


def test_worker_numbers_of_the_other_form_are_refused(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    engine = ("--engine", engine_file(tmp_path / "e.json", ENGINE))
    assert "--num-workers goes with --engine only" in refusal(passtime, *pools, "--num-workers", 1)
    for flag in ("--num-prefill-workers", "--num-decode-workers"):
        message = refusal(passtime, *engine, flag, 1)
        assert f"{flag} goes with --prefill-engine and --decode-engine only" in message
        assert "must be at least 1, got 0" in refusal(passtime, *pools, flag, 0)


def test_a_file_of_the_wrong_role_is_named(
    passtime: Command, tmp_path: Path, pools: tuple[object, ...]
) -> None:
    prefill, decode = pools[1], pools[3]
    swapped = refusal(passtime, "--prefill-engine", decode, "--decode-engine", prefill)
    assert f"{decode}: worker_type: --prefill-engine takes 'prefill', found 'decode'" in swapped
    alone = refusal(passtime, "--engine", prefill)
    assert f"{prefill}: worker_type: --engine takes 'aggregated', found 'prefill'" in alone
    plain = engine_file(tmp_path / "e.json", ENGINE)
    message = refusal(passtime, "--prefill-engine", prefill, "--decode-engine", plain)
    assert f"{plain}: worker_type: --decode-engine takes 'decode', found 'aggregated'" in message


def test_pools_of_two_backends_are_refused_by_file(passtime: Command, tmp_path: Path) -> None:
    prefill = engine_file(tmp_path / "p.json", PREFILL)
    decode = engine_file(tmp_path / "d.json", {**DECODE, "backend": "trtllm"})
    message = refusal(passtime, "--prefill-engine", prefill, "--decode-engine", decode)
    assert f"{prefill} says vllm, {decode} says trtllm" in message
