"""What a host's launch costs, as a constant of its own: it is no part of a pass under a graph.

A simulator of an engine without graphs adds ``eager_excess_ms``; one of an engine with graphs has
nothing to add but the gap between nodes, which is in every measured pass already.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from passtime.calibrate.log import Batch

if TYPE_CHECKING:
    from passtime.calibrate.runners.gpu import GpuRunner

LAUNCHES = 300
REPEATS = 5


def host_launch(runner: GpuRunner, batch: Batch) -> dict[str, Any]:
    """Microseconds per launch of a Triton kernel and of a torch operator, and per graph node.

    The kernels take less than their launch, so the host is what limits them. ``eager_ms`` and
    ``graph_ms`` are one pass of the stack each; ``batch`` has to be small for the same reason.
    """
    import torch

    graphs, operators = runner.graphs, runner.operators
    dtype = torch.float16
    gate_up = torch.ones(1, 64, dtype=dtype, device=graphs.device)
    square = torch.ones(16, 16, dtype=dtype, device=graphs.device)

    def many(launch: Any) -> float:
        def run() -> None:
            for _ in range(LAUNCHES):
                launch()

        run()
        return 1e6 * median(graphs.eager_s(run) for _ in range(REPEATS)) / LAUNCHES

    nodes = graphs.capture(lambda _: operators.silu_mul(gate_up), LAUNCHES)
    node_us = 1e6 * runner.median_s(nodes) / LAUNCHES
    graphs.release(nodes)
    inputs = runner.inputs(batch)

    def eager_pass() -> None:
        runner.run(inputs, layers=runner.layers)

    stack = graphs.capture(lambda _: eager_pass(), 1)
    graph_ms = 1e3 * runner.median_s(stack)
    graphs.release(stack)
    eager_ms = 1e3 * median(graphs.eager_s(eager_pass) for _ in range(2 * REPEATS))
    return {
        "triton_us": round(many(lambda: operators.silu_mul(gate_up)), 3),
        "torch_us": round(many(lambda: torch.mm(square, square)), 3),
        "graph_node_us": round(node_us, 3),
        "layers": runner.layers,
        "eager_ms": round(eager_ms, 6),
        "graph_ms": round(graph_ms, 6),
        "eager_excess_ms": round(eager_ms - graph_ms, 6),
    }
