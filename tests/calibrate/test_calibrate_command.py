"""``passtime calibrate`` and ``passtime devices`` as they are typed, killed and typed again."""

import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from passtime import cli
from passtime.calibrate import calibration
from passtime.calibrate.log import Log, read_log
from passtime.errors import DocumentError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import load_profile

MODEL = {
    "name": "minute",
    "layers": 1,
    "hidden_size": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "vocab_size": 128,
    "dtype": "float32",
}
ENDS_WITHIN_S = 60.0
BUDGET_S = "2"
LONGEST_LIFE_S = 2.5  # of a start that is killed: in some, nothing is measured yet


class Typed:
    """One ``passtime calibrate`` in a folder, as a process of its own or in this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "minute.json"
        self.model.write_text(json.dumps(MODEL))
        self.profile = folder / "cpu.json"
        self.log_path = folder / "cpu.log.jsonl"

    def arguments(self, *more: str, budget: str = BUDGET_S) -> list[str]:
        named = ["--model", str(self.model), "-o", str(self.profile), "--budget", budget]
        return ["calibrate", *named, "--json", *more]

    def start(self, *more: str, budget: str = BUDGET_S) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "passtime", *self.arguments(*more, budget=budget)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, *more: str, budget: str = BUDGET_S) -> dict[str, object]:
        process = self.start(*more, budget=budget)
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
        assert process.returncode == 0, err
        result: dict[str, object] = json.loads(out)
        return result

    def log(self) -> Log:
        return read_log(self.log_path)

    def visits(self) -> int:
        """Complete lines so far; 0 before the header."""
        try:
            return len(self.log().visits)
        except DocumentError:
            return 0


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path)


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished calibration; result.json is what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "result.json").write_text(json.dumps(Typed(folder).finish()))
    return folder


@pytest.fixture
def finished(finished_folder: Path, tmp_path: Path) -> Typed:
    """A copy of it, to go on with."""
    shutil.copytree(finished_folder, tmp_path, dirs_exist_ok=True)
    return Typed(tmp_path)


@pytest.fixture
def here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "COMMANDS", (argv[0],))
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + ENDS_WITHIN_S
    while not condition():
        assert time.monotonic() < ends, "nothing happened"
        time.sleep(0.01)


def test_a_calibration_measures_every_point_and_writes_a_profile(finished: Typed) -> None:
    result = json.loads((finished.folder / "result.json").read_text())
    profile = load_profile(finished.profile)
    log = finished.log()
    assert profile.device_kind == "cpu"
    assert len(profile.points) == len(log.header.plan)
    assert result["visits"] == len(log.visits)
    assert result["unmeasured_points"] == []
    assert result["restarts"] == 0
    assert log.header.policy["attention"] == "causal"
    assert log.header.policy["clock"] == "thread_cpu"
    assert log.header.model.dtype == "float32"
    assert set(log.header.software) >= {"python", "numpy", "blas", "passtime"}
    longest_ms = max(ms for visit in log.visits for ms in visit.samples_ms)
    assert log.elapsed_s <= float(BUDGET_S) + 0.1 + 10 * longest_ms / 1e3


def killed(typed: Typed, *, visits: int) -> None:
    """Start, kill -9 once so many visits are there, and see that the measuring process goes."""
    process = typed.start()
    wait_for(lambda: typed.visits() >= visits or process.poll() is not None)
    measuring = children(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in measuring))


def test_killed_at_random_moments_nothing_is_lost_and_nothing_repeated(typed: Typed) -> None:
    rng = random.Random(11)
    before: tuple[object, ...] = ()
    for wanted in (0, rng.randrange(1, 15), rng.randrange(15, 50), rng.randrange(50, 70)):
        killed(typed, visits=wanted)
        if typed.visits():
            assert typed.log().visits[: len(before)] == before
            before = typed.log().visits
    assert len(before) >= 50
    with typed.log_path.open("ab") as file:
        file.write(b'{"line":"visit","point":3,"round":7,"samp')  # a kill in mid-write
    ends_well(typed, before)


def all_gone(pids: list[int]) -> bool:
    """Whether none of the processes exists any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_many_kills_at_random_moments_lose_and_repeat_nothing(typed: Typed) -> None:
    """``PASSTIME_KILLS`` kills (8 if unset) of as many starts of one calibration, -9 each."""
    kills = int(os.environ.get("PASSTIME_KILLS", "8"))
    budget = f"{4 + kills}"  # more than so many starts use up before they are killed
    rng = random.Random(50)
    before: tuple[object, ...] = ()
    for _ in range(kills):
        process = typed.start(budget=budget)
        time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
        measuring = children(process.pid)
        acknowledged = complete_lines(typed.log_path)
        assert process.poll() is None, "it ended before it was killed: nothing was tried"
        process.kill()
        process.communicate()
        wait_for(partial(all_gone, measuring))
        there = complete_lines(typed.log_path)
        assert there[: len(acknowledged)] == acknowledged
        if there:
            assert typed.log().visits[: len(before)] == before
            before = typed.log().visits
    assert before, "no start lived long enough to measure anything"
    ends_well(typed, before, budget=budget)


