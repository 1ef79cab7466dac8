"""Configurations: the reference's JSON is read as it is, and every fault is one clear sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from config_reading import engine_fault, fault, read

from passtime.sched.config import (
    EngineConfig,
    FixedConfig,
    LaunchConfig,
    SglangConfig,
    TrtllmConfig,
    launch_config,
    unknown_timing_keys,
)

# --- C-1: what is there when nothing is said ----------------------------------------------------


def test_an_empty_record_has_the_reference_s_defaults() -> None:
    config = read()
    assert (config.backend, config.worker_type, config.preemption_mode) == (
        "vllm",
        "aggregated",
        "lifo",
    )
    assert (config.num_gpu_blocks, config.block_tokens) == (16384, 64)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 8192)
    assert (config.speedup_ratio, config.decode_ratio, config.aic_mtp_seed) == (1.0, 1.0, 42)
    assert config.enable_prefix_caching
    assert config.enable_chunked_prefill
    assert not config.emit_kv_events
    assert not config.emit_kv_token_ids
    assert config.max_model_len is None
    assert config.transfer_bytes_per_token is config.kv_transfer_bandwidth is None
    assert config.kv_transfer_timing_mode == "full_prompt"
    assert config.sglang == SglangConfig(
        schedule_policy="fifo",
        max_prefill_tokens=16384,
        chunked_prefill_size=8192,
        clip_max_new_tokens=4096,
        schedule_conservativeness=1.0,
    )
    assert config.trtllm == TrtllmConfig(capacity_scheduler_policy="guaranteed_no_evict")


@pytest.mark.parametrize(("backend", "tokens"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
@pytest.mark.parametrize("given", [{}, {"block_size": None}])
def test_block_size_defaults_by_backend(backend: str, tokens: int, given: dict[str, None]) -> None:
    assert read(backend=backend, **given).block_tokens == tokens


def test_null_means_no_limit_where_the_reference_says_so() -> None:  # C-1a
    config = read(max_num_seqs=None, max_num_batched_tokens=None)
    assert config.seqs_limit == config.token_budget == EngineConfig.UNLIMITED


NULLABLE = {
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "kv_bytes_per_token",
    "kv_transfer_bytes_per_token",
    "kv_transfer_bandwidth",
}


@pytest.mark.parametrize("key", EngineConfig.__struct_fields__)
def test_null_is_a_fault_everywhere_else(key: str) -> None:  # C-1a
    if key in NULLABLE:
        read(**{key: None})
    else:
        assert f"`$.engine.{key}`" in engine_fault(**{key: None})


# --- C-3: what no rank can run, in the order in which it is reported ----------------------------

FIXED = {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0}
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"num_gpu_blocks": 0}, "num_gpu_blocks must be positive, found 0"),
    ({"block_size": 0}, "block_size must be positive, found 0"),
    ({"block_size": 1}, "block_size must be at least two for vLLM and TensorRT-LLM, found 1"),
    ({"max_num_seqs": 0}, "max_num_seqs must be positive, found 0"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be positive, found 0"),
    ({"prefill_schedule_interval": 0}, "prefill_schedule_interval must be positive, found 0"),
    (
        {"prefill_decode_interval": 2},
        "prefill_decode_interval is supported only for backend=sglang, found 2",
    ),
    ({"max_model_len": 0}, "max_model_len must be positive, found 0"),
    ({"speedup_ratio": -0.5}, "speedup_ratio must be finite and non-negative, found -0.5"),
    ({"decode_speedup_ratio": -1}, "decode_speedup_ratio must be finite and non-negative"),
    ({"aic_nextn_accept_rates": "0.5"}, "aic_nextn_accept_rates requires aic_nextn"),
    ({"emit_kv_token_ids": True}, "emit_kv_token_ids requires emit_kv_events"),
    ({"kv_bytes_per_token": 0}, "kv_transfer_bytes_per_token must be positive, found 0"),
    ({"kv_transfer_bandwidth": -2.0}, "kv_transfer_bandwidth must be finite and non-negative"),
    (
        {"timing_model": FIXED | {"prefill_ms": -1, "decode_ms": -1}},
        "fixed prefill latency must be finite and non-negative: -1.0",
    ),
]


@pytest.mark.parametrize(("engine", "message"), ROWS)
def test_each_condition_has_its_message(engine: dict[str, Any], message: str) -> None:
    assert engine_fault(**engine).startswith(message)


def test_the_first_condition_of_the_list_is_the_one_reported() -> None:
    everything: dict[str, Any] = {}
    for engine, message in reversed(ROWS):
        everything |= engine
        assert engine_fault(**everything).startswith(message)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"backend": "trtllm", "block_size": 1}, "block_size must be at least two"),
        ({"backend": "trtllm", "prefill_schedule_interval": 2}, "only for backend=vllm, found 2"),
        ({"backend": "sglang", "prefill_schedule_interval": 3}, "only for backend=vllm, found 3"),
        (
            {"speedup_ratio": 1e200, "decode_speedup_ratio": 1e200},
            "speedup_ratio x decode_speedup_ratio must be finite, found inf",
        ),
        ({"aic_nextn": 0}, "aic_nextn must be 1 … 64, found 0"),
        ({"aic_nextn": 2**63}, f"aic_nextn must be 1 … 64, found {2**63}"),
        ({"aic_nextn": 2, "decode_speedup_ratio": 2.0}, "aic_nextn requires decode_speedup_ratio"),
        ({"timing_model": FIXED | {"decode_ms": -1}}, "fixed decode latency must be finite"),
        (
            {"timing_model": {"type": "external", "provider": " \t"}},
            "the timing provider cannot be empty",
        ),
        (
            {"backend": "trtllm", "trtllm": {"capacity_scheduler_policy": "max_utilization"}},
            "Invalid enum value 'max_utilization' - at `$.engine.trtllm.capacity_scheduler_policy`",
        ),
    ],
)
def test_further_conditions(engine: dict[str, Any], message: str) -> None:
    assert message in engine_fault(**engine)


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ({"max_prefill_tokens": 0}, "sglang.max_prefill_tokens must be positive"),
        ({"chunked_prefill_size": 0}, "sglang.chunked_prefill_size must be positive"),
        ({"chunked_prefill_size": 18}, "must be divisible by block_size 4, found 18"),
        ({"schedule_conservativeness": -1}, "sglang.schedule_conservativeness must be finite"),
    ],
)
def test_the_sglang_block_is_checked_for_its_backend_only(
    sglang: dict[str, Any], message: str
) -> None:
    assert message in engine_fault(backend="sglang", block_size=4, sglang=sglang)
    assert read(backend="vllm", block_size=4, sglang=sglang).backend == "vllm"


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("key", ["speedup_ratio", "decode_speedup_ratio", "kv_transfer_bandwidth"])
def test_numbers_that_are_none(key: str, value: float) -> None:
    assert f"{key} must be finite and non-negative, found {value}" in engine_fault(**{key: value})


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("key", ["prefill_ms", "decode_ms"])
def test_latencies_that_are_none(key: str, value: float) -> None:
    part = key.removesuffix("_ms")
    words = f"fixed {part} latency must be finite and non-negative: {value}"
    assert engine_fault(timing_model=FIXED | {key: value}) == words


# --- C-4: acceptance rates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nextn", "given", "rates"),
    [
        (1, None, (0.85,)),
        (3, "", (0.85, 0.3, 0.0)),
        (7, "  ", (0.85, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0)),
        (2, "0.7,0.5,0.3", (0.7, 0.5)),
        (3, " 1 , .5 ", (1.0, 0.5, 0.0)),
        (1, "1e-1", (0.1,)),
    ],
)
def test_rates_are_cut_or_padded_to_the_draft_length(
    nextn: int, given: str | None, rates: tuple[float, ...]
) -> None:
    assert read(aic_nextn=nextn, aic_nextn_accept_rates=given).acceptance_rates == rates


@pytest.mark.parametrize("part", ["x", "", "0x1", "0_1", "٠", "1,", "0.5 0.5"])
def test_a_rate_that_is_no_number(part: str) -> None:
    message = engine_fault(aic_nextn=1, aic_nextn_accept_rates=f"0.5,{part}")
    assert message.startswith("aic_nextn_accept_rates[")
    assert "expected a number" in message


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "nan", "inf"])
def test_a_rate_outside_0_and_1_even_beyond_the_draft_length(rate: str) -> None:
    message = engine_fault(aic_nextn=1, aic_nextn_accept_rates=f"0.5,0.5,{rate}")
    assert message == f"aic_nextn_accept_rates[2]: expected 0 … 1, found {float(rate)}"


@pytest.mark.parametrize("given", ["", " ", "0.5"])
def test_rates_without_speculation_are_refused_even_blank_ones(given: str) -> None:
    assert engine_fault(aic_nextn_accept_rates=given).startswith("aic_nextn_accept_rates requires")


# --- C-5: the two forms of a document -----------------------------------------------------------


def test_the_launch_form() -> None:
    document = {
        "engine": {"num_gpu_blocks": 8},
        "dp_size": 2,
        "tensor_parallel_size": 4,
        "startup_time": 12.5,
        "num_gpu_blocks_is_explicit": True,
        "gpu_memory_utilization": 0.9,
        "mem_fraction_static": 0.0,
        "free_gpu_memory_fraction": 1,
        "cuda_graph_reserved_bytes": 0,
        "dynamo": {"reasoning": {"start": 1}, "bootstrap_port": 8998},
    }
    for strict in (True, False):
        launch = launch_config(document, source="e.json", strict=strict)
        assert launch.gpus_per_worker == 8
        assert launch.engine.num_gpu_blocks == 8


def test_a_bare_record_is_taken_where_leniency_is_asked_for() -> None:
    record = {"num_gpu_blocks": 8, "block_size": 4}
    launch = launch_config(record, source="e.json", strict=False)
    assert (launch.engine.total_kv_tokens, launch.dp_size) == (32, 1)
    assert "$.num_gpu_blocks: unknown key" in fault(record)
    assert "it belongs in the object under 'engine'" in fault(record | {"dp_size": 2}, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_an_empty_document_is_all_defaults(strict: bool) -> None:
    assert launch_config({}, source="e.json", strict=strict) == LaunchConfig(engine=EngineConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 0}, "dp_size must be positive, found 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be positive, found 0"),
        ({"dp_size": 2**32}, "`$.dp_size`"),
        ({"tensor_parallel_size": 2**32}, "`$.tensor_parallel_size`"),
        ({"dp_size": True}, "`$.dp_size`"),
        ({"dp_size": 2.0}, "`$.dp_size`"),
        ({"startup_time": -1}, "startup_time must be finite and non-negative, found -1.0"),
        ({"startup_time": float("nan")}, "startup_time must be finite and non-negative, found nan"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be finite and in [0, 1]"),
        ({"mem_fraction_static": -0.1}, "mem_fraction_static must be finite and in [0, 1]"),
        (
            {"free_gpu_memory_fraction": float("nan")},
            "free_gpu_memory_fraction must be finite and in [0, 1], found nan",
        ),
        ({"dynamo": 1}, "`$.dynamo`"),
        ({"num_gpu_blocks_is_explicit": 1}, "`$.num_gpu_blocks_is_explicit`"),
    ],
)
def test_launch_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    assert message in fault({"engine": {}} | settings)


def test_a_group_must_leave_every_sglang_rank_a_chunk() -> None:
    engine = {"backend": "sglang", "sglang": {"chunked_prefill_size": 3}}
    assert launch_config({"engine": engine, "dp_size": 3}, source="e.json").dp_size == 3
    message = fault({"engine": engine, "dp_size": 4})
    assert message == "dp_size 4 reduces sglang.chunked_prefill_size=3 to zero"


@pytest.mark.parametrize("document", [None, [], "vllm", 5, True, [{"engine": {}}]])
def test_what_is_no_object_is_no_configuration(document: Any) -> None:
    assert fault(document).startswith("expected a JSON object, found ")


def test_what_is_echoed_can_be_read_again() -> None:
    launch = launch_config(
        {"engine": {"backend": "sglang", "kv_bytes_per_token": 3, "timing_model": FIXED}},
        source="e.json",
    )
    again = json.loads(json.dumps(msgspec.to_builtins(launch)))
    assert launch_config(again, source="echo") == launch


def test_configurations_of_recorded_cases_load() -> None:
    folder = Path(__file__).parent.parent / "parity" / "cases"
    engines = [
        case[key]
        for path in sorted(folder.glob("*_0.json"))
        for case in [json.loads(path.read_text())]
        for key in ("engine", "prefill_engine", "decode_engine")
        if case.get(key)
    ]
    assert len(engines) > 10
    for engine in engines:
        launch_config(engine, source="case")


# --- C-44: the timing model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        ({}, "missing required field `type`"),
        ({"type": "linear"}, "Invalid value 'linear' - at `$.engine.timing_model.type`"),
        ({"type": "fixed", "prefill_ms": 1}, "missing required field `decode_ms`"),
        ({"type": "fixed", "decode_ms": 1}, "missing required field `prefill_ms`"),
        (
            {"type": "fixed", "prefill_ms": "1", "decode_ms": 1},
            "`$.engine.timing_model.prefill_ms`",
        ),
        ({"type": "external"}, "missing required field `provider`"),
        ({"type": "external", "provider": 1}, "`$.engine.timing_model.provider`"),
        ("polynomial", "`$.engine.timing_model`"),
        (None, "`$.engine.timing_model`"),
    ],
)
def test_a_timing_model_that_is_none(timing: Any, message: str) -> None:
    assert message in engine_fault(timing_model=timing)


def test_keys_that_nothing_reads_are_tolerated_in_a_timing_model_and_told() -> None:
    document = {"engine": {"timing_model": FIXED | {"unit": "ms", "a": 1}}}
    timing = launch_config(document, source="e.json").engine.timing_model
    assert timing == FixedConfig(1.0, 1.0)
    assert unknown_timing_keys(document) == ["a", "unit"]
    assert unknown_timing_keys(document["engine"]) == ["a", "unit"]
    assert unknown_timing_keys({"engine": {"timing_model": {"type": "linear", "x": 1}}}) == []
    assert unknown_timing_keys({"engine": 3}) == []
