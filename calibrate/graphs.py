"""Passes as CUDA graphs, timed by events on the device's own clock.

The event pair brackets a graph that was submitted while the device was still busy with a spin
kernel, so neither the host's launch nor its wake-up is in the interval: only what the device does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from triton import TritonError

from passtime.calibrate.runners import OutOfDeviceMemory, RunnerFailed

CUDA: Any = torch.cuda  # half of it is untyped

SPIN_CYCLES = 200_000
"""About 0.1 ms at GPU clocks: longer than submitting a graph of thousands of nodes takes."""


class Graphs(Protocol):
    """What makes work replayable and times it; CUDA's is :class:`CudaGraphs`."""

    device: torch.device
    empty: Any  # a graph of one kernel that does nothing

    def capture(self, run: Callable[[int], Any], repeats: int) -> Any:
        """``run(0)``, …, ``run(repeats − 1)`` as one graph, after all of it ran once."""
        ...

    def eager_s(self, run: Callable[[], Any]) -> float:
        """Run without a graph; seconds on the host's clock from the first launch to the last end.

        The caller has run it before.
        """
        ...

    def seconds(self, graph: Any) -> float:
        """Replay once; seconds by the device's clock."""
        ...

    def release(self, graph: Any) -> None:
        """Free the graph."""
        ...


class CudaGraphs:
    """Graphs of one CUDA device. All of them share one memory pool: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        """``device`` has an index. Takes a stream of its own; RunnerFailed if CUDA does not run."""
        self.device = device
        with device_faults():
            CUDA.set_device(device)
            self._stream = CUDA.Stream(device)
            self._pool = CUDA.graph_pool_handle()
            self._start = CUDA.Event(enable_timing=True)
            self._end = CUDA.Event(enable_timing=True)
        # A pool dies with its last graph, so one graph stays: the pass of nothing.
        one = torch.zeros(1, device=device)
        self.empty = self.capture(lambda _: one.zero_(), 1)

    def capture(self, run: Callable[[int], Any], repeats: int) -> torch.cuda.CUDAGraph:
        """Run it all once, eagerly (kernels compile, libraries choose), then record it."""
        with device_faults():
            self._after_others()
            with torch.cuda.stream(self._stream):
                for repeat in range(repeats):
                    run(repeat)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                for repeat in range(repeats):
                    run(repeat)
            return graph

    def seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Spin, start, graph, end; waits for the end."""
        with device_faults(), torch.cuda.stream(self._stream):
            CUDA._sleep(SPIN_CYCLES)
            self._start.record()
            graph.replay()
            self._end.record()
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end)) / 1e3

    def eager_s(self, run: Callable[[], Any]) -> float:
        """Launch by launch, as an engine without graphs does."""
        with device_faults(), torch.cuda.stream(self._stream):
            self._after_others()
            self._stream.synchronize()
            started = time.perf_counter()
            run()
            self._stream.synchronize()
            return time.perf_counter() - started

    def _after_others(self) -> None:
        """Inputs may still be on their way, on the stream that everything else uses."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """Free the graph; its memory stays in the pool for the next."""
        with device_faults():
            graph.reset()


@contextmanager
def device_faults() -> Iterator[None]:
    """Turn what CUDA raises into what a measurement knows how to handle."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfDeviceMemory(_first_line(error)) from None
    except (RuntimeError, TritonError) as error:
        raise RunnerFailed(f"CUDA: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