def complete_lines(path: Path) -> list[bytes]:
    """What a log's writer has acknowledged."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def ends_well(typed: Typed, before: tuple[object, ...], *, budget: str = BUDGET_S) -> None:
    """Finish the calibration, and see that it went on from ``before`` and repeated nothing."""
    result = typed.finish(budget=budget)
    assert result["resumed"] is True
    log = typed.log()
    assert log.torn_bytes == 0
    assert log.visits[: len(before)] == before
    keys = [visit.key for visit in log.visits]
    assert len(keys) == len(set(keys))
    lines = typed.log_path.read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert len(load_profile(typed.profile).points) == len(log.samples_ms())


def test_ctrl_c_keeps_what_was_measured(typed: Typed) -> None:
    process = typed.start(budget="30")
    wait_for(lambda: typed.visits() >= 3)
    measuring = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert str(typed.log_path) in err
    assert out == ""
    assert not typed.profile.exists()
    assert typed.visits() >= 3
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in measuring))


def test_a_measuring_process_that_is_killed_is_started_again(typed: Typed) -> None:
    process = typed.start()
    wait_for(lambda: typed.visits() >= 3)
    (measuring,) = children(process.pid)
    os.kill(measuring, signal.SIGKILL)
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0, err
    assert json.loads(out)["restarts"] == 1
    assert "ended by signal 9: starting again" in err
    (failed,) = [visit for visit in typed.log().visits if visit.stop == "failed"]
    assert "ended by signal 9" in str(failed.error)
    assert failed.point in typed.log().samples_ms()


def test_a_finished_calibration_repeated_changes_nothing(finished: Typed) -> None:
    first = json.loads((finished.folder / "result.json").read_text())
    again = finished.finish()
    assert again["resumed"] is True
    assert again["errors"] == first["errors"]
    assert int(str(again["visits"])) - first["visits"] <= 1


def test_two_at_once_do_not_share_a_log(typed: Typed) -> None:
    process = typed.start(budget="30")
    wait_for(lambda: typed.visits() >= 1)
    second = typed.start(budget="30")
    _, err = second.communicate(timeout=ENDS_WITHIN_S)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=ENDS_WITHIN_S)
    assert second.returncode == 2
    assert "another measurement is writing" in err


def test_a_log_of_other_settings_is_not_continued(
    finished: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    before = finished.log_path.read_bytes()
    code, _, err = here(*finished.arguments("--seed", "9"))
    assert code == 2
    assert "seed: 0 there, 9 now" in err
    assert "--log" in err
    assert finished.log_path.read_bytes() == before


def test_another_devices_profile_is_not_overwritten(
    finished: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    """P32."""
    before = finished.profile.read_bytes()
    finished.log_path.unlink()
    code, _, err = here(*finished.arguments("--label", "another machine"))
    assert code == 2
    assert "holds the profile of" in err
    assert finished.profile.read_bytes() == before


def test_profile_and_log_are_two_files(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = here(*typed.arguments("--log", str(typed.profile)))
    assert code == 2
    assert f"{typed.profile}: cannot be written: two outputs have this name" in err
    assert not typed.profile.exists()


def test_a_log_has_to_be_a_regular_file(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = here(*typed.arguments("--log", "/dev/full"))
    assert code == 2
    assert err == "passtime calibrate: /dev/full: a measurement log has to be a regular file\n"
    assert out == ""


def test_a_folder_that_does_not_exist_is_named(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    nowhere = typed.folder / "nowhere" / "log.jsonl"
    code, _, err = here(*typed.arguments("--log", str(nowhere)))
    assert code == 2
    assert f"{nowhere}: cannot be written: there is no folder {nowhere.parent}" in err
    code, _, err = here(*typed.arguments("-o", str(nowhere), "--log", str(typed.log_path)))
    assert code == 2
    assert "there is no folder" in err
    assert not typed.log_path.exists()


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = here("calibrate", "--dry-run", "--budget", "30")
    assert code == 0
    assert "held out" in out
    assert "expected, ms" in out
    assert "memory, MiB" in out
    code, out, _ = here(*typed.arguments("--dry-run"))
    document = json.loads(out)
    assert code == 0
    assert {"expected_ms", "memory_bytes", "batch", "regime"} <= set(document["points"][0])
    assert document["expected_round_s"] > 0
    assert not typed.profile.exists()
    assert not typed.log_path.exists()


@pytest.mark.parametrize(("budget", "kept"), [("300", "75"), ("60", "15"), ("59", None)])
def test_a_dry_run_says_how_much_of_a_gpus_budget_is_kept_for_points_to_be_chosen(
    budget: str,
    kept: str | None,
    here: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = DeviceFacts(
        kind="cuda",
        name="A GPU",
        memory_bytes=80 * 2**30,
        peak_flops=1e15,
        peak_bytes_per_s=3.3e12,
    )
    monkeypatch.setattr(calibration, "device", lambda name, label: gpu)
    asked = ("calibrate", "--device", "cuda", "--budget", budget, "--dry-run")
    code, out, _ = here(*asked)
    assert code == 0
    sentence = " ".join(out.split())
    assert (f"{kept} s are kept for points chosen by what these show" in sentence) is bool(kept)
    _, out, _ = here(*asked, "--json")
    assert json.loads(out)["kept_for_added_points_s"] == float(kept or 0)


def test_a_dry_run_shows_the_points_that_are_then_measured(
    finished: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    _, out, _ = here(*finished.arguments("--dry-run"))
    planned = [point["batch"] for point in json.loads(out)["points"]]
    measured = [
        {"prefill": [list(chunk) for chunk in p.batch.prefill], "decode": list(p.batch.decode)}
        for p in finished.log().header.plan
    ]
    assert planned == measured


def test_a_budget_too_small_for_anything_is_said(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = here(*typed.arguments(budget="1e-6"))
    assert code == 3
    assert "larger --budget" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "--budget: wanted seconds > 0, found 0"),
        (("--budget", "nan"), "--budget"),
        (("--budget", "inf"), "--budget"),
        (("--seed", "-1"), "--seed"),
        (("--device", "tpu"), "--device tpu: wanted cpu, cuda or cuda:INDEX"),
        (("--model", "no-such-model"), "no shipped shape of that name"),
        ((), "-o PROFILE.json is missing"),
    ],
)
def test_bad_usage_is_one_sentence(
    arguments: tuple[str, ...], message: str, here: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = here("calibrate", *arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_a_gpu_that_is_not_there_ends_with_3_and_says_what_is_missing(
    here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = here("calibrate", "--device", "cuda", "-o", "x.json")
    assert code == 3
    assert "nvidia-ml-py is not installed; torch is not installed" in err


def test_devices_are_listed_for_people_and_for_programs(
    here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = here("devices")
    assert code == 0
    assert "cpu" in out
    assert "memory, GiB" in out
    assert "no NVIDIA GPU" in err
    code, out, _ = here("devices", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["devices"][0]["device"] == "cpu"
    assert "not installed" in document["no_gpu_because"]


BAR = """
from passtime.calibrate.progress import progress_bar
with progress_bar("A CPU") as tell:
    tell(0.5, "round 1")
"""


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    piped = subprocess.run([sys.executable, "-P", "-c", BAR], capture_output=True, check=True)
    assert (piped.stdout, piped.stderr) == (b"", b"")
    terminal, stderr = pty.openpty()
    drawn = subprocess.run(
        [sys.executable, "-P", "-c", BAR], stdout=subprocess.PIPE, stderr=stderr, check=True
    )
    os.close(stderr)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert drawn.stdout == b""
    assert "A CPU" in shown
    assert "50 %" in shown
    assert "round 1" in shown


def test_a_place_that_is_no_file_is_refused_before_measuring(
    typed: Typed, here: Callable[..., tuple[int, str, str]]
) -> None:
    pipe = typed.folder / "pipe"
    os.mkfifo(pipe)
    for place, message in (
        (".", ".: cannot be written: it is a folder"),
        (str(pipe), f"{pipe}: is no regular file"),
        (str(typed.model), f"{typed.model}: cannot be written: it is read as well"),
    ):
        code, _, err = here(*typed.arguments("-o", place))
        assert (code, message in err) == (2, True), err
    assert not typed.log_path.exists()
