"""What a GPU runner checks about its own method: is a pass linear in layers, what is a launch?

Linearity is what scaling a stack rests on. The host's launch is a constant of its own, no part of
a pass under a graph: a simulator of an engine without graphs adds ``eager_excess_ms``; one of an
engine with graphs has nothing to add, as the gap between nodes is in every measured pass already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from passtime.calibrate.log import Batch
from passtime.calibrate.stack import checked_layers, linearity

if TYPE_CHECKING:
    from passtime.calibrate.runners.gpu import GpuRunner

LAUNCHES = 300
REPEATS = 5


def linearity_at(
    runner: GpuRunner, anchors: Mapping[str, Batch]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pass times by number of layers, and the line through them, of each anchor that fits."""
    for name, batch in anchors.items():
        if not runner.fits(batch):
            continue
        seconds = {
            layers: runner.stack_s(batch, layers=layers) for layers in checked_layers(runner.layers)
        }
        line = linearity(seconds)
        yield (
            name,
            {
                "pass_ms": {str(layers): round(1e3 * s, 6) for layers, s in seconds.items()},
                "ends_ms": round(1e3 * line.ends_s, 6),
                "layer_ms": round(1e3 * line.layer_s, 6),
                "curvature": round(line.curvature, 6),
                "linear": line.linear,
            },
        )


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

    node_us = 1e6 * runner.timed_s(lambda _: operators.silu_mul(gate_up), LAUNCHES) / LAUNCHES
    inputs = runner.inputs(batch)

    def eager_pass() -> None:
        runner.run(inputs, layers=runner.layers)

    graph_ms = 1e3 * runner.timed_s(lambda _: eager_pass())
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
