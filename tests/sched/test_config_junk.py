"""What is no configuration: wrong types, unknown keys, anything at all. One clear sentence each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from config_reading import engine_fault, fault, read

from passtime.errors import ConfigError
from passtime.sched.config import (
    EngineConfig,
    LaunchConfig,
    RuntimeOptions,
    SglangConfig,
    TrtllmConfig,
    launch_config,
)

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


def test_a_value_with_line_breaks_still_makes_one_line() -> None:
    assert engine_fault(backend="v\nllm") == "Invalid enum value 'v\\nllm' - at `$.engine.backend`"


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
