"""``passtime demo``: from nothing to a comparison, again and again into one folder."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from passtime import cli
from passtime.calibrate.calibration import Wish, prepare
from passtime.calibrate.log import read_log
from passtime.demo import LAUNCH, Guess
from passtime.profiles.document import MeasuredPoint, load_profile

HIDDEN = ("torch", "triton", "pynvml", "matplotlib", "joblib")
"""What the core install does not bring."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def demo(folder: Path, *more: str) -> Ran:
    """The command in this process, with nothing but the core install."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in HIDDEN:
            patch.setitem(sys.modules, name, None)
        patch.setattr(cli, "COMMANDS", ("demo",))
        code = cli.main(["demo", "-o", str(folder), "--budget", "3", *more])
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("demo") / "new" / "demo"
    return folder, demo(folder)


def test_the_demo_measures_compares_and_says_how_to_go_on(finished: tuple[Path, Ran]) -> None:
    folder, ran = finished
    assert ran.code == 0, ran.err
    assert "held-out error" in ran.out
    assert "constants of profile" in ran.out
    assert "fixed:" in ran.out
    assert "queries inside" in ran.out
    assert ran.out.rstrip().endswith("--timing gpu.json")
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
    finished: tuple[Path, Ran], tmp_path: Path
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "demo")
    log = folder / "profile.log.jsonl"
    before = read_log(log)
    again = demo(folder, "--json")
    assert again.code == 0, again.err
    assert "going on" in again.err
    assert read_log(log).visits[: len(before.visits)] == before.visits
    assert again.out == (folder / "report.json").read_text()
    other = demo(folder, "--seed", "5")
    assert other.code == 0, other.err
    assert "measuring anew" in other.err
    header = read_log(log).header
    assert header.seed == 5
    measured_at = load_profile(folder / "profile.json").provenance.measured_at
    assert measured_at == header.started_at


def test_an_output_that_is_no_folder_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file")
    ran = demo(tmp_path / "demo")
    assert ran.code == 2
    assert "File exists" in ran.err


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
