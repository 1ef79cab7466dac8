"""A stack of a few layers stands for the whole model: scaling, its check, and memory."""

import msgspec
import pytest

from passtime.calibrate.log import Batch
from passtime.calibrate.stack import (
    ANCHORS,
    PAGE_TOKENS,
    checked_layers,
    linearity,
    longest_request,
    measured_layers,
    page_bytes,
    pool_pages,
    scaled_s,
    stack_bytes,
    weight_bytes,
)
from passtime.profiles.shapes import ModelShape, MoeShape

LLAMA = ModelShape(
    name="llama-8b",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
)


def with_layers(layers: int, **other: object) -> ModelShape:
    return msgspec.structs.replace(LLAMA, layers=layers, **other)


def test_a_quarter_of_the_layers_is_measured_and_never_less_than_needed() -> None:
    assert measured_layers(LLAMA) == 8
    assert measured_layers(with_layers(2)) == 2
    assert measured_layers(with_layers(9)) == 4
    huge = with_layers(126, hidden_size=16384, heads=128, ffn_size=53248)
    assert measured_layers(huge) == 3, "three layers of 6 GB, not a quarter of 126"
    assert len(checked_layers(measured_layers(huge))) == 3


@pytest.mark.parametrize("measured", [4, 8, 32])
def test_a_pass_that_is_linear_in_its_layers_is_scaled_exactly(measured: int) -> None:
    launch_s, ends_s, layer_s = 4e-6, 3e-4, 2.5e-4
    found = scaled_s(
        launch_s + ends_s + measured * layer_s, launch_s + ends_s, measured=measured, layers=32
    )
    assert found == pytest.approx(launch_s + ends_s + 32 * layer_s)


def test_a_straight_line_is_found_linear() -> None:
    line = linearity({layers: 3e-4 + layers * 2e-4 for layers in (2, 4, 6, 8)})
    assert line.layer_s == pytest.approx(2e-4)
    assert line.ends_s == pytest.approx(3e-4)
    assert line.curvature < 1e-9
    assert line.linear


@pytest.mark.parametrize(("extra", "linear"), [(0.005, True), (0.05, False)])
def test_layers_that_get_dearer_are_found_curved(extra: float, linear: bool) -> None:
    times = {layers: (3e-4 + layers * 2e-4) * (1 + extra * (layers == 4)) for layers in (2, 4, 6)}
    assert linearity(times).linear is linear


def test_memory_counts_the_measured_layers_only() -> None:
    batch = Batch(prefill=((1000, 24),), decode=(15, 16))
    whole = weight_bytes(LLAMA, 32)
    assert whole == LLAMA.weight_bytes
    found = stack_bytes(LLAMA, batch)
    assert found > weight_bytes(LLAMA, 8) + (64 + 1 + 2 + 1) * page_bytes(LLAMA, 8)
    assert found < whole / 2
    more = msgspec.structs.replace(batch, decode=(15, 16, 160_000))
    pages = (160_001 + PAGE_TOKENS - 1) // PAGE_TOKENS
    extra = stack_bytes(LLAMA, more) - found
    assert extra == pytest.approx(pages * page_bytes(LLAMA, 8), rel=0.01)


def test_experts_weigh_on_memory() -> None:
    moe = with_layers(48, moe=MoeShape(experts=128, experts_per_token=8, expert_ffn_size=768))
    assert weight_bytes(moe, 48) == moe.weight_bytes


def test_the_pool_holds_the_largest_batch_and_outgrows_the_cache() -> None:
    small, large = Batch(decode=(100,)), Batch(decode=(100_000,))
    assert pool_pages(LLAMA, [small, large], l2_bytes=0) == 6251 + 1
    l2 = 60 * 2**20
    assert pool_pages(LLAMA, [small], l2_bytes=l2) * page_bytes(LLAMA, 8) >= 4 * l2


def test_positions_reach_the_longest_request() -> None:
    assert longest_request([Batch(prefill=((5, 10),)), Batch(decode=(20, 3))]) == 21
    assert longest_request(list(ANCHORS.values())) == 4608
