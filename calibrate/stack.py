"""A stack of L distinct layers stands for a model of N: what is kept, and how times are scaled.

Layers of a transformer cost the same, so a pass is ends + N · layer. Measuring L layers is N/L
times faster and leaves room for more KV than the whole model would; that a pass is linear in its
layers is not assumed but checked, at anchor batches, on the device. Distinct layers (and pages in
random order) keep the caches as cold as those of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passtime.calibrate.log import Batch
from passtime.kernels.layout import pages_needed
from passtime.kernels.work import new_tokens, requests
from passtime.profiles.shapes import BYTES, ModelShape

PAGE_TOKENS = 16
"""vLLM's default block size on CUDA."""

USUAL_LAYERS = 4
FEWEST_LAYERS = 3  # a straight line through two points proves nothing
STACK_BYTES = 12 * 2**30
"""A stack's weights stay under this, so that a pass of a large model is short enough to repeat."""

MAX_CURVATURE = 0.01
WORKSPACE_BYTES = 512 * 2**20
"""cuBLAS workspaces, the CUDA context's own and the allocator's rounding."""


def measured_layers(model: ModelShape) -> int:
    """How many layers stand for all: a quarter, four at least, three where layers are huge."""
    layer_bytes = (
        model.attention_parameters_per_layer + model.ffn_parameters_per_layer
    ) * model.weight_bytes_per_element
    wanted = max(USUAL_LAYERS, -(-model.layers // 4))
    return min(model.layers, wanted, max(FEWEST_LAYERS, STACK_BYTES // layer_bytes))


def scaled_s(stack_s: float, ends_s: float, *, measured: int, layers: int) -> float:
    """Seconds of a pass of ``layers`` layers from one of ``measured`` and one of none.

    What both measurements have in common (a graph's launch, the event pair) counts once.
    """
    return ends_s + (stack_s - ends_s) * layers / measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearity:
    """t(L) = ``ends_s`` + L · ``layer_s``; ``curvature`` is the largest deviation over t(L)."""

    ends_s: float
    layer_s: float
    curvature: float

    @property
    def linear(self) -> bool:
        """Whether scaling by layers is justified."""
        return self.curvature <= MAX_CURVATURE


def linearity(seconds: Mapping[int, float]) -> Linearity:
    """The straight line through pass times by number of layers, and how far they lie off it.

    Three numbers of layers at least, all times > 0; the line minimises relative deviations.
    """
    assert len(seconds) >= 3, "two points are always on a line"
    # Weighted least squares of t = a + bL with weights 1/t², solved by hand.
    weight = {count: 1.0 / t**2 for count, t in seconds.items()}
    total = sum(weight.values())
    mean_count = sum(w * count for count, w in weight.items()) / total
    mean_s = sum(weight[count] * t for count, t in seconds.items()) / total
    spread = sum(w * (count - mean_count) ** 2 for count, w in weight.items())
    slope = sum(weight[c] * (c - mean_count) * (t - mean_s) for c, t in seconds.items()) / spread
    ends = mean_s - slope * mean_count
    off = max(abs(ends + slope * count - t) / t for count, t in seconds.items())
    return Linearity(ends_s=ends, layer_s=slope, curvature=off)


def checked_layers(available: int) -> tuple[int, ...]:
    """Numbers of layers to check linearity at: about a quarter, half, three quarters, and all."""
    return tuple(sorted({max(1, available * part // 4) for part in (1, 2, 3, 4)}))


ANCHORS: Mapping[str, Batch] = {
    "prefill 512": Batch(prefill=((512, 0),)),
    "prefill 4096": Batch(prefill=((2048, 0), (2048, 0))),
    "prefix 4096": Batch(prefill=((512, 4096),)),
    "decode 1": Batch(decode=(1024,)),
    "decode 32": Batch(decode=(2048,) * 32),
    "mixed": Batch(prefill=((512, 512),), decode=(1024,) * 16),
}
"""One batch of each kind, small enough for every device that holds the model."""


# --- Memory ---------------------------------------------------------------------------------------


def weight_bytes(model: ModelShape, layers: int) -> int:
    """Weights of ``layers`` layers, embedding and LM head."""
    stack = (model.attention_parameters_per_layer + model.ffn_parameters_per_layer) * layers
    ends = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return stack * model.weight_bytes_per_element + ends * BYTES[model.dtype]


def page_bytes(model: ModelShape, layers: int) -> int:
    """One page of keys and values in each of ``layers`` layers."""
    return 2 * layers * PAGE_TOKENS * model.kv_size * BYTES[model.dtype]


def activation_bytes(model: ModelShape, batch: Batch) -> int:
    """The most that lives at once within a layer, or at the LM head."""
    rows, element = new_tokens(batch), BYTES[model.dtype]
    ffn = 3 * model.ffn_size
    if model.moe is not None:
        ffn = model.moe.experts_per_token * (3 * model.moe.expert_ffn_size + model.hidden_size)
    qkv = 2 * model.query_size + 2 * model.kv_size
    logits = requests(batch) * model.vocab_size * element
    return 2 * rows * element * (3 * model.hidden_size + max(ffn, qkv)) + logits


def stack_bytes(model: ModelShape, batch: Batch) -> int:
    """Device memory for ``batch`` on the measured stack: weights, KV pages, activations."""
    layers = measured_layers(model)
    pages = pages_needed(batch, PAGE_TOKENS) + 1
    return (
        weight_bytes(model, layers)
        + pages * page_bytes(model, layers)
        + activation_bytes(model, batch)
        + WORKSPACE_BYTES
    )


def pool_pages(model: ModelShape, batches: Sequence[Batch], *, l2_bytes: int) -> int:
    """Pages of a pool that holds each of ``batches`` alone, and one that padding writes to.

    The pages of all layers together are four times the L2 cache at least, or those of a small
    model would be found there.
    """
    needed = max(pages_needed(batch, PAGE_TOKENS) for batch in batches)
    cold = -(-4 * l2_bytes // page_bytes(model, measured_layers(model)))
    return max(needed, cold) + 1


def longest_request(batches: Sequence[Batch]) -> int:
    """Tokens of the longest request once its pass is done: the rotary positions needed."""
    lengths = [new + prefix for batch in batches for new, prefix in batch.prefill]
    return max([*lengths, *(kv + 1 for batch in batches for kv in batch.decode)])
