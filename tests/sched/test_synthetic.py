"""Synthetic workloads and the length tables behind them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passtime.errors import TraceError
from passtime.sched.workload.formats import load_trace
from passtime.sched.workload.lengths import RANKS, TRACES, shipped_lengths, tables_of
from passtime.sched.workload.synthetic import BLOCK_SIZE, SyntheticLoad, synthetic

TRACE_FOLDER = (
    Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2] / ".." / "shared"))
    / "data"
    / "traces"
)

GOLDEN_INPUTS = [4075, 382, 1246, 1021]
GOLDEN_OUTPUTS = [408, 144, 401, 398]
GOLDEN_ARRIVALS = [0.0, 80.310441, 118.510612, 154.928212]


def load(**changes: Any) -> SyntheticLoad:
    settings: dict[str, Any] = {"kind": "conversation", "num_prompts": 2000, "request_rate": 10.0}
    return SyntheticLoad(**{**settings, **changes})


def constant(**changes: Any) -> SyntheticLoad:
    return load(**{"kind": "constant", "input_len": 160, "output_len": 7, **changes})


def test_equal_descriptions_give_equal_workloads() -> None:
    assert synthetic(load(seed=3)) == synthetic(load(seed=3))
    assert synthetic(load(seed=3)) != synthetic(load(seed=4))


def test_a_known_seed_gives_known_numbers() -> None:
    workload = synthetic(load(num_prompts=4))
    assert list(workload.input_tokens) == GOLDEN_INPUTS
    assert list(workload.output_tokens) == GOLDEN_OUTPUTS
    assert [round(time or 0.0, 6) for time in workload.timestamp_ms] == GOLDEN_ARRIVALS


def test_another_rate_leaves_lengths_as_they_are() -> None:
    slow, fast = synthetic(load()), synthetic(load(request_rate=99.0))
    assert slow.input_tokens == fast.input_tokens
    assert slow.output_tokens == fast.output_tokens
    assert slow.timestamp_ms != fast.timestamp_ms


def test_an_infinite_rate_is_one_burst() -> None:
    assert set(synthetic(load(request_rate=math.inf)).timestamp_ms) == {0.0}


def test_constant_intervals_are_all_equal() -> None:
    arrivals = synthetic(load(request_rate=8.0, constant_intervals=True)).timestamp_ms
    assert list(arrivals[:4]) == [0.0, 125.0, 250.0, 375.0]


def test_constant_has_the_lengths_that_were_asked_for() -> None:
    workload = synthetic(constant(num_prompts=3))
    assert workload.input_tokens == [160] * 3
    assert workload.output_tokens == [7] * 3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    arrivals = synthetic(load(num_prompts=40_000, burstiness=burstiness)).timestamp_ms
    gaps = np.diff(np.array(arrivals, dtype=float))
    assert gaps.mean() == pytest.approx(100.0, rel=0.03)
    variation = gaps.std() / gaps.mean()  # of a gamma distribution: 1/√shape
    assert variation == pytest.approx(1.0 / math.sqrt(burstiness), rel=0.04)


def test_without_sharing_there_is_no_content() -> None:
    assert synthetic(load()).block_ids is None


def test_prompts_share_the_head_of_their_group_and_nothing_else() -> None:
    workload = synthetic(constant(shared_prefix_ratio=0.5, num_prefix_groups=3, num_prompts=300))
    assert workload.block_ids is not None
    assert all(len(blocks) == 160 // BLOCK_SIZE for blocks in workload.block_ids)
    heads = {tuple(blocks[:5]) for blocks in workload.block_ids}
    assert len(heads) == 3
    tails = [block for blocks in workload.block_ids for block in blocks[5:]]
    assert len(tails) == len(set(tails)) == 300 * 5
    assert not set(tails) & {block for head in heads for block in head}


def test_a_share_of_one_makes_a_groups_prompts_equal() -> None:
    workload = synthetic(constant(shared_prefix_ratio=1.0, num_prompts=5))
    assert workload.block_ids is not None
    assert len({tuple(blocks) for blocks in workload.block_ids}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be positive, found 0"),
        ({"request_rate": 0.0}, "request_rate must be positive"),
        ({"request_rate": math.nan}, "request_rate must be positive"),
        ({"burstiness": 0.0}, "burstiness must be finite and positive"),
        ({"burstiness": 2.0, "constant_intervals": True}, "give one of the two"),
        ({"burstiness": 2.0, "request_rate": math.inf}, "need a finite request_rate"),
        ({"shared_prefix_ratio": 1.5}, "shared_prefix_ratio must be in 0 … 1"),
        ({"num_prefix_groups": 2}, "needs a shared_prefix_ratio"),
        ({"num_prefix_groups": 0}, "num_prefix_groups must be positive"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"kind": "chat"}, "expected one of conversation, code, constant"),
        ({"input_len": 5}, "conversation draws its lengths"),
        ({"kind": "constant", "input_len": 5}, "needs input_len and output_len"),
        ({"kind": "constant", "input_len": 0, "output_len": 1}, "input_len must be positive"),
        ({"kind": "constant", "input_len": 1, "output_len": -1}, "output_len must be >= 0"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(**changes)


# --- Length tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(TRACES))
def test_shipped_tables_are_distributions(kind: str) -> None:
    table = shipped_lengths()[kind]
    for quantiles in (table.input_tokens, table.output_tokens):
        assert len(quantiles) == len(RANKS)
        assert list(quantiles) == sorted(quantiles)
        assert quantiles[0] >= 1
    assert "CC-BY" in table.source


def test_shipped_tables_are_those_of_the_traces() -> None:
    if not TRACE_FOLDER.is_dir():
        pytest.skip("no trace folder under PASSTIME_SHARED or ../shared")
    assert tables_of(TRACE_FOLDER) == shipped_lengths()


@pytest.mark.parametrize("kind", list(TRACES))
def test_samples_look_like_the_trace(kind: str) -> None:
    if not TRACE_FOLDER.is_dir():
        pytest.skip("no trace folder under PASSTIME_SHARED or ../shared")
    trace = load_trace(TRACE_FOLDER / TRACES[kind]).workload
    sample = synthetic(load(kind=kind, num_prompts=20_000))
    for real, drawn in (
        (trace.input_tokens, sample.input_tokens),
        (trace.output_tokens, sample.output_tokens),
    ):
        assert np.mean(drawn) == pytest.approx(np.mean(real), rel=0.03)
        assert max(drawn) <= max(real)
        assert _largest_distance(np.array(real), np.array(drawn)) < 0.02


def _largest_distance(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> float:
    """Kolmogorov-Smirnov: how far the two distribution functions are apart at most."""
    at = np.union1d(first, second)
    ranks = [
        np.searchsorted(np.sort(values), at, side="right") / len(values)
        for values in (first, second)
    ]
    return float(np.abs(ranks[0] - ranks[1]).max())
