"""``simulate --intervals``: a range around every figure, out of draws of the profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = ("--workload", "conversation", "--request-rate", "2", "--num-prompts", "40")


@pytest.fixture
def engine(tmp_path: Path) -> str:
    path = tmp_path / "engine.json"
    path.write_text('{"engine": {"num_gpu_blocks": 4096}}')
    return str(path)


def report(passtime: Any, engine: str, *flags: str) -> dict[str, Any]:
    result = passtime("simulate", "--engine", engine, *WORKLOAD, "--json", *flags)
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def test_figures_lie_in_their_ranges(passtime: Any, engine: str, profile: str) -> None:
    document = report(passtime, engine, "--timing", profile, "--intervals", "8")
    intervals, summary = document["intervals"], document["summary"]
    assert intervals["draws"] == 8
    for key in ("mean_ttft_ms", "p99_tpot_ms", "median_e2e_latency_ms"):
        figure = intervals["figures"][key]
        assert figure["low"] < figure["high"]
        assert figure["low"] * 0.5 < summary[key] < figure["high"] * 2
    assert "num_requests" not in intervals["figures"]


def test_same_seed_same_ranges(passtime: Any, engine: str, profile: str) -> None:
    flags = ("--timing", profile, "--intervals", "3")
    first, again = (report(passtime, engine, *flags) for _ in range(2))
    assert first == again
    other = report(passtime, engine, *flags, "--seed", "5")
    assert other["intervals"] != first["intervals"]


def test_table_has_a_range_per_latency(passtime: Any, engine: str, profile: str) -> None:
    flags = (*WORKLOAD, "--timing", profile, "--intervals", "3")
    result = passtime("simulate", "--engine", engine, *flags)
    assert "90 % interval, ms" in result.out
    assert "…" in result.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--timing", "polynomial", "--intervals"), "intervals come from a profile"),
        (("--intervals",), "intervals come from a profile"),
    ],
)
def test_without_a_profile_there_are_none(
    passtime: Any, engine: str, flags: tuple[str, ...], words: str
) -> None:
    result = passtime("simulate", "--engine", engine, *WORKLOAD, *flags)
    assert result.code == 2
    assert words in result.err


def test_one_draw_is_refused(passtime: Any, engine: str, profile: str) -> None:
    flags = (*WORKLOAD, "--timing", profile, "--intervals", "1")
    result = passtime("simulate", "--engine", engine, *flags)
    assert result.code == 2
    assert "at least 2" in result.err
