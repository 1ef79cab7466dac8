"""Random passes to which something is added: no prediction falls, up to four times the box."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from passtime.profiles.document import EngineFacts, Profile, load_profile, shipped_profiles
from passtime.profiles.predict import Predictor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from falls import STEPS, falls

STEPS_EACH = 20_000
ENGINES = {
    "graphs": EngineFacts(graph_sizes=(1, 2, 4, 8, 16, 32, 64, 96)),
    "tiles": EngineFacts(tile_tokens=128),
    "rectangle": EngineFacts(attention="rectangle"),
}


FitTo: TypeAlias = Callable[[str, EngineFacts], Predictor]


def wrong(predictor: Predictor, seed: int = 0) -> Iterator[str]:
    for name, found in falls(predictor, steps=STEPS_EACH, seed=seed).items():
        if found.falls or found.unusable:
            yield f"{name}: {found}"


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_never_falls(name: str) -> None:
    assert not list(wrong(Predictor.of(load_profile(name))))


def test_a_fresh_fit_never_falls(fitted: Profile) -> None:
    assert not list(wrong(Predictor.of(fitted), seed=1))


@pytest.mark.parametrize("name", ENGINES)
def test_no_engine_makes_predictions_fall(fit_to: FitTo, name: str) -> None:
    assert not list(wrong(fit_to("llama-3.1-8b", ENGINES[name])))


def test_a_mixture_of_experts_never_falls(fit_to: FitTo) -> None:
    assert not list(wrong(fit_to("qwen3-30b-a3b", EngineFacts())))


def test_attention_alone_rises_at_kept_means(fit_to: FitTo) -> None:
    predictor = fit_to("llama-3.1-8b", EngineFacts(timed_part="attention"))
    found = falls(predictor, steps=STEPS_EACH, seed=0)
    doors = [name for name in STEPS if "pass" not in name and "same KV" not in name]
    assert len(doors) == 4
    assert not {name: found[name] for name in doors if found[name].falls}
