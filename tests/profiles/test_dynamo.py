"""NVIDIA's npz tables: read strictly, evaluated its way (spec/dynamo-profile.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.errors import ConfigError, DocumentError
from passtime.profiles.dynamo import DynamoTiming, from_config

Arrays = dict[str, Any]


def arrays() -> Arrays:
    return {
        "prefill_isl": np.array([100.0, 200.0, 400.0]),
        "prefill_ttft_ms": np.array([10.0, 30.0, 40.0]),
        "decode_active_kv_tokens": np.array([0.0, 4096.0, 65536.0]),
        "decode_context_length": np.array([1.0, 1024.0, 4096.0]),
        "decode_itl": np.array([[5.0, 5.2, 5.9], [6.0, 6.4, 7.3], [11.0, 12.5, 16.0]]),
    }


def written(tmp_path: Path, content: Arrays) -> Path:
    path = tmp_path / "profile.npz"
    np.savez(path, **content)
    return path


@pytest.fixture
def table() -> DynamoTiming:
    return DynamoTiming(**arrays())


def test_prefill_is_linear_and_goes_on_without_limit(table: DynamoTiming) -> None:
    isl = [50, 100, 150, 200, 300, 400, 800]
    assert [table.predict_prefill_ms(1, n, 0) for n in isl] == [
        0.0,
        10.0,
        20.0,
        30.0,
        35.0,
        40.0,
        60.0,
    ]


def test_prefill_asks_for_batch_times_the_difference_of_the_means(table: DynamoTiming) -> None:
    assert table.predict_prefill_ms(3, 267, 170) == table.predict_prefill_ms(1, 291, 0)


def test_nothing_to_compute_takes_no_time(table: DynamoTiming) -> None:
    assert table.predict_prefill_ms(2, 50, 50) == 0.0
    assert table.predict_decode_ms(0, 0, 0, 100) == 0.0
    assert table.predict_decode_many(0, np.array([1, 2]), 100).tolist() == [0.0, 0.0]


def test_decode_is_bilinear_at_the_floored_mean() -> None:
    table = DynamoTiming(**arrays())
    corner = table.predict_decode_ms(4, 4096, 1024, 10**6)
    assert corner == 6.4
    assert table.predict_decode_ms(3, 455, 151, 10**6) == pytest.approx(
        5.0 + 0.2 * 150 / 1023 + 455 / 4096 * (1.0 + 0.2 * 150 / 1023)
    )


def test_a_decode_step_takes_at_least_one_millisecond() -> None:
    content = arrays() | {"decode_itl": np.full((3, 3), 0.3)}
    assert DynamoTiming(**content).predict_decode_ms(1, 100, 100, 10**6) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_counts_as_the_floor(bad: float) -> None:
    content = arrays()
    content["decode_itl"] = np.full((3, 3), bad)
    content["prefill_ttft_ms"] = np.full(3, np.nan)
    table = DynamoTiming(**content)
    assert table.predict_decode_ms(2, 4000, 2000, 10**6) == 1.0
    assert table.predict_decode_many(2, np.array([4000]), 10**6).tolist() == [1.0]
    assert table.predict_prefill_ms(1, 150, 0) == 0.0


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 300),
    kv_tokens=st.lists(st.integers(1, 200_000) | st.sampled_from([4096, 65536]), min_size=1),
    seed=st.integers(0, 5),
)
def test_many_steps_equal_single_ones_to_the_last_bit(
    batch: int, kv_tokens: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    content = arrays() | {"decode_itl": rng.normal(5, 4, (3, 3))}
    table = DynamoTiming(**content)
    many = table.predict_decode_many(batch, np.array(kv_tokens), 10**6)
    assert many.tolist() == [
        table.predict_decode_ms(batch, kv, kv // batch, 10**6) for kv in kv_tokens
    ]


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda content: {key: value for key, value in content.items() if key != name}


def with_array(name: str, value: Any) -> Callable[[Arrays], Arrays]:
    return lambda content: content | {name: value}


FILE_FAULTS = {
    "an absent array": (
        without("decode_itl"),
        "Failed to load decode_itl from NPZ: zip file error: specified file not found in archive",
    ),
    "float32": (
        with_array("prefill_isl", np.array([1, 2, 3], np.float32)),
        r"Failed to load prefill_isl from NPZ: .*incorrect descriptor \('<f4'\) for this type",
    ),
    "integers": (
        with_array("decode_itl", np.ones((3, 3), np.int64)),
        r"incorrect descriptor \('<i8'\) for this type",
    ),
    "pickled objects": (
        with_array("decode_itl", np.array([{"a": 1}], dtype=object)),
        "Failed to load decode_itl from NPZ: error reading npy file in npz archive",
    ),
    "a flat surface": (
        with_array("decode_itl", np.ones(9)),
        r"ndim 1 of array did not match Dimension type with NDIM = Some\(2\)",
    ),
    "prefill lengths that differ": (
        with_array("prefill_ttft_ms", np.ones(2)),
        "Prefill array length mismatch: isl=3, ttft=2",
    ),
    "a surface of another shape": (
        with_array("decode_itl", np.ones((2, 2))),
        r"Decode array dimension mismatch: itl shape=\(2, 2\), active_kv=3, context=3",
    ),
    "a prefill axis with equal neighbours": (
        with_array("prefill_isl", np.array([1.0, 1.0, 2.0])),
        "Failed to build prefill interpolator: Values in the x axis need to be strictly monotonic",
    ),
    "a NaN in an axis": (
        with_array("decode_context_length", np.array([1.0, np.nan, 3.0])),
        "Failed to build decode interpolator: The y-axis needs to be strictly monotonic rising",
    ),
    "a falling KV axis": (
        with_array("decode_active_kv_tokens", np.array([3.0, 2.0, 1.0])),
        "Failed to build decode interpolator: The x-axis needs to be strictly monotonic rising",
    ),
    "one prefill point": (
        lambda c: c | {"prefill_isl": np.ones(1), "prefill_ttft_ms": np.ones(1)},
        "The chosen Interpolation strategy needs at least 2 data points",
    ),
    "one context": (
        lambda c: c | {"decode_context_length": np.ones(1), "decode_itl": np.ones((3, 1))},
        r"The 1-dimension has not enough data .* Provided: 1, Reqired: 2",
    ),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_faulty_file_gives_the_references_words(name: str, tmp_path: Path) -> None:
    change, message = FILE_FAULTS[name]
    with pytest.raises(DocumentError, match=message):
        from_config({"path": str(written(tmp_path, change(arrays())))}, source="engine.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r'Failed to open NPZ file: ".*": No such file or'):
        from_config({"path": str(tmp_path / "none.npz")}, source="engine.json")


def test_a_file_that_is_no_zip(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"not a zip")
    with pytest.raises(DocumentError, match="Failed to create NPZ reader for"):
        from_config({"path": str(tmp_path / "p.npz")}, source="engine.json")


def test_stored_and_deflated_files_and_other_members_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "z.npz", comment=np.array([1]), **arrays())
    packed = DynamoTiming.load(tmp_path / "z.npz")
    assert packed.predict_prefill_ms(1, 150, 0) == 20.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"\$.path: this field is required"),
        ({"path": 3}, r"\$.path: expected a text, found 3"),
        ({"path": "p", "x": 1}, r"\$.x: unknown key"),
        (None, "expected an object"),
    ],
)
def test_a_faulty_configuration_is_named(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(config, source="engine.json")
