"""Configurations: the reference's JSON is read as it is, and every fault is one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.errors import ConfigError
from passtime.sched.config import (
    EngineConfig,
    FixedConfig,
    LaunchConfig,
    RuntimeOptions,
    SglangConfig,
    TrtllmConfig,
    launch_config,
    unknown_timing_keys,
)


def read(**engine: Any) -> EngineConfig:
    return launch_config({"engine": engine}, source="e.json").engine


def fault(document: Any, *, strict: bool = True) -> str:
    """The message that refuses ``document``; it names the file."""
    with pytest.raises(ConfigError) as caught:
        launch_config(document, source="e.json", strict=strict)
    message = str(caught.value)
    assert all(line.startswith("e.json: ") for line in message.splitlines())
    return message.removeprefix("e.json: ")


def engine_fault(**engine: Any) -> str:
    return fault({"engine": engine})


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


# --- Types: one sentence that names the place ---------------------------------------------------

KEYS_OF_TYPE = {
    "int": [
        "num_gpu_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "aic_nextn",
        "aic_mtp_seed",
        "kv_bytes_per_token",
        "kv_transfer_bytes_per_token",
    ],
    "bool": ["enable_prefix_caching", "enable_chunked_prefill", "emit_kv_events"],
    "float": ["speedup_ratio", "decode_speedup_ratio", "kv_transfer_bandwidth"],
    "enum": ["backend", "worker_type", "preemption_mode", "kv_transfer_timing_mode"],
}
JUNK_OF_TYPE: dict[str, list[Any]] = {
    "int": [True, 4.0, 4.5, "4", -1, [], {}, float("nan")],
    "bool": [0, 1, "true", 1.0, []],
    "float": [True, "1.0", [], {}],
    "enum": ["VLLM", "Aggregated", "LIFO", "fastest", 1, True],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(k, v) for kind, keys in KEYS_OF_TYPE.items() for k in keys for v in JUNK_OF_TYPE[kind]],
)
def test_a_value_of_another_type_is_refused_by_name(key: str, value: Any) -> None:
    message = engine_fault(**{key: value})
    assert f"at `$.engine.{key}`" in message
    assert "\n" not in message


@pytest.mark.parametrize("key", KEYS_OF_TYPE["int"])
@pytest.mark.parametrize("value", [2**64, 10**30, pytest.param(10**5000, id="10**5000")])
def test_integers_beyond_64_bits_are_refused(key: str, value: int) -> None:
    words = f"{key} must fit 64 bits, found one of {value.bit_length()}"
    assert engine_fault(**{key: value}) == words
    assert "must fit 64 bits" in fault({"engine": {}, "cuda_graph_reserved_bytes": value})
    assert "must fit 64 bits" in engine_fault(sglang={"max_prefill_tokens": value})


def test_the_largest_seed_is_a_seed() -> None:
    assert read(aic_mtp_seed=2**64 - 1).aic_mtp_seed == 2**64 - 1


def test_a_number_too_large_for_a_float_is_refused() -> None:
    assert "`$.engine.speedup_ratio`" in engine_fault(speedup_ratio=10**400)


# --- Keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"engine": {"num_gpu_block": 4}},
            "$.engine.num_gpu_block: unknown key, did you mean 'num_gpu_blocks'?",
        ),
        (
            {"engine": {"sglang": {"schedule_polcy": "fifo"}}},
            "$.engine.sglang.schedule_polcy: unknown key, did you mean 'schedule_policy'?",
        ),
        (
            {"engine": {"trtllm": {"zzz": 1}}},
            "$.engine.trtllm.zzz: unknown key; known: capacity_scheduler_policy",
        ),
        ({"engine": {}, "dpsize": 2}, "$.dpsize: unknown key, did you mean 'dp_size'?"),
        (
            {"engine": {}, "dp\nsize": 2},
            "$.dp\\nsize: unknown key, did you mean 'dp_size'?",
        ),
        (
            {"engine": {}, "block_size": 4},
            "$.block_size: unknown key, it belongs in the object under 'engine'",
        ),
        (
            {"engine": {}, "dynamo": {"reasons": 1}},
            "$.dynamo.reasons: unknown key, did you mean 'reasoning'?",
        ),
    ],
)
def test_an_unknown_key_is_met_with_the_nearest_known_one(
    document: dict[str, Any], message: str
) -> None:
    assert fault(document) == message


def test_all_unknown_keys_are_told_at_once() -> None:
    document = {"engine": {"blok_size": 1, "sglang": {"x": 1}}, "dynamo": {"y": 1}, "z": 1}
    told = [line.split(": unknown key")[0] for line in fault(document).splitlines()]
    places = {line.removeprefix("e.json: ") for line in told}
    assert places == {"$.engine.blok_size", "$.engine.sglang.x", "$.dynamo.y", "$.z"}


@pytest.mark.parametrize("key", ["kv_bytes_per_token", "kv_transfer_bytes_per_token"])
def test_both_names_of_the_bytes_of_a_token(key: str) -> None:
    assert read(**{key: 131072}).transfer_bytes_per_token == 131072


@pytest.mark.parametrize("second", [2, None])
def test_both_names_at_once_are_one_field_given_twice(second: int | None) -> None:
    message = engine_fault(kv_bytes_per_token=1, kv_transfer_bytes_per_token=second)
    assert "are one field: give one of them" in message


@pytest.mark.parametrize(
    "key",
    [
        "kv_cache_bytes_per_token",
        "kv_cache_groups",
        "kv_cache_capacity_bytes",
        "native_host_offload",
        "g3_offload",
        "state_cache",
        "prefix_match_unit",
    ],
)
def test_features_that_are_not_modelled_are_refused_unless_off(key: str) -> None:
    assert read(**{key: None}) == read(**{key: {}}) == read()
    assert engine_fault(**{key: 1}) == (
        f"$.engine.{key}: this feature is not modelled, only null is accepted"
    )


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


def test_a_value_with_line_breaks_still_makes_one_line() -> None:
    assert engine_fault(backend="v\nllm") == "Invalid enum value 'v\\nllm' - at `$.engine.backend`"


def test_keys_that_nothing_reads_are_tolerated_in_a_timing_model_and_told() -> None:
    document = {"engine": {"timing_model": FIXED | {"unit": "ms", "a": 1}}}
    timing = launch_config(document, source="e.json").engine.timing_model
    assert timing == FixedConfig(1.0, 1.0)
    assert unknown_timing_keys(document) == ["a", "unit"]
    assert unknown_timing_keys(document["engine"]) == ["a", "unit"]
    assert unknown_timing_keys({"engine": {"timing_model": {"type": "linear", "x": 1}}}) == []
    assert unknown_timing_keys({"engine": 3}) == []


# --- Anything at all ----------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.just(10**400)
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
KEYS = sorted(
    {
        key
        for struct in (LaunchConfig, EngineConfig, SglangConfig, TrtllmConfig, RuntimeOptions)
        for key in struct.__struct_fields__
    }
    | {"type", "prefill_ms", "decode_ms", "provider", "config", "kv_cache_groups"}
)
documents = st.recursive(
    scalars | st.sampled_from(["vllm", "sglang", "fixed", "external", "0.5,1", 1, 4, 0.5, True]),
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


def accepted_or_refused(document: Any, strict: bool) -> bool:
    try:
        launch_config(document, source="e.json", strict=strict)
    except ConfigError:
        fault(document, strict=strict)  # names the file
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(junk | documents, st.booleans())
def test_arbitrary_json_is_a_configuration_or_one_clear_error(document: Any, strict: bool) -> None:
    accepted_or_refused(document, strict)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(EngineConfig.__struct_fields__), documents, max_size=4))
def test_arbitrary_engine_records_too(engine: dict[str, Any]) -> None:
    accepted_or_refused({"engine": engine}, True)


def test_deep_junk_is_refused_like_any_other() -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    assert not accepted_or_refused(deep, True)
    assert not accepted_or_refused({"engine": deep}, True)
    assert not accepted_or_refused({"engine": {"num_gpu_blocks": deep}}, True)
    assert not accepted_or_refused({"engine": {"timing_model": {"type": deep}}}, True)
    external = {"type": "external", "provider": "somebody", "config": deep}
    assert accepted_or_refused({"engine": {"timing_model": external}}, True)
