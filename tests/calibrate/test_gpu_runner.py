"""The GPU runner without a GPU: float64 operators on the CPU, and a clock that counts them."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from passtime.calibrate import selfchecks
from passtime.calibrate.backends import backend
from passtime.calibrate.clock import ClockPolicy
from passtime.calibrate.cuda_device import find_device
from passtime.calibrate.log import SCHEMA, Batch, Header, LogWriter, Point, Regime, read_log
from passtime.calibrate.measure import Measurement
from passtime.calibrate.nvml import Watch
from passtime.calibrate.runners import OutOfDeviceMemory, RunnerFailed, gpu
from passtime.calibrate.runners.gpu import GpuRunner, computed_model
from passtime.calibrate.stack import PAGE_TOKENS
from passtime.errors import DeviceError, InputError
from passtime.kernels.layout import pages_needed
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape, MoeShape

torch = pytest.importorskip("torch", reason="the GPU runner needs torch")
pytest.importorskip("triton", reason="the GPU runner needs triton")

from passtime.calibrate.graphs import device_faults  # noqa: E402
from passtime.kernels.operators import ReferenceOperators  # noqa: E402

LAUNCH_S, OPERATOR_S = 4e-6, 1e-5
MODEL = ModelShape(
    name="small",
    layers=12,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn_size=96,
    vocab_size=100,
)
FACTS = DeviceFacts(kind="cuda", name="Counted", memory_bytes=2**34)
MIXED = Batch(prefill=((5, 20), (3, 0)), decode=(40, 7))
DECODE = Batch(decode=(33,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class CountedOperators(ReferenceOperators):
    """Remembers what ran and on which rows, positions and pages."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.inputs: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not callable(found) or name.startswith("_"):
            return found

        def counted(*arguments: Any) -> Any:
            self.calls.append(name)
            return found(*arguments)

        return counted

    def attend(self, q: Any, pages: Any, inputs: Any) -> Any:
        self.inputs.append(inputs)
        return super().attend(q, pages, inputs)


class CountingGraphs:
    """A "graph" remembers how many operators it holds and takes so long, launch included."""

    device = torch.device("cpu")

    def __init__(self, operators: CountedOperators) -> None:
        self.operators = operators
        self.alive = 0
        self.empty = 0

    def capture(self, run: Callable[[int], Any], repeats: int) -> int:
        before = len(self.operators.calls)
        for repeat in range(repeats):
            run(repeat)
        self.alive += 1
        return len(self.operators.calls) - before

    def seconds(self, graph: int) -> float:
        return LAUNCH_S + OPERATOR_S * graph

    def eager_s(self, run: Callable[[], Any]) -> float:
        before = len(self.operators.calls)
        run()
        return 3 * OPERATOR_S * (len(self.operators.calls) - before)

    def release(self, graph: int) -> None:
        self.alive -= 1


class CountedRunner(GpuRunner):
    """A runner whose operators and graphs are known to be the counting ones."""

    operators: CountedOperators
    graphs: CountingGraphs


def runner(model: ModelShape = MODEL, **options: Any) -> CountedRunner:
    operators = CountedOperators()
    return CountedRunner(
        facts=FACTS,
        model=model,
        batches=[MIXED, DECODE],
        graphs=CountingGraphs(operators),
        watch=Watch(None),
        operators=operators,
        **options,
    )


# --- Samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_sample_of_the_stack_is_that_of_the_whole_model(batch: Batch, inner: int) -> None:
    stack, whole = runner(), runner(layers=MODEL.layers)
    assert (stack.layers, whole.layers) == (4, 12)
    found = stack.replay(stack.prepare(batch), inner)
    wanted = whole.replay(whole.prepare(batch), inner)
    assert found == pytest.approx(wanted)
    assert wanted > inner * 12 * 8 * OPERATOR_S, "eight operators a layer at least"


def test_the_raw_time_can_be_had_back_from_the_visit() -> None:
    device = runner()
    work = device.prepare(MIXED)
    sample_s = device.replay(work, 1)
    known = device.facts_of(work)
    ends_s = known["ends_ms"]["1"] / 1e3
    stack_s = ends_s + (sample_s - ends_s) * known["layers"] / MODEL.layers
    assert stack_s == pytest.approx(device.graphs.seconds(work.stacks[1]), rel=1e-4)


