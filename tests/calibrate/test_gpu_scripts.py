"""What runs on the day there is a GPU, tried on days when there is none."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numpy.random import default_rng

from passtime.calibrate.fit import fit_log
from passtime.calibrate.log import SCHEMA, Batch, Header, LogWriter, Point, Visit
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import save_profile
from passtime.profiles.shapes import load_model

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("gpu", None)
    return importlib.import_module("gpu")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, BENCHMARKS / "kernels.py"],
        [sys.executable, BENCHMARKS / "questions.py"],
        [sys.executable, BENCHMARKS / "gpu.py", "--output", "unused"],
        [ROOT / ".ci" / "gpu", "unused"],
    ],
    ids=["kernels", "questions", "gpu", "ci"],
)
def test_without_a_gpu_scripts_say_so_and_exit_with_3(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "GPU" in done.stderr or "CUDA" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# --- The steps -----------------------------------------------------------------------------------


def test_all_steps_write_no_more_than_the_files_named(
    gpu_script: ModuleType, tmp_path: Path
) -> None:
    steps = gpu_script.steps(tmp_path, model="llama-3.1-8b", budget_s=100.0)
    written = {step.output for step in steps if step.output}
    written |= {
        Path(argument).name
        for step in steps
        for argument in step.command
        if str(tmp_path) in argument
    }
    assert {*written, "report.json"} == set(gpu_script.FILES)
    assert len(gpu_script.FILES) <= 8
    usual_s = [step.limit_s / 2 if "calibrate" not in step.command else 130 for step in steps]
    assert sum(usual_s) <= gpu_script.TOTAL_S


def test_commands_of_the_steps_exist(gpu_script: ModuleType, tmp_path: Path) -> None:
    """Each command answers --help, or lists its tests: a typo would cost a day with a GPU."""
    for step in gpu_script.steps(tmp_path, model="tiny", budget_s=1.0):
        command = list(step.command)
        if "pytest" in command:
            command += ["--collect-only", "-q"]
        elif "calibrate" in command:
            command[command.index("cuda")] = "cpu"
            command += ["--dry-run"]
        else:
            command += ["--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    gpu_script: ModuleType, tmp_path: Path
) -> None:
    def step(name: str, code: str, limit_s: float = 30.0) -> object:
        return gpu_script.Step(name, [sys.executable, "-c", code], limit_s, f"{name}.txt")

    deadline = time.monotonic() + 60
    outcomes = [
        gpu_script.run_step(one, tmp_path, deadline)
        for one in (
            step("fails", "import sys; print('so far'); sys.exit(5)"),
            step("hangs", "import time; print('begun', flush=True); time.sleep(60)", 3.0),
            step("works", "print('done')"),
        )
    ]
    late = gpu_script.run_step(step("late", "print('never')"), tmp_path, time.monotonic() - 1)
    assert [outcome.code for outcome in outcomes] == [5, None, 0]
    assert late.code is None
    texts = [(tmp_path / f"{name}.txt").read_text() for name in ("fails", "hangs", "works")]
    assert texts == ["so far\n", "begun\n", "done\n"]
    report = gpu_script.summary(tmp_path, outcomes)
    assert report["steps"]["fails"]["exit_code"] == 5
    assert json.dumps(report)


# --- The kernels' report -------------------------------------------------------------------------


class SteadyGraphs:
    """Every call takes as long as the device is told."""

    def __init__(self, seconds_per_call: float) -> None:
        self.seconds_per_call = seconds_per_call

    def capture(self, run: Callable[[int], Any], repeats: int) -> int:
        for repeat in range(repeats):
            run(repeat)
        return repeats

    def seconds(self, graph: int) -> float:
        return graph * self.seconds_per_call

    def release(self, graph: int) -> None: ...


@pytest.fixture
def kernels_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("kernels", None)
    return importlib.import_module("kernels")


def test_a_kernel_is_put_beside_the_roofline_and_its_rival(
    kernels_script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from passtime.kernels.work import Work

    def fail(rotation: int) -> None:
        raise RuntimeError("no such kernel\nhere")

    def ones(rotation: int) -> torch.Tensor:
        return torch.ones(3)

    limits = kernels_script.Ceilings(bytes_per_s=1e12, flops_per_s=1e14)
    work, graphs = Work(flops=1e9, bytes=1e7), SteadyGraphs(2e-5)
    case = kernels_script.Case
    rows = [
        kernels_script.timed(graphs, one, limits)
        for one in (
            case("half right", "3", work, 2, ones, lambda _: 2 * torch.ones(3), "twice"),
            case("alone", "3", work, 2, lambda _: None),
            case("unrivalled", "3", work, 2, ones, fail, "absent"),
            case("broken", "3", work, 2, fail),
        )
    ]
    assert rows[0]["us"] == pytest.approx(20)
    assert rows[0]["share_of_roofline"] == pytest.approx(0.5)
    assert rows[0]["tflop_per_s"] == pytest.approx(50)
    assert rows[0]["gb_per_s"] == pytest.approx(500)
    assert rows[0]["error"] == pytest.approx(0.5)
    assert rows[0]["speed_to_baseline"] == pytest.approx(1)
    assert "error" not in rows[1]
    assert rows[2]["no_baseline"] == "no such kernel"
    assert rows[3]["failed"] == "no such kernel"
    document = {
        "device": "D", "copy_gb_per_s": 1.0, "product_tflop_per_s": 1.0, "torch": "2",
        "kernels": rows,
    }  # fmt: skip
    kernels_script.print_table(document)
    printed = capsys.readouterr().out
    assert "twice 20.0" in printed
    assert "no such kernel" in printed


# --- Repeatability -------------------------------------------------------------------------------


def batches(off: int = 0) -> list[Batch]:
    """Batches on a grid of powers of two; ``off`` shifts them a little inwards."""
    prompts = [Batch(prefill=((2**n - off, p),)) for n in range(5, 12) for p in (0, 256)]
    decodes = [Batch(decode=(2**n - off,) * b) for n in (7, 9, 11) for b in (1, 4, 16, 32)]
    mixed = [
        Batch(prefill=((2**n - off, 0),), decode=(2**k - off,) * 8)
        for n in (6, 8, 10)
        for k in (7, 9, 11)
    ]
    return prompts + decodes + mixed


def truth_ms(batch: Batch) -> float:
    new = sum(new for new, _ in batch.prefill) + len(batch.decode)
    pairs = sum(new * prefix + new * (new + 1) / 2 for new, prefix in batch.prefill)
    return 1.0 + 4e-3 * new + 1e-6 * pairs + 5e-6 * sum(batch.decode)


def profile_of(path: Path, *, seed: int, slower: float = 1.0, off: int = 0) -> Path:
    """A profile fitted to noisy measurements of that truth."""
    points = tuple(
        Point(
            id=number,
            regime="mixed"
            if batch.prefill and batch.decode
            else "prefill"
            if batch.prefill
            else "decode",
            batch=batch,
        )
        for number, batch in enumerate(batches(off))
    )
    header = Header(
        schema=SCHEMA,
        device=DeviceFacts(kind="cuda", name="Simulated", memory_bytes=2**34),
        model=load_model("tiny"),
        software={},
        policy={"attention": "causal", "clock": "cuda_events", "dtype": "bfloat16"},
        plan=points,
        seed=seed,
        started_at="2026-01-01T00:00:00+00:00",
    )
    rng = default_rng(seed)
    log = path.with_suffix(".log.jsonl")
    with LogWriter.create(log, header) as writer:
        for point in points:
            usual = slower * truth_ms(point.batch) * math.exp(0.01 * rng.standard_normal())
            samples = tuple(usual * math.exp(0.003 * rng.standard_normal()) for _ in range(9))
            writer.append(Visit(point=point.id, round=0, samples_ms=samples, stop="converged"))
    save_profile(fit_log(log), path)
    return path


def test_a_repeat_lies_inside_the_intervals_and_a_slower_device_does_not(
    gpu_script: ModuleType, tmp_path: Path
) -> None:
    first = profile_of(tmp_path / "first.json", seed=0)
    same = gpu_script.repeatability(first, profile_of(tmp_path / "same.json", seed=1, off=9))
    slower = profile_of(tmp_path / "slower.json", seed=2, slower=1.5)
    other = gpu_script.repeatability(first, slower)
    assert same["points"] == len(batches())
    assert same["inside_percent"] >= 60
    assert same["mape_percent"] < 5
    assert other["inside_percent"] < 20
    assert other["mape_percent"] > 25
