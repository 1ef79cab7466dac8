"""Plans fill the box they state, fit the budget they are given, and are the same every time."""

import random
from functools import partial
from itertools import combinations, pairwise
from math import dist, log1p

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.calibrate.clock import CPU_POLICY, ClockPolicy
from passtime.calibrate.log import Batch
from passtime.calibrate.plan import (
    SIZINGS,
    Box,
    Costs,
    Plan,
    guessed_pass_s,
    guessed_rates,
    make_plan,
    pool_tokens,
)
from passtime.calibrate.rounds import due, visit_order, wanted_visits
from passtime.calibrate.runners.cpu import memory_bytes
from passtime.errors import InputError
from passtime.profiles.device import DeviceFacts, DeviceKind
from passtime.profiles.shapes import load_model

TINY = load_model("tiny")
GIB = 2**30
DEVICES: dict[DeviceKind, DeviceFacts] = {
    "cpu": DeviceFacts(kind="cpu", name="CPU", memory_bytes=16 * GIB),
    "cuda": DeviceFacts(
        kind="cuda",
        name="GPU",
        memory_bytes=80 * GIB,
        peak_flops=1e15,
        peak_bytes_per_s=3.3e12,
    ),
}
CLOCKS: dict[DeviceKind, ClockPolicy] = {"cpu": CPU_POLICY, "cuda": ClockPolicy()}


def plan(
    kind: DeviceKind = "cpu", *, budget_s: float = 30.0, seed: int = 0, memory: int = 16 * GIB
) -> Plan:
    rates = guessed_rates(DEVICES[kind])
    costs = Costs(
        pass_s=partial(guessed_pass_s, TINY, rates=rates),
        visit_s=CLOCKS[kind].visit_s,
        memory_bytes=partial(memory_bytes, TINY),
    )
    return make_plan(
        SIZINGS[kind],
        costs,
        budget_s=budget_s,
        memory_bytes=memory,
        min_rounds=CLOCKS[kind].min_rounds,
        seed=seed,
    )


def within(batch: Batch, box: Box) -> bool:
    return (
        sum(new for new, _ in batch.prefill) + len(batch.decode) <= box.new_tokens
        and len(batch.prefill) <= box.prefill_requests
        and len(batch.decode) <= box.decode_requests
        and max((prefix for _, prefix in batch.prefill), default=0) <= box.prefix_tokens
        and max(batch.decode, default=0) <= box.kv_tokens
        and pool_tokens(batch) <= box.pool_tokens
    )


@settings(deadline=None, max_examples=15)
@given(
    kind=st.sampled_from(sorted(DEVICES)),
    budget_s=st.floats(0.5, 600.0),
    seed=st.integers(0, 2**62),
)
def test_any_plan_is_sound(kind: DeviceKind, budget_s: float, seed: int) -> None:
    made = plan(kind, budget_s=budget_s, seed=seed)
    assert [point.id for point in made.points] == list(range(len(made.points)))
    assert {point.regime for point in made.points} == {"prefill", "prefix", "decode", "mixed"}
    batches = [point.batch for point in made.points]
    assert len(set(batches)) == len(batches)
    for point in made.points:
        batch = point.batch
        assert within(batch, made.box)
        assert within(batch, SIZINGS[kind].box)
        assert all(new >= 1 and prefix >= 0 for new, prefix in batch.prefill)
        assert all(kv >= 1 for kv in batch.decode)
        assert bool(batch.prefill) == (point.regime != "decode")
        assert bool(batch.decode) == (point.regime in ("decode", "mixed"))
        if point.regime == "prefill":
            assert not any(prefix for _, prefix in batch.prefill)
        if point.regime == "prefix":
            assert all(prefix for _, prefix in batch.prefill)
    held_out = [point for point in made.points if point.held_out]
    assert {point.regime for point in held_out} == {"prefill", "prefix", "decode", "mixed"}
    assert len(held_out) < len(made.points) / 2