def test_a_pass_of_nothing_costs_the_launch() -> None:
    device = runner()
    assert device.replay(device.empty(), 1) == LAUNCH_S
    assert device.replay(device.empty(), 50) == pytest.approx(50 * LAUNCH_S)
    device.release(device.empty())


def test_repeats_run_on_other_pages_each_while_the_pool_lasts() -> None:
    device = runner()
    work = device.prepare(DECODE)
    device.operators.inputs.clear()
    device.replay(work, 4)
    tables = [
        tuple(inputs.layout.block_tables[0, : pages_needed(DECODE, PAGE_TOKENS)].tolist())
        for inputs in device.operators.inputs
    ]
    used = list(dict.fromkeys(tables))
    rotations = (device.page_count - 1) // pages_needed(DECODE, PAGE_TOKENS)
    assert len(used) == min(4, rotations) > 1
    pages = [page for table in used for page in table]
    assert len(set(pages)) == len(pages)


def test_releasing_frees_every_graph() -> None:
    device = runner()
    first, second = device.prepare(MIXED), device.prepare(DECODE)
    device.replay(first, 2)
    assert device.graphs.alive == 3, "graphs of the ends are freed at once"
    device.release(first)
    device.release(second)
    assert device.graphs.alive == 0


def test_token_ids_vary_and_depend_on_the_seed_alone() -> None:
    ids = [runner(seed=seed).inputs(MIXED).token_ids for seed in (1, 1, 2)]
    assert len(set(ids[0].tolist())) > 5
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], ids[2])


def test_pure_decodes_are_padded_to_captured_sizes_where_the_engine_has_some() -> None:
    device = runner(graph_sizes=[8, 4])
    assert device.policy["graph_sizes"] == [4, 8]
    assert device.inputs(DECODE).layout.rows == 4
    assert device.inputs(MIXED).layout.rows == 5 + 3 + 2, "a pass with prompts has no such graph"
    assert runner().inputs(DECODE).layout.rows == 1
    assert device.replay(device.prepare(DECODE), 1) > 0


# --- Limits --------------------------------------------------------------------------------------


