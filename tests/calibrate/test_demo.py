"""``passtime demo``: from nothing to a comparison, again and again into one folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from passtime import cli
from passtime.calibrate.calibration import Wish, prepare
from passtime.calibrate.log import read_log
from passtime.demo import LAUNCH, Guess
from passtime.profiles.document import MeasuredPoint, load_profile

BUDGET = ("--budget", "2")


@pytest.fixture
def demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process, with what the core install does not bring hidden."""
    for name in ("torch", "triton", "pynvml", "matplotlib", "joblib"):
        monkeypatch.setitem(sys.modules, name, None)

    def run(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "COMMANDS", ("demo",))
        code = cli.main(["demo", "-o", str(tmp_path / "demo"), *BUDGET, *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_demo_measures_compares_and_says_how_to_go_on(
    demo: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = demo()
    assert code == 0, err
    assert "held-out error" in out
    assert "constants of profile" in out
    assert "fixed:" in out
    assert "queries inside" in out
    assert out.rstrip().endswith("--timing gpu.json")
    folder = tmp_path / "demo"
    report = json.loads((folder / "report.json").read_text())
    assert {path.name for path in folder.iterdir()} == {
        "profile.json",
        "profile.log.jsonl",
        "report.json",
    }
    timings = [column["timing"] for column in report["columns"]]
    assert timings[0].endswith("profile.json")
    assert any(timing.startswith("fixed:from=") for timing in timings)
    assert timings[-1].startswith("fixed:")
    assert all(column["counts"]["completed_requests"] == 400 for column in report["columns"])


def test_a_second_run_goes_on_and_other_settings_start_anew(
    demo: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    log = tmp_path / "demo" / "profile.log.jsonl"
    _, first, _ = demo("--json")
    before = read_log(log)
    code, again, err = demo("--json")
    assert code == 0
    assert "going on" in err
    assert read_log(log).visits[: len(before.visits)] == before.visits
    assert json.loads(again)["inputs"]["engine"] == json.loads(first)["inputs"]["engine"]
    code, _, err = demo("--seed", "5")
    assert code == 0
    assert "measuring anew" in err
    assert read_log(log).header.seed == 5
    assert load_profile(tmp_path / "demo" / "profile.json").provenance.measured_at == (
        read_log(log).header.started_at
    )


def test_an_output_that_is_no_folder_is_bad_usage(
    demo: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "demo").write_text("a file")
    code, _, err = demo()
    assert code == 2
    assert "File exists" in err


def test_the_demos_engine_asks_for_what_the_plan_measures() -> None:
    box = prepare(Wish(budget_s=30.0)).plan.box
    engine = LAUNCH.engine
    assert engine.max_num_seqs == box.decode_requests
    assert engine.max_num_batched_tokens is not None
    assert engine.max_num_batched_tokens <= box.new_tokens
    assert engine.max_model_len == box.prefix_tokens == box.kv_tokens
    assert engine.block_size is not None
    assert box.pool_tokens >= 0.9 * engine.num_gpu_blocks * engine.block_size


def test_the_guessed_constants_are_two_measured_times() -> None:
    guess = Guess(
        prefill=MeasuredPoint(
            regime="prefill",
            prefill_requests=1,
            prefill_new_tokens=1000,
            prefill_pairs=500500,
            latency_ms=61.51,
        ),
        decode=MeasuredPoint(
            regime="decode",
            decode_requests=16,
            decode_kv_tokens=16000,
            decode_kv_max=1000,
            latency_ms=12.3456,
        ),
    )
    assert guess.spec == "fixed:61.51,12.35"
    assert "1000 tokens" in guess.sentence
    assert "16 requests with 1000 tokens" in guess.sentence