@pytest.mark.parametrize("kind", sorted(DEVICES))
def test_the_same_seed_gives_the_same_plan_and_another_one_another(kind: DeviceKind) -> None:
    assert plan(kind, seed=5) == plan(kind, seed=5)
    assert plan(kind, seed=5).points != plan(kind, seed=6).points


@pytest.mark.parametrize("kind", sorted(DEVICES))
@pytest.mark.parametrize("budget_s", [20.0, 120.0])
def test_every_point_can_be_visited_as_often_as_it_must(kind: DeviceKind, budget_s: float) -> None:
    made = plan(kind, budget_s=budget_s)
    assert CLOCKS[kind].min_rounds * made.round_s <= budget_s


def test_a_larger_budget_reaches_farther() -> None:
    small, large = plan(budget_s=5.0), plan(budget_s=60.0)
    assert max(small.pass_s) < max(large.pass_s)
    assert len(small.points) <= len(large.points)


def test_the_demos_plan_reaches_what_traces_ask() -> None:
    box = plan(budget_s=30.0).box
    assert box.new_tokens >= 1900
    assert box.prefix_tokens >= 8000
    assert box.decode_requests == 64
    assert box.kv_tokens >= 8000
    assert box.prefill_requests == 8


def test_less_memory_means_smaller_batches_not_failures() -> None:
    limit = 128 * 2**20
    made = plan(memory=limit)
    assert max(made.memory_bytes) <= SIZINGS["cpu"].memory_share * limit
    assert max(plan().memory_bytes) > limit


def test_a_model_that_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="the model alone needs"):
        plan(memory=2**20)


def test_prefills_sit_beside_tile_sizes() -> None:
    lengths = {
        point.batch.prefill[0][0]
        for point in plan(budget_s=60.0).points
        if point.regime == "prefill" and len(point.batch.prefill) == 1
    }
    assert {65, 257} <= lengths


def test_decodes_have_equal_and_unequal_lengths() -> None:
    spread = [
        len(set(point.batch.decode)) > 1
        for point in plan().points
        if point.regime == "decode" and len(point.batch.decode) > 1
    ]
    assert any(spread)
    assert not all(spread)


def test_corners_are_among_the_points() -> None:
    batches = [point.batch for point in plan(budget_s=60.0).points if not point.held_out]
    assert Batch(prefill=((2048, 0),)) in batches
    assert Batch(decode=(8192,)) in batches
    assert Batch(decode=(32,) * 64) in batches


def test_fitted_points_lie_farther_apart_than_random_ones() -> None:
    def closest(places: list[tuple[float, ...]]) -> float:
        return min(dist(*pair) for pair in combinations(places, 2))

    fitted = [
        (log1p(len(point.batch.prefill)), *map(log1p, point.batch.prefill[0]))
        for point in plan(budget_s=60.0).points
        if point.regime == "prefix" and not point.held_out
    ]
    ends = [(min(axis), max(axis)) for axis in zip(*fitted, strict=True)]
    rng = random.Random(1)
    draws = [[tuple(rng.uniform(*end) for end in ends) for _ in fitted] for _ in range(100)]
    assert closest(fitted) > sorted(map(closest, draws))[90]


def test_a_gpus_points_come_in_pairs_where_kernels_may_change() -> None:
    fitted = [point.batch for point in plan("cuda", budget_s=300.0).points if not point.held_out]
    for size in (64, 256, 1024):
        assert Batch(prefill=((size, 0),)) in fitted
        assert Batch(prefill=((size + 1, 0),)) in fitted
    for requests in (64, 128):
        pair = [
            {b.decode[0] for b in fitted if b.decode == b.decode[:1] * count and not b.prefill}
            for count in (requests, requests + 1)
        ]
        assert pair[0] & pair[1], "the same KV lengths on both sides"


@pytest.mark.parametrize("budget_s", [60.0, 100.0, 300.0])
def test_a_gpu_is_judged_by_some_twenty_points_of_the_expected_workload(budget_s: float) -> None:
    def off_middle(batches: list[Batch]) -> float:
        """Mean distance in log KV from the middle of a decode's lengths."""
        middle = (log1p(32) + log1p(32768)) / 2
        kv = [log1p(sum(b.decode) / len(b.decode)) for b in batches if b.decode and not b.prefill]
        return sum(abs(length - middle) for length in kv) / len(kv)

    made = plan("cuda", budget_s=budget_s)
    aside = [point.batch for point in made.points if point.held_out]
    assert 16 <= len(aside) <= 24
    assert off_middle(aside) < off_middle([p.batch for p in made.points if not p.held_out])