def test_a_batch_beyond_the_pool_is_refused_and_the_next_one_runs() -> None:
    device = runner()
    with pytest.raises(OutOfDeviceMemory, match="KV pages wanted, the pool has"):
        device.prepare(Batch(decode=(100_000,)))
    assert device.replay(device.prepare(DECODE), 1) > 0


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried"), OutOfDeviceMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered\n"), RunnerFailed),
    ],
)
def test_cuda_errors_become_what_a_measurement_handles(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(expected) as caught, device_faults():
        raise raised
    assert "\n" not in str(caught.value)


def test_what_failed_to_be_captured_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device = runner()

    def fail(*_: Any) -> Any:
        raise OutOfDeviceMemory("no room")

    monkeypatch.setattr(CountedOperators, "silu_mul", fail)
    with pytest.raises(OutOfDeviceMemory):
        device.prepare(MIXED)
    assert device.graphs.alive == 0


# --- Checks --------------------------------------------------------------------------------------


def test_the_checks_find_a_pass_linear_and_count_the_launches() -> None:
    device = runner()
    small = {"decode": DECODE, "mixed": MIXED, "too large": Batch(decode=(10_000,))}
    found = dict(selfchecks.linearity_at(device, small))
    assert set(found) == {"decode", "mixed"}
    for values in found.values():
        assert values["linear"]
        assert list(values["pass_ms"]) == ["1", "2", "3", "4"]
        assert values["layer_ms"] == pytest.approx(1e3 * 8 * OPERATOR_S, rel=0.3)


def test_topics_of_the_checks_are_those_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ANCHORS", {"decode 1": DECODE, "mixed": MIXED})
    monkeypatch.setattr(selfchecks, "LAUNCHES", 20)
    topics = dict(runner().checks())
    assert list(topics) == ["linearity", "host_launch"]
    assert set(topics["linearity"]) == {"decode 1", "mixed"}
    found = topics["host_launch"]
    assert found["eager_excess_ms"] == pytest.approx(found["eager_ms"] - found["graph_ms"])
    assert found["graph_node_us"] == pytest.approx(1e6 * (OPERATOR_S + LAUNCH_S / 20))
    whole = dict(runner(layers=MODEL.layers).checks())
    assert list(whole) == ["host_launch"], "nothing is scaled, so nothing has to be linear"


def test_a_whole_measurement_logs_samples_checks_and_what_did_not_fit(tmp_path: Path) -> None:
    device = runner()
    batches = (Batch(prefill=((20, 0),)), DECODE, MIXED, Batch(decode=(5_000,)))
    regimes: tuple[Regime, ...] = ("prefill", "decode", "mixed", "decode")
    plan = tuple(
        Point(id=number, regime=regime, batch=batch)
        for number, (regime, batch) in enumerate(zip(regimes, batches, strict=True))
    )
    header = Header(
        schema=SCHEMA,
        device=device.facts,
        model=device.model,
        software=dict(device.software),
        policy=dict(device.policy),
        plan=plan,
        seed=0,
        started_at="2026-01-01T00:00:00+00:00",
        kernel_hash=device.kernel_hash,
    )
    clock = ClockPolicy(
        warm_s=0.0, warm_replays=1, ticks=1, rounds=1, min_rounds=1, idle_s=0.0, burst_s=0.0,
        settle_step_s=0.0, settle_min_s=0.0, settle_max_s=0.1,
    )  # fmt: skip
    with LogWriter.create(tmp_path / "log.jsonl", header) as writer:
        Measurement(
            runner=device,
            reopen=runner,
            writer=writer,
            header=header,
            earlier=None,
            clock=clock,
            pass_s=[1e-3] * 4,
            visit_s=[0.1] * 4,
            budget_s=60.0,
            memory_bytes=FACTS.memory_bytes,
            progress=lambda share, text: None,
            say=lambda sentence: None,
        ).run()
    log = read_log(tmp_path / "log.jsonl")
    topics = {note.topic: note.values for note in log.notes}
    assert topics["linearity"] == {}, "no anchor fits such a pool"
    assert "host_launch" not in topics
    assert topics["launch_overhead"]["ms"] == pytest.approx(1e3 * LAUNCH_S)
    assert {visit.point: visit.stop for visit in log.visits} == {
        0: "converged", 1: "converged", 2: "converged", 3: "oom"
    }  # fmt: skip
    operators_ms = 1e3 * OPERATOR_S * (1 + 12 * 9 + 3)
    for visit in log.visits:
        if visit.stop == "converged":
            assert visit.clocks["layers"] == 4
            assert visit.samples_ms[0] == pytest.approx(operators_ms + 1e3 * LAUNCH_S)
            assert "no_nvml" in visit.flags


# --- Questions -----------------------------------------------------------------------------------


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("questions")


def test_a_mixed_pass_is_held_against_its_parts(questions: ModuleType) -> None:
    (found,) = questions.mixed_adds(runner(), {"mixed": MIXED}).values()
    one_launch_s, layers = LAUNCH_S + 4 * OPERATOR_S, 4
    assert found["attention_ms"]["mixed"] == pytest.approx(1e3 * one_launch_s)
    assert found["attention_over_parts"] == pytest.approx(0.5), "one call here, two apart"
    assert found["pass_over_calls"] == pytest.approx(0.5, abs=0.01)
    whole = found["pass_ms"]["mixed"]
    composed = found["pass_ms"]["rows"] + found["attention_ms"]["decode"]
    assert found["pass_over_composed"] == pytest.approx(whole / composed, rel=1e-3)
    assert layers == runner().layers


def test_the_scaled_stack_is_held_against_all_layers(questions: ModuleType) -> None:
    (found,) = questions.linear_in_layers(runner(layers=12), {"mixed": MIXED}).values()
    assert list(found["pass_ms"]) == ["0", "1", "2", "3", "4", "6", "9", "12"]
    assert found["scaled_from"] == 4
    assert abs(found["scaled_error"]) < 1e-3
    # The first norm of the first layer adds no residual, yet it is one operator as any other.
    assert found["curvature"] < 1e-3


def test_operators_are_timed_alone_under_their_names(questions: ModuleType) -> None:
    device = runner()
    (found,) = questions.operators_against_pass(device, {"mixed": MIXED}).values()
    alone = found["operators_ms"]
    in_layer = "attention_norm qkv rope_kv_write attention output ffn_norm gate_up silu_mul down"
    ends = ["final_norm", "lm_head", "argmax"]
    assert list(alone) == ["embedding", *in_layer.split(), *ends]
    assert alone["qkv"] == pytest.approx(1e3 * (LAUNCH_S + 4 * OPERATOR_S))
    assert alone["argmax"] == pytest.approx(1e3 * (LAUNCH_S + OPERATOR_S))
    launches_s = (len(alone) - 1) * LAUNCH_S
    assert found["sum_ms"] - found["pass_ms"] == pytest.approx(1e3 * launches_s, rel=1e-3)


def test_operators_of_experts_are_one(questions: ModuleType) -> None:
    moe = MoeShape(experts=4, experts_per_token=2, expert_ffn_size=32)
    device = runner(shape(moe=moe))
    (found,) = questions.operators_against_pass(device, {"mixed": MIXED}).values()
    assert "experts" in found["operators_ms"]
    assert "gate_up" not in found["operators_ms"]


def test_all_answers_are_one_json_document(
    questions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfchecks, "LAUNCHES", 20)
    monkeypatch.setattr(questions, "ANCHORS", {"decode 1": DECODE})
    monkeypatch.setattr(questions, "MIXES", {"mixed": MIXED, "too large": Batch(decode=(10_000,))})
    found = json.loads(json.dumps(questions.answers(runner())))
    assert found["model"] == "small"
    assert list(found["mixed_adds"]) == ["mixed"]
    assert found["host_launch"]["layers"] == 4
    assert {"linear_in_layers", "operators_against_pass"} <= set(found)


# --- Before a runner is open ---------------------------------------------------------------------


def test_the_backend_has_what_a_plan_needs() -> None:
    module = backend("cuda")
    assert module.POLICY["attention"] == "causal"
    assert module.POLICY["clock"] == "cuda_events"
    assert module.memory_bytes(MODEL, MIXED) > 0
    assert module.DEFAULT_MODEL == "llama-3.1-8b"


def shape(**changes: Any) -> ModelShape:
    return msgspec.structs.replace(MODEL, **changes)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (shape(dtype="float32"), {"dtype": "bfloat16"}),
        (shape(dtype="float16"), {"dtype": "float16"}),
        (shape(linear_dtype="float8_e4m3"), {"linear_dtype": "float8_e4m3"}),
        (shape(kv_dtype="float8_e4m3"), {"kv_dtype": None}),
        (
            shape(
                linear_dtype="float8_e4m3",
                moe=MoeShape(experts=4, experts_per_token=2, expert_ffn_size=32),
            ),
            {"linear_dtype": None},
        ),
    ],
)
def test_the_computed_model_says_what_is_really_run(
    model: ModelShape, expected: Mapping[str, Any]
) -> None:
    found = computed_model(model)
    assert {key: getattr(found, key) for key in expected} == expected
    assert computed_model(found) == found


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (shape(head_dim=80), "head_dim 80: the GPU kernels take 32, 64, 128"),
        (shape(heads=64, kv_heads=1), "64 query heads share a KV head"),
    ],
)
def test_shapes_that_the_kernels_do_not_take_are_refused(model: ModelShape, message: str) -> None:
    with pytest.raises(InputError, match=message):
        computed_model(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_there_is_no_device() -> None:
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        find_device(FACTS)


def test_the_device_is_found_by_its_uuid_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = [SimpleNamespace(name="Same", uuid=text) for text in ("aa", "bb")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    digest = hashlib.sha256(b"GPU-bb").hexdigest()[:16]
    facts = msgspec.structs.replace(FACTS, name="Same", details={"uuid_hash": digest})
    assert find_device(facts) == (torch.device("cuda", 1), "GPU-bb")
    labelled = msgspec.structs.replace(FACTS, details={"reported_name": "Same"})
    assert find_device(labelled) == (torch.device("cuda", 0), "GPU-aa")
    with pytest.raises(DeviceError, match="does not see the GPU Counted"):
        find_device(FACTS)
