"""The GPU runner on a GPU: graphs, events, NVML, linearity, memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from passtime.calibrate.cuda_device import find_device
from passtime.calibrate.devices import find_devices
from passtime.calibrate.log import Batch
from passtime.calibrate.nvml import Watch
from passtime.calibrate.runners import OutOfDeviceMemory
from passtime.calibrate.runners.gpu import CLOCK, GpuRunner
from passtime.calibrate.selfchecks import linearity_at
from passtime.profiles.shapes import ModelShape

torch = pytest.importorskip("torch", reason="a GPU is driven by torch")

pytestmark = pytest.mark.gpu

MODEL = ModelShape(
    name="a billion",
    layers=16,
    hidden_size=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=32000,
)
PREFILL = Batch(prefill=((1024, 0), (300, 500)))
DECODE = Batch(decode=(1024,) * 16)
MIXED = Batch(prefill=((256, 256),), decode=(1024,) * 16)


@pytest.fixture(scope="module")
def runner() -> Iterator[GpuRunner]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from passtime.calibrate.graphs import CudaGraphs

    facts = find_devices().gpus[0]
    device, uuid = find_device(facts)
    runner = GpuRunner(
        facts=facts,
        model=MODEL,
        batches=[PREFILL, DECODE, MIXED],
        graphs=CudaGraphs(device),
        watch=Watch(uuid),
    )
    yield runner
    runner.close()


def pass_s(runner: GpuRunner, batch: Batch, inner: int = 1) -> float:
    work = runner.prepare(batch)
    try:
        for _ in range(5):
            runner.replay(work, inner)
        return median(runner.replay(work, inner) for _ in range(15))
    finally:
        runner.release(work)


@pytest.mark.parametrize("batch", [PREFILL, DECODE, MIXED], ids=["prefill", "decode", "mixed"])
def test_repeated_passes_take_that_many_times_as_long(runner: GpuRunner, batch: Batch) -> None:
    assert pass_s(runner, batch, 4) == pytest.approx(4 * pass_s(runner, batch), rel=0.1)


def test_a_longer_pass_takes_longer_and_nothing_beats_the_datasheet(runner: GpuRunner) -> None:
    from passtime.kernels.work import pass_work

    short, long = Batch(prefill=((256, 0),)), Batch(prefill=((1024, 0),))
    short_s, long_s = pass_s(runner, short), pass_s(runner, long)
    assert short_s < long_s
    peak = runner.facts.peak_flops
    if peak is not None:
        assert pass_work(runner.model, long).flops / long_s < peak


def test_a_pass_of_nothing_takes_microseconds(runner: GpuRunner) -> None:
    empty = runner.empty()
    assert median(runner.replay(empty, 1) for _ in range(15)) < 50e-6
    assert pass_s(runner, DECODE) > 5 * runner.replay(empty, 1)


def test_a_pass_is_linear_in_its_layers(runner: GpuRunner) -> None:
    for name, found in linearity_at(runner, {"prefill": PREFILL, "decode": DECODE}):
        assert found["curvature"] < 0.03, (name, found)


def test_a_batch_too_large_is_refused_and_the_next_one_runs(runner: GpuRunner) -> None:
    rows = torch.cuda.get_device_properties(0).total_memory // (2 * 2 * MODEL.ffn_size)
    with pytest.raises(OutOfDeviceMemory):
        runner.graphs.capture(lambda _: torch.empty(rows, 8 * MODEL.ffn_size, device="cuda"), 1)
    assert pass_s(runner, DECODE) > 0


def test_works_live_side_by_side(runner: GpuRunner) -> None:
    reference = runner.prepare(PREFILL)
    before = median(runner.replay(reference, 1) for _ in range(9))
    pass_s(runner, MIXED)
    after = median(runner.replay(reference, 1) for _ in range(9))
    runner.release(reference)
    assert after == pytest.approx(before, rel=0.1)


def test_nvml_says_what_the_clocks_are_or_that_it_does_not_know(runner: GpuRunner) -> None:
    seen = runner.telemetry()
    if seen.flags:
        assert seen.flags == ("no_nvml",)
    else:
        assert seen.sm_mhz is not None
        assert 100 < seen.sm_mhz < 5000


def test_launching_by_the_host_costs_more_than_a_graph_node(runner: GpuRunner) -> None:
    found = dict(runner.checks())["host_launch"]
    assert 0 < found["graph_node_us"] < found["triton_us"]
    assert found["eager_excess_ms"] > 0


def test_the_facts_are_completed_by_what_cuda_knows(runner: GpuRunner) -> None:
    assert runner.facts.processors
    assert runner.facts.l2_bytes
    assert runner.software["torch"] == torch.__version__


def test_samples_agree_with_each_other(runner: GpuRunner) -> None:
    from passtime.calibrate.clock import sample_visit

    work = runner.prepare(DECODE)
    first, second = (
        sample_visit(runner, work, CLOCK, deadline=runner.now() + 20) for _ in range(2)
    )
    runner.release(work)
    assert median(first.samples_ms) == pytest.approx(median(second.samples_ms), rel=0.05)
