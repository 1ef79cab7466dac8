"""The provider's configuration, and the protocols a profile answers to."""

from __future__ import annotations

from pathlib import Path

import pytest

from passtime.errors import ConfigError, DocumentError
from passtime.profiles.document import Profile, save_profile
from passtime.profiles.provider import ProfileTiming, from_config
from passtime.sched.timing import DecodeStretchModel, PassModel, asks_whole_pass


@pytest.fixture
def path(fitted: Profile, tmp_path: Path) -> Path:
    save_profile(fitted, tmp_path / "p.json")
    return tmp_path / "p.json"


def test_a_profile_is_asked_by_two_calls_unless_said_otherwise(path: Path) -> None:
    assert not asks_whole_pass(from_config({"profile": str(path)}, source="engine.json"))
    whole = from_config({"profile": str(path), "composition": "pass"}, source="engine.json")
    assert asks_whole_pass(whole)


def test_a_profile_answers_stretches_and_whole_passes(timing: ProfileTiming) -> None:
    assert isinstance(timing, DecodeStretchModel)
    assert isinstance(timing, PassModel)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"engine.json: \$.profile: this field is required"),
        ({"profile": 3}, r"engine.json: \$.profile: expected a text, found 3"),
        ({"profile": "p", "speed": 1}, r"engine.json: \$.speed: unknown key"),
        ({"profile": "p", "composition": "sum"}, r"engine.json: \$.composition: .*\"sum\""),
        (None, r"engine.json: \$: expected an object, found null"),
    ],
)
def test_a_faulty_configuration_is_named(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(config, source="engine.json")


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(DocumentError, match="no-such-gpu"):
        from_config({"profile": "no-such-gpu"}, source="engine.json")
