"""Importers: formats told apart by their header, bad cells gathered with line and column."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from passtime.calibrate.importers import llmservingsim, read_table
from passtime.calibrate.importers.places import device_named, fastest_card, model_named
from passtime.calibrate.points import columns
from passtime.errors import DocumentError
from passtime.profiles.document import MeasuredPoint

SHARED = Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2].parent / "shared"))

PASSES = """new_tokens,prefix_tokens,decodes,kv_tokens,latency_ms
512,0,0,0,11.5
0,0,8,4096,6.25
256,1024,4,2000,9
"""


def test_a_pass_log_in_csv(tmp_path: Path) -> None:
    (tmp_path / "passes.csv").write_text(PASSES)
    prompt, decode, both = read_table(tmp_path / "passes.csv").points
    assert prompt == MeasuredPoint(
        regime="prefill",
        prefill_requests=1,
        prefill_new_tokens=512,
        prefill_pairs=512 * 513 // 2,
        latency_ms=11.5,
    )
    assert (decode.regime, decode.decode_kv_max, decode.latency_ms) == ("decode", 512, 6.25)
    assert both.regime == "mixed"
    assert both.prefill_pairs == 256 * 1024 + 256 * 257 // 2


def test_json_lines_and_gzip_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "passes.csv").write_text(PASSES)
    header, *lines = (line.split(",") for line in PASSES.split())
    objects = [dict(zip(header, map(float, line), strict=True)) for line in lines]
    text = "\n".join(map(json.dumps, objects))
    (tmp_path / "passes.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert read_table(tmp_path / "passes.jsonl.gz").points == (
        read_table(tmp_path / "passes.csv").points
    )


def test_several_prompts_share_the_tokens_of_a_pass(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompts,new_tokens,prefix_tokens,latency_ms\n4,400,800,3\n")
    (point,) = read_table(tmp_path / "p.csv").points
    assert point.prefill_pairs == 4 * (100 * 200 + 100 * 101 // 2)


def test_every_bad_cell_is_named(tmp_path: Path) -> None:
    rows = ["abc,0,0,0,1", "16,0,0,0,0", "16,0,0,0,-3", "1.5,0,0,0,1", "0,0,0,0,1", "16,0,9,3,1"]
    (tmp_path / "p.csv").write_text(PASSES.partition("\n")[0] + "\n" + "\n".join(rows) + "\n")
    with pytest.raises(DocumentError) as refused:
        read_table(tmp_path / "p.csv")
    message = str(refused.value)
    for line, part in (
        (2, "new_tokens: expected a number, found 'abc'"),
        (3, "latency_ms: expected a time > 0, found 0.0"),
        (4, "latency_ms: expected a time > 0, found -3.0"),
        (5, "new_tokens: expected a whole number >= 0, found 1.5"),
        (6, "an empty pass"),
        (7, "kv_tokens: expected at least decodes 9"),
    ):
        assert f"p.csv:{line}: {part}" in message


def test_only_the_first_twenty_faults_are_shown(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("new_tokens,latency_ms\n" + "x,1\n" * 50)
    with pytest.raises(DocumentError) as refused:
        read_table(tmp_path / "p.csv")
    assert str(refused.value).splitlines()[-1].startswith("and ")
    assert len(str(refused.value).splitlines()) == 21


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("decodes,latency_ms\n4,1\n")
    with pytest.raises(DocumentError, match=r"p\.csv:2: kv_tokens: expected at least decodes 4"):
        read_table(tmp_path / "p.csv")


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "", "{\n", "[1]\n"])
def test_an_unknown_format_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DocumentError, match=r"t\.csv"):
        read_table(tmp_path / "t.csv")


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(PASSES.encode() * 100)
    (tmp_path / "t.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DocumentError, match="cannot be read as text"):
        read_table(tmp_path / "t.csv.gz")


@pytest.mark.parametrize("name", ["h100", "H100_SXM", "h100_sxm", "NVIDIA H100", "H100 SXM5"])
def test_cards_are_known_by_many_spellings(name: str) -> None:
    card = device_named(name)
    assert card is not None
    assert card.peak_bytes_per_s == pytest.approx(3.35e12, rel=0.01)


def test_an_unknown_card_is_none_and_none_beats_the_fastest() -> None:
    assert device_named("no-such-card") is None
    assert (fastest_card().peak_flops or 0) >= 2e15


def test_models_are_known_by_many_spellings() -> None:
    for name in ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"):
        model = model_named(name)
        assert model is not None
        assert model.name == "llama-3.1-8b"
    assert model_named("phi-2") is None


# --- Public tables ------------------------------------------------------------------------------


def shared(path: str) -> Path:
    if not (SHARED / "data" / path).exists():
        pytest.skip(f"public data are absent: {SHARED / 'data' / path}")
    return SHARED / "data" / path


def test_operator_sums_know_their_model_and_parallelism() -> None:
    table = read_table(shared("aic/opsum/opsum__llama-3.1-70b__h200_sxm__vllm__tp4.csv.gz"))
    assert len(table.points) == 3000
    assert table.model is not None
    assert (table.model.tensor_parallel, table.model.kv_heads) == (4, 2)
    assert table.device is not None
    assert table.device.name == "NVIDIA H200"


def test_vidur_tables_carry_their_geometry_and_spread() -> None:
    name = "vidur/compute/a100/Llama-2-70b-hf/attention_tp2_kineto_2024-05.csv.gz"
    table = read_table(shared(name))
    assert table.model is not None
    assert (table.model.heads, table.model.kv_heads, table.model.head_dim) == (32, 4, 128)
    assert table.engine.timed_part == "attention"
    assert {point.regime for point in table.points} == {"prefill", "decode"}
    assert all(point.spread_percent is not None for point in table.points)


def test_whole_passes_are_composed_of_layers_and_a_tail() -> None:
    folder = shared("llmservingsim/perf/RTX4090/Llama-3.1-8B/tp1")
    table = llmservingsim.whole_passes(folder)
    single = read_table(folder / "attention.csv.gz")
    attention = dict(zip(single.lines, single.points, strict=True))
    for line, point in list(zip(table.lines, table.points, strict=True))[::500]:
        assert point.latency_ms > 32 * attention[line].latency_ms
    smallest = min(point.latency_ms for point in table.points)
    assert smallest == pytest.approx(16.64, rel=0.01)


def test_mixtures_of_lengths_are_one_call_each_not_three() -> None:
    folder = shared("llmservingsim/perf/RTXPRO6000/Llama-3.1-8B/tp1")
    table = llmservingsim.whole_passes(folder, unequal=True)
    passes = columns(table.points)
    uneven = passes.decode_requests * passes.decode_kv_max > passes.decode_kv_tokens + 1
    assert uneven.sum() > 10_000
    times = np.array([point.latency_ms for point in table.points])
    assert times[uneven].max() < 1.2 * times[~uneven].max()
