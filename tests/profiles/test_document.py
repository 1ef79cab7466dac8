"""The document is read strictly, and every fault is named with its place."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from passtime.errors import DocumentError
from passtime.profiles.document import (
    SCHEMA,
    Profile,
    load_profile,
    read_profile,
    save_profile,
    shipped_profiles,
)


@pytest.fixture
def document(fitted: Profile) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(msgspec.json.encode(fitted))
    return parsed


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(DocumentError) as refused:
        read_profile(json.dumps(document).encode(), source="profile.json")
    return str(refused.value)


def test_a_saved_profile_reads_back_equal(fitted: Profile, tmp_path: Path) -> None:
    save_profile(fitted, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == fitted


def test_saving_twice_gives_the_same_bytes(fitted: Profile, tmp_path: Path) -> None:
    save_profile(fitted, tmp_path / "a.json")
    save_profile(load_profile(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_saving_leaves_no_other_file_behind(fitted: Profile, tmp_path: Path) -> None:
    save_profile(fitted, tmp_path / "p.json")
    save_profile(fitted, tmp_path / "p.json")
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_folder_that_is_not_there_is_named(fitted: Profile, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere.p\.json: cannot write: No such file"):
        save_profile(fitted, tmp_path / "nowhere" / "p.json")


Change = Callable[[dict[str, Any]], Any]

FAULTS: dict[str, tuple[Change, str]] = {
    "a negative latency": (
        lambda d: d["points"][3].update(latency_ms=-2.0),
        "profile.json: $.points[3].latency_ms: expected a number > 0.0, found -2.0",
    ),
    "a zero latency": (
        lambda d: d["points"][0].update(latency_ms=0.0),
        "profile.json: $.points[0].latency_ms: expected a number > 0.0, found 0.0",
    ),
    "an unknown key": (
        lambda d: d.update(colour="red"),
        "profile.json: $.colour: unknown key",
    ),
    "an unknown key inside": (
        lambda d: d["coefficients"].update(colour=1.0),
        "profile.json: $.coefficients.colour: unknown key",
    ),
    "parallelism that is null": (
        lambda d: d["parallelism"].update(tensor_parallel=None),
        "profile.json: $.parallelism.tensor_parallel: expected an integer, found null",
    ),
    "parallelism that is absent": (
        lambda d: d["parallelism"].pop("pipeline_parallel"),
        "profile.json: $.parallelism.pipeline_parallel: this field is required and is missing",
    ),
    "parallelism against the model": (
        lambda d: d["parallelism"].update(tensor_parallel=4),
        "parallelism.tensor_parallel: expected 1 as in $.model.tensor_parallel, found 4",
    ),
    "a device kind against the device": (
        lambda d: d.update(device_kind="cpu"),
        "device_kind: expected 'cuda' as in $.device.kind",
    ),
    "a rate of zero": (
        lambda d: d["coefficients"].update(linear_flops_per_s=0.0),
        "$.coefficients.linear_flops_per_s: expected a number > 0.0, found 0.0",
    ),
    "a negative cost": (
        lambda d: d["coefficients"].update(token_ms=-1e-9),
        "$.coefficients.token_ms: expected a number >= 0.0, found -1e-9",
    ),
    "a table too short": (
        lambda d: d["residual"]["decode"]["log_factor"].pop(),
        "log_factor: expected",
    ),
    "axes that fall": (
        lambda d: d["residual"]["decode"]["axes"][0].update(nodes=[4.0, 2.0]),
        "expected nodes that ascend strictly",
    ),
    "axes of another regime": (
        lambda d: d["residual"].update(mixed=d["residual"]["decode"]),
        "residual.mixed: expected axes",
    ),
    "text for a number": (
        lambda d: d["errors"]["in_sample"].update(mape_percent="good"),
        '$.errors.in_sample.mape_percent: expected a number, found "good"',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_place(name: str, document: dict[str, Any]) -> None:
    change, expected = FAULTS[name]
    broken = copy.deepcopy(document)
    change(broken)
    assert expected in refusal(broken)


def test_a_newer_schema_says_so(document: dict[str, Any]) -> None:
    document["schema"] = SCHEMA + 1
    document["something_new"] = True
    assert "written by a newer passtime" in refusal(document)


def test_an_older_schema_is_refused(document: dict[str, Any]) -> None:
    document["schema"] = 0
    assert f"$.schema: expected {SCHEMA}, found 0: written by an older" in refusal(document)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\x80\x04\x95pickle", b'"text"', b"null"])
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"^p\.json: "):
        read_profile(data, source="p.json")


def test_an_unknown_name_lists_what_ships() -> None:
    with pytest.raises(DocumentError, match=r"'no-such-gpu': no shipped profile.*shipped: "):
        load_profile("no-such-gpu")


def test_every_shipped_profile_loads() -> None:
    for name in shipped_profiles():
        assert load_profile(name).points
