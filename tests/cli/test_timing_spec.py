"""What people type after --timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from passtime.errors import InputError
from passtime.sched.config import EngineConfig, FixedConfig, LaunchConfig
from passtime.sched.timing import FixedTiming, PolynomialTiming
from passtime.timing_spec import BestConstants, EngineTiming, ProfileSpec, parse_timing

LAUNCH = LaunchConfig(engine=EngineConfig(timing_model=FixedConfig(prefill_ms=3.0, decode_ms=2.0)))


def model_of(text: str) -> object:
    spec = parse_timing(text)
    assert not isinstance(spec, BestConstants)
    return spec.model(LAUNCH)


def test_config_is_what_the_engine_file_says() -> None:
    model = model_of("config")
    assert isinstance(model, FixedTiming)
    assert (model.prefill_ms, model.decode_ms) == (3.0, 2.0)


def test_constants_are_prefill_then_decode() -> None:
    model = model_of("fixed:10.5,4")
    assert isinstance(model, FixedTiming)
    assert (model.prefill_ms, model.decode_ms) == (10.5, 4.0)


def test_polynomial_is_the_references() -> None:
    assert isinstance(model_of("polynomial"), PolynomialTiming)


def test_a_profile_is_asked_by_two_calls_unless_it_says_pass(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.touch()
    assert parse_timing(str(path)) == ProfileSpec(str(path), "calls")
    assert parse_timing(f"{path}@calls") == ProfileSpec(str(path), "calls")
    assert parse_timing(f"{path}@pass") == ProfileSpec(str(path), "pass")


def test_a_path_may_hold_an_at_sign(tmp_path: Path) -> None:
    path = tmp_path / "a@b.json"
    path.touch()
    assert parse_timing(str(path)) == ProfileSpec(str(path), "calls")


def test_constants_from_another_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.touch()
    assert parse_timing(f"fixed:from={path}@calls") == BestConstants(ProfileSpec(str(path)))
    assert parse_timing("fixed:from=config") == BestConstants(EngineTiming())


@pytest.mark.parametrize("text", ["config", "polynomial", "fixed:10,4", "fixed:from=polynomial"])
def test_a_spec_is_typed_as_it_prints(text: str) -> None:
    assert parse_timing(text).text == text


@pytest.mark.parametrize("text", ["no-such-gpu", "no-such-gpu@pass", "fixed:from=no-such-gpu"])
def test_an_unknown_name_lists_what_exists(text: str) -> None:
    """P09."""
    with pytest.raises(InputError) as raised:
        parse_timing(text)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    assert "'no-such-gpu'" in message
    assert "shipped: " in message
    assert "polynomial, fixed:PREFILL_MS,DECODE_MS" in message
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "."])
def test_a_folder_is_no_profile(text: str) -> None:
    with pytest.raises(InputError, match="no shipped profile and no file is called"):
        parse_timing(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed:", "expected fixed:PREFILL_MS,DECODE_MS"),
        ("fixed:1", "expected fixed:PREFILL_MS,DECODE_MS"),
        ("fixed:1,2,3", "expected fixed:PREFILL_MS,DECODE_MS"),
        ("fixed:a,b", "expected fixed:PREFILL_MS,DECODE_MS"),
        ("fixed:-1,2", "finite and >= 0"),
        ("fixed:nan,2", "finite and >= 0"),
        ("fixed:1,inf", "finite and >= 0"),
    ],
)
def test_constants_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_timing(text)


def test_constants_stand_for_the_two_calls_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.touch()
    with pytest.raises(InputError, match="leave @pass out"):
        parse_timing(f"fixed:from={path}@pass")


def test_a_table_knows_the_two_calls_only(tmp_path: Path) -> None:
    path = tmp_path / "table.npz"
    path.touch()
    with pytest.raises(InputError, match="two calls only"):
        parse_timing(f"{path}@pass")
