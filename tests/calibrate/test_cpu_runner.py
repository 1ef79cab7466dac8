"""The measuring process: one thread, its own process, gone when its parent is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from passtime.calibrate.log import Batch
from passtime.calibrate.runners import OutOfDeviceMemory, RunnerFailed, cpu
from passtime.calibrate.runners.cpu import CpuRunner, computed_model, memory_bytes
from passtime.calibrate.runners.cpu_worker import segments_of
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape

FACTS = DeviceFacts(kind="cpu", name="A CPU", memory_bytes=2**32)
MODEL = ModelShape(
    name="minute",
    layers=1,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=128,
)
SMALL = Batch(decode=(32,))
LARGE = Batch(prefill=((1024, 0),))


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, within_s: float = 10.0) -> bool:
    ends = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture(scope="module")
def shared() -> Iterator[CpuRunner]:
    runner = CpuRunner(facts=FACTS, model=MODEL, kv_tokens=2048)
    yield runner
    runner.close()


@pytest.fixture
def runner() -> Iterator[CpuRunner]:
    opened = CpuRunner(facts=FACTS, model=MODEL, kv_tokens=256)
    yield opened
    opened.close()


def test_a_larger_batch_takes_longer_and_so_do_repetitions(shared: CpuRunner) -> None:
    def best(batch: Batch, inner: int = 1) -> float:
        return min(shared.replay(shared.prepare(batch), inner) for _ in range(7))

    assert 0 < best(SMALL) < best(LARGE)
    assert best(SMALL) < best(SMALL, inner=8)


def test_one_thread_does_all_the_work(shared: CpuRunner) -> None:
    assert shared.limited, shared.process_per_thread
    assert shared.telemetry().flags == ()
    status = Path(f"/proc/{shared.pid}/status").read_text()
    assert "Threads:\t1\n" in status


def test_the_thread_limits_are_set_and_the_rest_is_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    runner = CpuRunner(facts=FACTS, model=MODEL, kv_tokens=64)
    try:
        content = Path(f"/proc/{runner.pid}/environ").read_bytes().split(b"\0")
        assert {f"{name}=1".encode() for name in cpu.ONE_THREAD} <= set(content)
        assert runner.software["blas_core"] == "Haswell"
    finally:
        runner.close()


def test_more_threads_than_one_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MAX_PROCESS_PER_THREAD", 0.5)
    runner = CpuRunner(facts=FACTS, model=MODEL, kv_tokens=64)
    try:
        assert not runner.limited
        assert runner.telemetry().flags == ("threads",)
    finally:
        runner.close()


def test_the_model_is_said_to_be_what_is_computed() -> None:
    half = msgspec.structs.replace(MODEL, dtype="bfloat16", kv_dtype="float8_e4m3")
    assert computed_model(half).kv_bytes_per_token == 2 * 1 * 2 * 16 * 4


def test_memory_grows_with_the_cache_and_holds_the_weights() -> None:
    weights = computed_model(MODEL).weight_bytes
    small, large = memory_bytes(MODEL, SMALL), memory_bytes(MODEL, Batch(decode=(4096,) * 8))
    assert weights < small < large
    assert large - small >= 8 * 4000 * computed_model(MODEL).kv_bytes_per_token


def test_a_batch_beyond_the_pool_is_out_of_memory_and_harmless(runner: CpuRunner) -> None:
    with pytest.raises(OutOfDeviceMemory, match="256"):
        runner.replay(Batch(decode=(255, 255)), 1)
    assert runner.replay(SMALL, 1) > 0


def test_requests_lie_side_by_side_in_the_pool() -> None:
    segments = segments_of(Batch(prefill=((10, 5), (3, 0)), decode=(7, 2)))
    assert [(s.start, s.prefix, s.new) for s in segments] == [
        (0, 5, 10),
        (15, 0, 3),
        (18, 7, 1),
        (26, 2, 1),
    ]


def test_a_killed_process_is_reported_with_its_signal(runner: CpuRunner) -> None:
    os.kill(runner.pid, signal.SIGKILL)
    with pytest.raises(RunnerFailed, match="ended by signal 9"):
        runner.replay(SMALL, 1)


def test_a_process_killed_in_mid_pass_is_reported(runner: CpuRunner) -> None:
    killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {runner.pid}"])
    with pytest.raises(RunnerFailed, match="ended by signal 9"):
        runner.replay(SMALL, 10**7)
    killer.wait()


def test_a_process_that_hangs_is_given_up(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "ANSWER_TIMEOUT_S", 0.2)
    os.kill(runner.pid, signal.SIGSTOP)
    with pytest.raises(RunnerFailed, match="no answer"):
        runner.replay(SMALL, 1)
    assert gone(runner.pid)


def test_ctrl_c_does_not_reach_the_measuring_process(runner: CpuRunner) -> None:
    os.kill(runner.pid, signal.SIGINT)
    assert runner.replay(SMALL, 1) > 0


def test_ctrl_c_at_a_terminal_spares_it_even_before_it_has_begun(runner: CpuRunner) -> None:
    """The terminal tells the foreground's whole group: the process is in another one."""
    assert os.getpgid(runner.pid) != os.getpgid(0)


def test_closing_ends_the_process_and_may_be_repeated() -> None:
    runner = CpuRunner(facts=FACTS, model=MODEL, kv_tokens=64)
    runner.close()
    assert gone(runner.pid)
    runner.close()


def test_a_parent_that_is_killed_leaves_no_process_behind() -> None:
    script = f"""
import msgspec, sys
from passtime.calibrate.runners.cpu import CpuRunner
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape
model = msgspec.json.decode({msgspec.json.encode(MODEL)!r}, type=ModelShape)
facts = DeviceFacts(kind="cpu", name="x", memory_bytes=2**32)
runner = CpuRunner(facts=facts, model=model, kv_tokens=64)
print(runner.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    assert gone(child)
