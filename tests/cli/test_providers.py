"""Timing models of other packages: what they do wrong is told in one line that names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from passtime.errors import ConfigError, ProviderError
from passtime.providers import live_timing
from passtime.sched.config import ExternalConfig

PACKAGE = """
from passtime.errors import ProviderError

class Model:
    def predict_prefill_ms(self, batch_size, mean_isl, mean_prefix):
        return 2.0
    def predict_decode_ms(self, batch_size, active_kv_tokens, mean_context_length, total_kv_tokens):
        return 1.0

def make(config, *, source):
    if config == "of ours":
        raise ProviderError(source)
    if config == "not a model":
        return 5
    if config == "bad":
        raise ValueError("no such card")
    return Model()
"""
ENTRY_POINTS = """
[passtime.timing_models]
sound = providers_of_a_test:make
gone = no_such_package_anywhere:make
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "providers_of_a_test.py").write_text(PACKAGE)
    about = tmp_path / "providers_of_a_test-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: providers-of-a-test\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "providers_of_a_test", raising=False)


def test_an_entry_point_is_a_timing_model() -> None:
    model = live_timing(ExternalConfig(provider="sound", config={}), source="here")
    assert model.predict_prefill_ms(1, 10, 0) == 2.0


@pytest.mark.parametrize(
    ("provider", "config", "message"),
    [
        ("absent", {}, "here: unknown timing provider 'absent'; known: .*, gone, sound"),
        ("gone", {}, "here: timing provider 'gone' .* cannot be loaded: ModuleNotFoundError"),
        ("sound", "bad", "here: timing provider 'sound' failed: ValueError: no such card"),
        ("sound", "not a model", "'sound' made a int, which has no predict_prefill_ms"),
    ],
)
def test_a_provider_that_makes_no_model_is_named(
    provider: str, config: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        live_timing(ExternalConfig(provider=provider, config=config), source="here")


def test_an_error_of_the_tree_is_passed_on_as_it_is() -> None:
    with pytest.raises(ProviderError, match=r"^here$"):
        live_timing(ExternalConfig(provider="sound", config="of ours"), source="here")
