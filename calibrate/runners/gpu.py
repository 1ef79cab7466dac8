"""An NVIDIA GPU as a device: passes of a stack of real layers under CUDA graphs, timed by events.

Triton kernels for attention and everything small, cuBLAS for the linear layers, prefill and decode
attention in launches of their own. What is measured is ``measured_layers`` distinct layers and
the ends of the model; a sample is scaled to all layers (:mod:`passtime.calibrate.stack`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import passtime
from passtime.calibrate.clock import ClockPolicy, Telemetry
from passtime.calibrate.cuda_device import find_device
from passtime.calibrate.log import Batch
from passtime.calibrate.nvml import Watch
from passtime.calibrate.plan import Plan
from passtime.calibrate.runners import OutOfDeviceMemory
from passtime.calibrate.selfchecks import host_launch, linearity_at
from passtime.calibrate.stack import (
    ANCHORS,
    PAGE_TOKENS,
    longest_request,
    measured_layers,
    pool_pages,
    scaled_s,
    stack_bytes,
)
from passtime.errors import DeviceError, InputError
from passtime.kernels.layout import lay_out, padded_to, pages_needed, permuted_tables
from passtime.kernels.provenance import kernel_hash
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape

if TYPE_CHECKING:
    from passtime.calibrate.graphs import Graphs
    from passtime.kernels.inputs import PassInputs
    from passtime.kernels.operators import Operators
    from passtime.kernels.weights import LayerPages, Weights

CLOCK = ClockPolicy()
DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_BUDGET_S = 300.0
PREPARE_S = 0.05

HEAD_DIMS = (32, 64, 128)
MOST_HEADS_PER_KV_HEAD = 32
ENDS_REPLAYS = 9
CHECK_REPLAYS = 15

POLICY: Mapping[str, Any] = {
    "runner": "Triton kernels and cuBLAS under CUDA graphs",
    "attention": "causal",
    "clock": "cuda_events",
    "page_tokens": PAGE_TOKENS,
    "all_reduce": "not measured",
}


def computed_model(model: ModelShape) -> ModelShape:
    """The shape that is really run: 16-bit activations and KV, fp8 in dense linear layers only.

    InputError for shapes that the attention kernels do not take.
    """
    if model.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise InputError(
            f"model {model.name}: head_dim {model.head_dim}: the GPU kernels take {sizes}"
        )
    group = model.heads // model.kv_heads
    if group > MOST_HEADS_PER_KV_HEAD:
        raise InputError(
            f"model {model.name}: {group} query heads share a KV head: "
            f"the GPU kernels take up to {MOST_HEADS_PER_KV_HEAD}"
        )
    half = model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
    fp8 = model.linear_dtype == "float8_e4m3" and model.moe is None
    return msgspec.structs.replace(
        model, dtype=half, kv_dtype=None, linear_dtype="float8_e4m3" if fp8 else None
    )


def memory_bytes(model: ModelShape, batch: Batch) -> int:
    """Device memory that the measured stack needs for ``batch``, weights included."""
    return stack_bytes(model, batch)


def visit_s(model: ModelShape, pass_s: float) -> float:
    """Seconds that a visit of a pass of ``pass_s`` is expected to take: only the stack is run."""
    return PREPARE_S + CLOCK.visit_s(pass_s * measured_layers(model) / model.layers)


def open_runner(*, facts: DeviceFacts, model: ModelShape, plan: Plan, seed: int) -> GpuRunner:
    """A runner whose pool holds every batch of the plan, and the anchors if they are small."""
    from passtime.calibrate.graphs import CudaGraphs

    device, uuid = find_device(facts)
    fitting = [b for b in ANCHORS.values() if 2 * stack_bytes(model, b) < facts.memory_bytes]
    return GpuRunner(
        facts=facts,
        model=model,
        batches=[*plan.batches, *fitting],
        graphs=CudaGraphs(device),
        watch=Watch(uuid),
        seed=seed,
    )


@dataclass
class Work:
    """A batch made ready: inputs per rotation of its pages, and graphs per number of repeats."""

    batch: Batch
    inputs: list[PassInputs] = field(default_factory=list)
    stacks: dict[int, Any] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)


class Empty:
    """The work of a pass of nothing."""


class GpuRunner:
    """Runs passes on a GPU; see :class:`passtime.calibrate.runners.Runner`."""

    def __init__(
        self,
        *,
        facts: DeviceFacts,
        model: ModelShape,
        batches: Sequence[Batch],
        graphs: Graphs,
        watch: Watch,
        seed: int = 0,
        layers: int | None = None,
        operators: Operators | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """Draw the weights and fill a pool of pages that holds each of ``batches`` alone.

        ``layers`` is the height of the stack, :func:`measured_layers` if None. ``graph_sizes``
        pads pure decodes up to the next of them, as an engine with captured sizes does; none
        gives every batch a graph of its own size. OutOfDeviceMemory if the stack does not fit.
        """
        from passtime.calibrate.graphs import device_faults
        from passtime.kernels.operators import TimedOperators
        from passtime.kernels.weights import random_pages, random_weights

        self.model = computed_model(model)
        self.layers = layers or measured_layers(self.model)
        self.graphs = graphs
        self.operators: Operators = operators or TimedOperators.on(graphs.device)
        self.kernel_hash: str | None = kernel_hash()
        self.graph_sizes = sorted(graph_sizes)
        self._watch = watch
        self._seed = seed
        self.facts = self._completed(facts)
        self.page_count = pool_pages(self.model, batches, l2_bytes=self.facts.l2_bytes or 0)
        self.positions = longest_request(batches)
        with device_faults():
            self._weights: Weights | None = random_weights(
                self.model,
                layers=self.layers,
                positions=self.positions,
                device=graphs.device,
                seed=seed,
            )
            self.pages: tuple[LayerPages, ...] = random_pages(
                self.model,
                layers=self.layers,
                pages=self.page_count,
                page_tokens=PAGE_TOKENS,
                device=graphs.device,
                seed=seed,
            )

    # --- What it is -------------------------------------------------------------------------------

    @property
    def policy(self) -> Mapping[str, Any]:
        """How passes are run, for the log's header."""
        return {
            **POLICY,
            "dtype": self.model.dtype,
            "measured_layers": self.layers,
            "graph_sizes": self.graph_sizes,
            "operators": self.operators.names,
            "tiles": repr(self.operators.tiles),
            "weights": "N(0, 0.02)",
            "seed": self._seed,
        }

    @property
    def software(self) -> Mapping[str, Any]:
        """Versions that the times depend on, and why NVML is not watched, if it is not."""
        import torch

        packages = ("triton", "numpy", "nvidia-ml-py")
        return {
            "passtime": passtime.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            **{name: _version(name) for name in packages},
            **({"nvml": self._watch.missing} if self._watch.missing else {}),
        }

    def _completed(self, facts: DeviceFacts) -> DeviceFacts:
        """The facts with what only CUDA knows."""
        import torch

        if self.graphs.device.type != "cuda":
            return facts
        properties = torch.cuda.get_device_properties(self.graphs.device)
        if self.model.linear_dtype == "float8_e4m3" and (properties.major, properties.minor) < (
            8,
            9,
        ):
            raise DeviceError(f"{facts.name} has no fp8 matrix units (they begin with sm_89)")
        return msgspec.structs.replace(
            facts,
            processors=properties.multi_processor_count,
            l2_bytes=getattr(properties, "L2_cache_size", facts.l2_bytes),
            compute_capability=f"{properties.major}.{properties.minor}",
        )

    # --- Running batches --------------------------------------------------------------------------

    def memory_bytes(self, batch: Batch) -> int:
        """Device memory that ``batch`` needs, weights included."""
        return stack_bytes(self.model, batch)

    def prepare(self, batch: Batch) -> Work:
        """Put the inputs on the device and capture one pass of the stack, and one of the ends."""
        if pages_needed(batch, PAGE_TOKENS) > self.page_count - 1:
            raise OutOfDeviceMemory(
                f"{pages_needed(batch, PAGE_TOKENS)} KV pages wanted, "
                f"the pool has {self.page_count - 1}"
            )
        work = Work(batch)
        try:
            self._capture(work, 1)
        except BaseException:
            self.release(work)
            raise
        return work

    def replay(self, work: Work | Empty, inner: int) -> float:
        """Seconds of ``inner`` passes of all layers, back to back, in one graph.

        A pass of nothing is one graph however often: it is the launch that is asked for.
        """
        if isinstance(work, Empty):
            return inner * self.graphs.seconds(self.graphs.empty)
        if inner not in work.stacks:
            self._capture(work, inner)
        per_pass_s = self.graphs.seconds(work.stacks[inner]) / inner
        return inner * self._scaled(per_pass_s, work.ends_s[inner])

    def release(self, work: Work | Empty) -> None:
        """Free the graphs and the inputs."""
        if isinstance(work, Empty):
            return
        for graph in work.stacks.values():
            self.graphs.release(graph)
        work.stacks.clear()
        work.inputs.clear()

    def empty(self) -> Empty:
        """A graph of one kernel that does nothing: what the event pair and the launch cost."""
        return Empty()

    def facts_of(self, work: Work) -> Mapping[str, Any]:
        """What it takes to have the stack's own time back from a sample."""
        ends_ms = {str(inner): round(1e3 * s, 6) for inner, s in work.ends_s.items()}
        return {"layers": self.layers, "ends_ms": ends_ms}

    def _scaled(self, stack_s: float, ends_s: float) -> float:
        if self.layers == self.model.layers:
            return stack_s
        return scaled_s(stack_s, ends_s, measured=self.layers, layers=self.model.layers)

    def _capture(self, work: Work, inner: int) -> None:
        ends = self.capture(work, repeats=inner, layers=0)
        try:
            work.ends_s[inner] = self._median_s(ends, ENDS_REPLAYS) / inner
        finally:
            self.graphs.release(ends)
        work.stacks[inner] = self.capture(work, repeats=inner, layers=self.layers)

    def capture(self, work: Work, *, repeats: int, layers: int) -> Any:
        """A graph of ``repeats`` passes of the first ``layers`` layers, each on other pages."""
        from passtime.calibrate.graphs import device_faults

        rotations = max(1, (self.page_count - 1) // pages_needed(work.batch, PAGE_TOKENS))
        with device_faults():
            while len(work.inputs) < min(repeats, rotations):
                work.inputs.append(self.inputs(work.batch, rotation=len(work.inputs)))
        return self.graphs.capture(
            lambda repeat: self.run(work.inputs[repeat % len(work.inputs)], layers=layers), repeats
        )

    def run(self, inputs: PassInputs, *, layers: int, operators: Operators | None = None) -> None:
        """Launch one pass of the first ``layers`` layers, on the current stream."""
        from passtime.kernels.layer import run_pass

        assert self._weights is not None, "the runner is closed"
        weights, pages = self._weights.first(layers), self.pages[:layers]
        run_pass(self.model, weights, pages, inputs, operators or self.operators)

    def inputs(self, batch: Batch, *, rotation: int = 0) -> PassInputs:
        """Random token ids for ``batch`` on the pages of a rotation."""
        from passtime.kernels.inputs import pass_inputs

        tables = permuted_tables(
            batch,
            pool_pages=self.page_count - 1,
            page_tokens=PAGE_TOKENS,
            rotation=rotation,
            seed=self._seed,
        )
        padded = None if batch.prefill else padded_to(len(batch.decode), self.graph_sizes)
        layout = lay_out(
            batch,
            tables,
            page_tokens=PAGE_TOKENS,
            padded_rows=padded,
            padding_slot=(self.page_count - 1) * PAGE_TOKENS,
        )
        draw = np.random.default_rng([self._seed, rotation])
        return pass_inputs(
            layout,
            draw.integers(0, self.model.vocab_size, layout.rows),
            model=self.model,
            tiles=self.operators.tiles,
            processors=self.operators.processors,
            device=self.graphs.device,
        )

    # --- Checks of its own ------------------------------------------------------------------------

    def checks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Facts about the method, measured once: linearity in layers, and what launches cost."""
        if self.layers < self.model.layers:
            yield "linearity", dict(linearity_at(self, ANCHORS))
        if self.fits(ANCHORS["decode 1"]):
            yield "host_launch", host_launch(self, ANCHORS["decode 1"])

    def fits(self, batch: Batch) -> bool:
        """Whether pool and rotary table hold ``batch``."""
        return (
            pages_needed(batch, PAGE_TOKENS) <= self.page_count - 1
            and longest_request([batch]) <= self.positions
        )

    def stack_s(self, batch: Batch, *, layers: int) -> float:
        """Seconds of one pass of the first ``layers`` layers, unscaled."""
        graph = self.capture(Work(batch), repeats=1, layers=layers)
        try:
            return self._median_s(graph, CHECK_REPLAYS)
        finally:
            self.graphs.release(graph)

    def timed_s(self, run: Callable[[int], Any], repeats: int = 1) -> float:
        """Seconds of ``run(0)``, …, ``run(repeats − 1)`` in one graph."""
        graph = self.graphs.capture(run, repeats)
        try:
            return self._median_s(graph, CHECK_REPLAYS)
        finally:
            self.graphs.release(graph)

    def _median_s(self, graph: Any, replays: int) -> float:
        self.graphs.seconds(graph)
        return median(self.graphs.seconds(graph) for _ in range(replays))

    # --- Time -------------------------------------------------------------------------------------

    def telemetry(self) -> Telemetry:
        """Clocks, power, temperature and throttle reasons since the last call."""
        return self._watch.telemetry()

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        time.sleep(seconds)

    def close(self) -> None:
        """Stop watching and drop weights and pages."""
        self._watch.close()
        self._weights, self.pages = None, ()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
