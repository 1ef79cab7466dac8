"""fit, check, engine and profile, as they are typed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from passtime.profiles.document import load_profile, save_profile
from passtime.profiles.shapes import load_model
from passtime.sched.config import launch_config

Run = Callable[..., Any]

TABLE = "new_tokens,prefix_tokens,decodes,kv_tokens,latency_ms\n" + "".join(
    f"{new},{prefix},{decodes},{decodes * 500},"
    f"{6 + 0.02 * new + 1e-6 * new * prefix + 0.05 * decodes}\n"
    for new, prefix in ((0, 0), (64, 0), (256, 512), (1024, 0), (2048, 4096))
    for decodes in (0, 1, 8, 32)
    if new or decodes
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "passes.csv").write_text(TABLE)
    return tmp_path / "passes.csv"


def test_fit_writes_a_profile_and_says_how_wrong_it_is(
    passtime: Run, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    ran = passtime("fit", table, "--model", "llama-3.1-8b", "--device", "h100", "-o", out)
    assert ran.code == 0
    for words in ("in sample", "held out, 5 folds pooled", "worst regime"):
        assert words in ran.out
    assert load_profile(out).model.name == "llama-3.1-8b"


def test_fit_reports_as_json(passtime: Run, table: Path, tmp_path: Path) -> None:
    wanted = ["fit", table, "--model", "llama-3.1-8b", "--device", "h100"]
    ran = passtime(*wanted, "--model-class", "affine", "-o", tmp_path / "p.json", "--json")
    report = json.loads(ran.out)
    assert report["model_class"] == "affine"
    assert report["errors"]["in_sample"]["points"] == 19
    assert report["coefficients"]["linear_overlap"] == 1.0


def test_fit_needs_to_know_what_a_table_was_measured_on(
    passtime: Run, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    ran = passtime("fit", table, "--device", "h100", "-o", out)
    assert (ran.code, "--model is missing" in ran.err) == (2, True)
    ran = passtime("fit", table, "--model", "tiny", "--device", "abacus", "-o", out)
    assert (ran.code, "--device abacus: unknown card" in ran.err) == (2, True)
    assert not out.exists()


def test_a_profile_is_fitted_again_to_its_points(
    passtime: Run, table: Path, tmp_path: Path
) -> None:
    first, again = tmp_path / "p.json", tmp_path / "again.json"
    passtime("fit", table, "--model", "llama-3.1-8b", "--device", "h100", "-o", first)
    assert passtime("fit", first, "-o", again).code == 0
    assert again.read_bytes() == first.read_bytes()
    ran = passtime("fit", first, "--model", "tiny", "-o", again)
    assert (ran.code, "a profile says itself what was measured" in ran.err) == (2, True)
    assert again.read_bytes() == first.read_bytes()


def test_fit_of_nothing_is_one_clear_line(passtime: Run, tmp_path: Path) -> None:
    ran = passtime("fit", tmp_path / "none.jsonl", "-o", tmp_path / "p.json")
    assert ran.code == 2
    assert ran.err.strip().endswith("none.jsonl: No such file or directory")
    assert "Traceback" not in ran.err


def test_check_passes_a_sound_table(passtime: Run, table: Path) -> None:
    ran = passtime("check", table, "--model", "llama-3.1-8b", "--device", "h100")
    assert ran.code == 0
    assert "nothing impossible was found" in ran.out


def test_check_fails_an_impossible_table(passtime: Run, table: Path) -> None:
    ran = passtime("check", table, "--model", "llama-3.1-70b", "--device", "rtx3090", "--json")
    assert ran.code == 1
    document = json.loads(ran.out)
    assert not document["ok"]
    assert {f["rule"] for f in document["findings"] if f["severity"] == "fault"} >= {"bandwidth"}


def test_check_reads_profiles(passtime: Run, profile: Path) -> None:
    assert passtime("check", profile).code == 0


def test_engine_writes_a_launch_configuration_and_shows_the_sum(
    passtime: Run, profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "engine.json"
    ran = passtime("engine", "--timing", profile, "--gpu-memory-utilization", "0.5", "-o", out)
    assert ran.code == 0
    for words in ("weights", "left for KV", "num_gpu_blocks"):
        assert words in ran.out
    launch = launch_config(json.loads(out.read_text()), source="engine.json")
    timing = msgspec.to_builtins(launch.engine.timing_model)
    assert timing["provider"] == "passtime"
    assert timing["config"] == {"profile": str(profile), "composition": "calls"}


def test_the_sum_adds_up(passtime: Run, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    ran = passtime("engine", "--timing", profile, "--block-size", "32", "-o", out, "--json")
    memory = json.loads(ran.out)["memory"]
    taken = memory["weight_bytes"] + memory["activation_bytes"] + memory["reserve_bytes"]
    assert memory["usable_bytes"] == int(0.9 * memory["device_bytes"])
    assert memory["kv_bytes"] == memory["usable_bytes"] - taken
    assert memory["num_gpu_blocks"] == memory["kv_bytes"] // (memory["kv_bytes_per_token"] * 32)
    engine = json.loads(out.read_text())["engine"]
    assert (engine["num_gpu_blocks"], engine["block_size"]) == (memory["num_gpu_blocks"], 32)


def test_every_flag_of_engine_reaches_the_configuration(passtime: Run, profile: Path) -> None:
    ran = passtime(
        *("engine", "--timing", profile, "--backend", "trtllm", "--block-size", 64),
        *("--max-num-seqs", 17, "--max-num-batched-tokens", 900, "--max-model-len", 5000),
        *("--composition", "pass"),
    )
    engine = json.loads(ran.out)["engine"]
    assert engine["backend"] == "trtllm"
    assert engine["block_size"] == 64
    assert engine["max_num_seqs"] == 17
    assert engine["max_num_batched_tokens"] == 900
    assert engine["max_model_len"] == 5000
    assert engine["timing_model"]["config"]["composition"] == "pass"


def test_less_memory_means_fewer_blocks(passtime: Run, profile: Path) -> None:
    blocks = [
        json.loads(passtime("engine", "--timing", profile, *flags).out)["engine"]["num_gpu_blocks"]
        for flags in ((), ("--reserve-gib", 4), ("--gpu-memory-utilization", 0.4))
    ]
    assert blocks[0] > blocks[1] > blocks[2]


def test_a_profile_of_another_shape_is_refused(passtime: Run, profile: Path) -> None:
    ran = passtime("engine", "--timing", profile, "--model", "llama-3.1-8b")
    assert ran.code == 2
    for words in ("measured with model tiny", "head_dim 128 (measured: 64)", "kv_heads 8"):
        assert words in ran.err


def test_weights_that_do_not_fit_are_told_with_the_sum(
    passtime: Run, profile: Path, tmp_path: Path
) -> None:
    small = load_profile(profile)
    device = msgspec.structs.replace(small.device, memory_bytes=2**29)
    save_profile(msgspec.structs.replace(small, device=device), tmp_path / "small.json")
    ran = passtime("engine", "--timing", tmp_path / "small.json")
    assert ran.code == 2
    assert "no KV block fits" in ran.err
    assert "GiB of weights" in ran.err


@pytest.mark.parametrize("share", ["0", "1.5", "-1"])
def test_a_share_of_memory_outside_its_range_is_refused(
    share: str, passtime: Run, profile: Path
) -> None:
    ran = passtime("engine", "--timing", profile, f"--gpu-memory-utilization={share}")
    assert ran.code == 2
    assert "gpu_memory_utilization: expected 0 < x <= 1" in ran.err


def test_profile_show_is_readable(passtime: Run, profile: Path) -> None:
    ran = passtime("profile", "show", profile)
    assert ran.code == 0
    for words in ("imaginary", "measured box", "linear_flops_per_s", "predictions", "noise"):
        assert words in ran.out


def test_profile_show_as_json_is_the_document(passtime: Run, profile: Path) -> None:
    assert json.loads(passtime("profile", "show", profile, "--json").out)["name"] == "small-gpu"


def test_profile_list_is_a_list(passtime: Run) -> None:
    listed = json.loads(passtime("profile", "list", "--json").out)["profiles"]
    for entry in listed:
        assert set(entry) == {"name", "kind", "device", "model"}
        assert entry["model"] == load_model(entry["model"]).name
    assert passtime("profile", "list").code == 0


def test_an_unknown_profile_is_one_line_and_lists_what_ships(passtime: Run) -> None:
    ran = passtime("profile", "show", "no-such-gpu")
    assert ran.code == 2
    assert "no-such-gpu" in ran.err
    assert "shipped:" in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_public_tables_can_be_checked_by_path(passtime: Run) -> None:
    shared = Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2].parent / "shared"))
    path = shared / "data/llmservingsim/v0/A6000/Llama-3.1-8B/tp1/attention.csv.gz"
    if not path.exists():
        pytest.skip(f"public data are absent: {path}")
    ran = passtime("check", path)
    assert ran.code == 1
    assert "fault (bandwidth)" in ran.out


def test_fit_and_engine_never_replace_what_they_read(
    passtime: Run, table: Path, profile: Path
) -> None:
    for command in (
        ("fit", table, "--model", "llama-3.1-8b", "--device", "h100", "-o", table),
        ("engine", "--timing", profile, "-o", profile),
    ):
        before = command[-1].read_bytes()
        ran = passtime(*command)
        assert (ran.code, "cannot be written: it is read as well" in ran.err) == (2, True)
        assert command[-1].read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-size", "0"), "block_size: expected tokens >= 1, found 0"),
        (("--reserve-gib", "-1"), "expected GiB >= 0, found '-1'"),
        (("--reserve-gib", "nan"), "expected GiB >= 0, found 'nan'"),
        (("-o", "."), ".: cannot be written: it is a folder"),
    ],
)
def test_engine_refuses_sizes_and_places_that_are_none(
    passtime: Run, profile: Path, flags: tuple[str, ...], message: str
) -> None:
    flags = (f"{flags[0]}={flags[1]}",) if flags[0].startswith("--") else flags
    ran = passtime("engine", "--timing", profile, *flags)
    assert (ran.code, message in ran.err) == (2, True), ran.err


def test_an_empty_file_is_called_empty(passtime: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    ran = passtime("check", empty)
    assert (ran.code, ran.err) == (2, f"passtime check: {empty}: the file is empty\n")