def test_what_was_not_planned_is_kept_with_the_share_of_work_it_stands_for() -> None:
    made = plan("cuda", budget_s=300.0)
    batches = {candidate.batch for candidate in made.spare}
    assert not batches & {point.batch for point in made.points}
    assert len(batches) == len(made.spare) > 500
    assert sum(candidate.weight for candidate in made.spare) == pytest.approx(1.0)
    decodes = {
        len(candidate.batch.decode): candidate.weight
        for candidate in made.spare
        if candidate.regime == "decode"
    }
    assert max(decodes, key=lambda requests: decodes[requests]) in range(4, 65)


# --- Expectations ---------------------------------------------------------------------------------


@given(
    new=st.integers(1, 4096),
    prefix=st.integers(0, 8192),
    kv=st.integers(1, 8192),
    more=st.integers(1, 4096),
)
def test_more_work_is_never_expected_to_take_less(
    new: int, prefix: int, kv: int, more: int
) -> None:
    for facts in DEVICES.values():
        guess = partial(guessed_pass_s, TINY, rates=guessed_rates(facts))
        base = guess(Batch(prefill=((new, prefix),), decode=(kv,)))
        assert 0 < base <= guess(Batch(prefill=((new + more, prefix),), decode=(kv,)))
        assert base <= guess(Batch(prefill=((new, prefix + more),), decode=(kv,)))
        assert base <= guess(Batch(prefill=((new, prefix),), decode=(kv + more,)))
        assert base <= guess(Batch(prefill=((new, prefix),), decode=(kv, more)))


def test_an_unknown_gpu_is_guessed_too() -> None:
    bare = msgspec.structs.replace(DEVICES["cuda"], peak_flops=None, peak_bytes_per_s=None)
    assert guessed_pass_s(TINY, Batch(decode=(1,)), guessed_rates(bare)) > 0


# --- Rounds ---------------------------------------------------------------------------------------


def test_a_rounds_order_is_a_permutation_that_can_be_repeated() -> None:
    assert sorted(visit_order(50, seed=1, round_=2)) == list(range(50))
    assert visit_order(50, seed=1, round_=2) == visit_order(50, seed=1, round_=2)
    assert visit_order(50, seed=1, round_=2) != visit_order(50, seed=1, round_=3)


@settings(deadline=None)
@given(
    cost_s=st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=40),
    left_s=st.floats(0.0, 100.0),
)
def test_visits_fit_the_time_and_favour_cheap_points(cost_s: list[float], left_s: float) -> None:
    wanted = wanted_visits(cost_s, [0] * len(cost_s), left_s=left_s, fewest=3, most=60)
    assert all(3 <= visits <= 60 for visits in wanted)
    if left_s >= 3 * sum(cost_s):
        assert sum(w * c for w, c in zip(wanted, cost_s, strict=True)) <= left_s * (1 + 1e-6)
    ordered = sorted(zip(cost_s, wanted, strict=True))
    assert all(a >= b for (_, a), (_, b) in pairwise(ordered))


def test_time_to_spare_gives_everybody_the_most() -> None:
    assert wanted_visits([0.1, 1.0], [0, 0], left_s=1e3, fewest=3, most=60) == [60, 60]


@pytest.mark.parametrize("wanted", [3, 7, 20, 60])
def test_a_point_is_due_as_often_as_it_is_wanted_and_evenly(wanted: int) -> None:
    rounds: list[int] = []
    for round_ in range(60):
        if due(wanted, len(rounds), round_=round_, rounds=60):
            rounds.append(round_)
    assert len(rounds) == wanted
    assert rounds[0] == 0
    gaps = [b - a for a, b in pairwise(rounds)]
    assert max(gaps) - min(gaps) <= 1
