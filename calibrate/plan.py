"""What to measure: points that fill a box of batches, as many and as large as a budget allows.

Per regime the points are the corners of the box and then whatever lies farthest from all chosen
ones, in log(1 + x) of each axis (maximin, Johnson et al. 1990); a few sit at the usual tile sizes
and just off them; and points drawn from the expected workload are set aside, never to be fitted.
What was drawn and not planned is kept to choose from later. The same inputs and seed give the same
plan.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from passtime.calibrate.log import Batch, Point, Regime
from passtime.calibrate.workload import workload_density, workload_places
from passtime.errors import InputError
from passtime.profiles.device import DeviceFacts, DeviceKind
from passtime.profiles.shapes import ModelShape
from passtime.sched.timing import FloatArray

Coordinates: TypeAlias = tuple[float, ...]

CANDIDATES = 300  # random batches per regime to choose from
SHRINKINGS = [0.75**step for step in range(14)]  # factors of sizes and numbers to choose from
EQUAL_BELOW = 0.25  # spreads of KV lengths under this are none
SHORTEST_CHUNK = 4
SHORTEST_PREFIX = 32
SHORTEST_KV = 32
OFF_TILES = (64, 1, 128, -1)  # multiples of 64 plus one, of 128 less one


class Box(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest batch per axis.

    ``new_tokens`` of all requests of a pass, ``prefix_tokens`` and ``kv_tokens`` of one prefilling
    or decoding request, ``pool_tokens`` the KV of all.
    """

    new_tokens: int
    prefix_tokens: int
    prefill_requests: int
    decode_requests: int
    kv_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How large a plan is at its largest, and what share of the budget it may be sure to need.

    ``sure_share``: of the budget, for visiting every point as often as the clock demands;
    ``longest_share``: for one pass; ``refine_share``: kept back, from ``refine_from_s`` seconds
    up, for points chosen once the others are there. ``edges``: sizes x to measure as a pair, x and
    x + 1: prompt lengths and decoding requests.
    """

    box: Box
    points: int
    held_out: int
    fewest_points: int
    fewest_held_out: int
    sure_share: float
    longest_share: float
    memory_share: float
    refine_share: float = 0.0
    refine_from_s: float = 60.0
    edges: Mapping[Regime, tuple[int, ...]] = field(default_factory=dict)

    def refine_s(self, budget_s: float) -> float:
        """The seconds of a budget that are kept back."""
        return self.refine_share * budget_s if budget_s >= self.refine_from_s else 0.0


SIZINGS: dict[DeviceKind, Sizing] = {
    "cpu": Sizing(
        box=Box(
            new_tokens=2048,
            prefix_tokens=8192,
            prefill_requests=8,
            decode_requests=64,
            kv_tokens=8192,
            pool_tokens=131072,
        ),
        points=72,
        held_out=18,
        fewest_points=16,
        fewest_held_out=4,
        sure_share=0.5,
        longest_share=0.0125,
        memory_share=0.5,
    ),
    "cuda": Sizing(
        box=Box(
            new_tokens=8192,
            prefix_tokens=32768,
            prefill_requests=16,
            decode_requests=256,
            kv_tokens=32768,
            pool_tokens=524288,
        ),
        points=150,
        held_out=24,
        fewest_points=16,
        fewest_held_out=16,
        sure_share=0.85,
        longest_share=0.01,
        memory_share=0.9,
        refine_share=0.25,
        edges={"prefill": (64, 256, 1024, 4096), "decode": (16, 64, 128)},
    ),
}

SHARES: dict[Regime, float] = {"prefill": 0.24, "prefix": 0.16, "decode": 0.3, "mixed": 0.3}


class Rates(Struct, frozen=True, kw_only=True):
    """What a device is guessed to do: FLOP/s of linear layers and attention, bytes/s of weights
    and KV, seconds per pass and per request and layer."""

    flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    pass_s: float
    request_layer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a batch is expected to cost: pass, whole visit, and device memory."""

    pass_s: Callable[[Batch], float]
    visit_s: Callable[[float], float]
    memory_bytes: Callable[[Batch], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A batch that could be measured, and the share of the expected workload it stands for."""

    regime: Regime
    batch: Batch
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The points, the box they reach, and what they are expected to take (by point id).

    ``spare`` are batches like the points', for choosing more.
    """

    points: tuple[Point, ...]
    box: Box
    pass_s: tuple[float, ...]
    visit_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    spare: tuple[Candidate, ...] = ()

    @property
    def batches(self) -> list[Batch]:
        """Everything that may come to be measured."""
        return [*(point.batch for point in self.points), *(spare.batch for spare in self.spare)]

    @property
    def round_s(self) -> float:
        """Expected seconds of visiting every point once."""
        return sum(self.visit_s)


def guessed_rates(facts: DeviceFacts) -> Rates:
    """Rates before anything is measured: shares of the datasheet's, or those of a common CPU core.

    Only sizes and order of the plan hang on them; a bad guess costs rounds, not correctness.
    """
    if facts.kind == "cpu":
        return Rates(
            flops_per_s=5e10,
            attention_flops_per_s=4e10,
            bytes_per_s=5e9,
            pass_s=3e-4,
            request_layer_s=5e-5,
        )
    return Rates(
        flops_per_s=0.6 * (facts.peak_flops or 1e14),
        attention_flops_per_s=0.3 * (facts.peak_flops or 1e14),
        bytes_per_s=0.7 * (facts.peak_bytes_per_s or 5e11),
        pass_s=1e-4,
        request_layer_s=0.0,
    )


def guessed_pass_s(model: ModelShape, batch: Batch, rates: Rates) -> float:
    """Roofline guess: linear layers are bound by FLOPs or weights, attention by FLOPs or KV."""
    new_tokens = sum(new for new, _ in batch.prefill) + len(batch.decode)
    requests = len(batch.prefill) + len(batch.decode)
    pairs = sum(new * prefix + new * (new + 1) / 2 for new, prefix in batch.prefill)
    linear = model.attention_parameters_per_layer + model.active_ffn_parameters_per_layer
    head_flops = 2 * requests * model.hidden_size * model.vocab_size
    linear_s = max(
        (2 * new_tokens * model.layers * linear + head_flops) / rates.flops_per_s,
        model.weight_bytes / rates.bytes_per_s,
    )
    pair_s = 4 * model.layers * model.query_size / rates.attention_flops_per_s
    kv_s = model.kv_bytes_per_token / rates.bytes_per_s
    attention_s = pairs * pair_s + sum(batch.decode) * max(pair_s, kv_s)
    return rates.pass_s + linear_s + attention_s + requests * model.layers * rates.request_layer_s


def pool_tokens(batch: Batch) -> int:
    """KV slots that a batch occupies."""
    return sum(new + prefix for new, prefix in batch.prefill) + sum(kv + 1 for kv in batch.decode)


def make_plan(
    sizing: Sizing, costs: Costs, *, budget_s: float, memory_bytes: int, min_rounds: int, seed: int
) -> Plan:
    """The largest plan that ``budget_s`` seconds are expected to be enough for.

    Sizes of batches and, less so, numbers of points shrink until every point can be visited
    ``min_rounds`` times. InputError if not even the smallest batch fits ``memory_bytes``.
    """
    limit_bytes = int(sizing.memory_share * memory_bytes)

    @cache
    def shrunk(step: int) -> Plan:
        factor = SHRINKINGS[step]
        longest_s = factor * sizing.longest_share * budget_s
        return _fill(_scaled(sizing, factor), costs, longest_s, limit_bytes, seed)

    def fits(step: int) -> bool:
        return min_rounds * shrunk(step).round_s <= sizing.sure_share * budget_s

    last = len(SHRINKINGS) - 1  # what does not fit even then is measured in part
    return shrunk(bisect_left(range(last), True, key=fits))


def _scaled(sizing: Sizing, factor: float) -> Sizing:
    points = max(sizing.fewest_points, round(sizing.points * factor**0.5))
    wanted = max(sizing.fewest_held_out, round(sizing.held_out * points / sizing.points))
    return replace(sizing, points=points, held_out=min(wanted, 2 * points // 5))


def _fill(sizing: Sizing, costs: Costs, longest_s: float, limit_bytes: int, seed: int) -> Plan:
    smallest = min((Batch(prefill=((1, 0),)), Batch(decode=(1,))), key=costs.memory_bytes)
    if costs.memory_bytes(smallest) > limit_bytes:
        raise InputError(
            f"the model alone needs {costs.memory_bytes(smallest) / 2**30:.1f} GiB, and "
            f"{limit_bytes / 2**30:.1f} GiB of the device's memory may be used"
        )
    cheapest_s = max(costs.pass_s(Batch(prefill=((1, 0),))), costs.pass_s(Batch(decode=(1,))))
    longest_s = max(longest_s, 4 * cheapest_s)

    def feasible(batch: Batch) -> bool:
        return (
            pool_tokens(batch) <= sizing.box.pool_tokens
            and costs.pass_s(batch) <= longest_s
            and costs.memory_bytes(batch) <= limit_bytes
        )

    fitted: list[tuple[Regime, Batch]] = []
    held_out: list[tuple[Regime, Batch]] = []
    spare: list[Candidate] = []
    for number, (regime, share) in enumerate(SHARES.items()):
        space = _AXES[regime](sizing.box)
        rng = np.random.default_rng([seed, number])
        chosen, aside, others = _regime_batches(
            space,
            feasible,
            rng,
            points=max(2, round(share * sizing.points)),
            held_out=max(1, round(share * sizing.held_out)),
            edges=sizing.edges.get(regime, ()),
        )
        fitted += [(regime, batch) for batch in chosen]
        held_out += [(regime, batch) for batch in aside]
        spare += _weighted(regime, share, space, others)
    batches = [*fitted, *held_out]
    pass_s = tuple(costs.pass_s(batch) for _, batch in batches)
    return Plan(
        points=tuple(
            Point(id=number, regime=regime, batch=batch, held_out=number >= len(fitted))
            for number, (regime, batch) in enumerate(batches)
        ),
        box=_reached([batch for _, batch in batches]),
        pass_s=pass_s,
        visit_s=tuple(costs.visit_s(seconds) for seconds in pass_s),
        memory_bytes=tuple(costs.memory_bytes(batch) for _, batch in batches),
        spare=tuple(spare),
    )


def _weighted(
    regime: Regime, share: float, space: _Space, places: dict[Batch, Coordinates]
) -> Iterator[Candidate]:
    """What was drawn evenly over a regime, with weights that sum to the regime's share."""
    if not places:
        return
    density = workload_density(np.log1p(np.array(list(places.values()))), *space.bounds)
    for batch, weight in zip(places, (share * density / density.sum()).tolist(), strict=True):
        yield Candidate(regime=regime, batch=batch, weight=weight)


# --- One regime -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """Axes of a regime, and how a place in it becomes a batch.

    ``low`` and ``high`` bound each axis; places are real numbers in between, log-uniform.
    """

    low: Coordinates
    high: Coordinates
    batch: Callable[[Coordinates], Batch | None]
    off_tile: Callable[[int], Batch] | None = None
    edge: Callable[[int], Batch] | None = None

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Both ends of each axis as log(1 + x)."""
        return np.log1p(np.array(self.low)), np.log1p(np.array(self.high))


def _regime_batches(
    space: _Space,
    feasible: Callable[[Batch], bool],
    rng: np.random.Generator,
    *,
    points: int,
    held_out: int,
    edges: Sequence[int],
) -> tuple[list[Batch], list[Batch], dict[Batch, Coordinates]]:
    """Batches to fit, batches to hold out and where what is left lies; all different."""
    low, high = space.bounds

    def drawn(logs: FloatArray) -> dict[Batch, Coordinates]:
        return _distinct(space, [tuple(place) for place in np.expm1(logs).tolist()], feasible)

    candidates = drawn(rng.uniform(low, high, size=(CANDIDATES, len(low))))
    corners = _distinct(space, list(_corners(space, feasible)), feasible)
    expected = drawn(workload_places(rng, low, high, CANDIDATES))
    aside = list(expected or candidates)[: min(held_out, max(1, len(candidates) // 2))]
    for batch in aside:
        candidates.pop(batch, None)
        corners.pop(batch, None)
    beside = [*_edges(space, points, edges, feasible), *_off_tile(space, points)]
    beside = [batch for batch in dict.fromkeys(beside) if feasible(batch) and batch not in aside]
    beside = beside[: points // 4]
    wanted = points - len(beside)
    chosen = _farthest(corners, {}, low, high, min(wanted // 2, len(corners)))
    rest = {batch: place for batch, place in candidates.items() if batch not in beside}
    chosen |= _farthest(rest, chosen, low, high, wanted - len(chosen))
    fitted = [*(batch for batch in chosen if batch not in beside), *beside]
    return fitted, aside, {b: place for b, place in rest.items() if b not in chosen}


def _distinct(
    space: _Space, places: Sequence[Coordinates], feasible: Callable[[Batch], bool]
) -> dict[Batch, Coordinates]:
    found: dict[Batch, Coordinates] = {}
    for place in places:
        batch = space.batch(place)
        if batch is not None and batch not in found and feasible(batch):
            found[batch] = place
    return found


def _corners(space: _Space, feasible: Callable[[Batch], bool]) -> Iterator[Coordinates]:
    """Corners of the box; one that is out of reach is drawn in towards the low corner."""
    for ends in itertools.product(*zip(space.low, space.high, strict=True)):
        for step in range(20):
            place = tuple(
                low * (end / low) ** (1 - step / 20) if low else end * (1 - step / 20)
                for low, end in zip(space.low, ends, strict=True)
            )
            batch = space.batch(place)
            if batch is not None and feasible(batch):
                yield place
                break


def _farthest(
    candidates: dict[Batch, Coordinates],
    chosen: dict[Batch, Coordinates],
    low: FloatArray,
    high: FloatArray,
    count: int,
) -> dict[Batch, Coordinates]:
    """``count`` candidates, each the one farthest from all before it and from ``chosen``."""
    batches = list(candidates)
    if not batches or count <= 0:
        return {}
    span = np.where(high > low, high - low, 1.0)
    place = np.log1p(np.array(list(candidates.values()))) / span
    distance = np.full(len(batches), np.inf)
    for other in chosen.values():
        nearer = ((place - np.log1p(np.array(other)) / span) ** 2).sum(axis=1)
        distance = np.minimum(distance, nearer)
    picked: dict[Batch, Coordinates] = {}
    for _ in range(min(count, len(batches))):
        best = int(np.argmax(distance))
        picked[batches[best]] = candidates[batches[best]]
        distance = np.minimum(distance, ((place - place[best]) ** 2).sum(axis=1))
        distance[best] = -1.0
    return picked


def _edges(
    space: _Space, points: int, sizes: Sequence[int], feasible: Callable[[Batch], bool]
) -> Iterator[Batch]:
    """Pairs of batches, x and x + 1 large: kernels change between them."""
    if space.edge is None or points < 8:
        return
    for size in sizes:
        pair = [space.edge(size), space.edge(size + 1)]
        if all(map(feasible, pair)):
            yield from pair


def _off_tile(space: _Space, points: int) -> list[Batch]:
    """Batches one token beside a multiple of the usual tiles: a quarter of the points."""
    if space.off_tile is None or points < 8:
        return []
    largest = space.high[-1]
    sizes = [
        multiple * tile + beside
        for tile, beside in zip(OFF_TILES[::2], OFF_TILES[1::2], strict=True)
        for multiple in (1, 4, 16, 64)
        if multiple * tile + beside <= largest
    ]
    return [space.off_tile(size) for size in sizes[: points // 4]]


# --- The regimes' axes ----------------------------------------------------------------------------


def _prefill_axes(box: Box) -> _Space:
    """Requests and tokens per request; nothing cached."""

    def batch(place: Coordinates) -> Batch | None:
        requests, new = _whole(place)
        return Batch(prefill=((new, 0),) * requests) if requests * new <= box.new_tokens else None

    return _Space(
        low=(1, SHORTEST_CHUNK),
        high=(box.prefill_requests, box.new_tokens),
        batch=batch,
        off_tile=lambda size: Batch(prefill=((size, 0),)),
        edge=lambda size: Batch(prefill=((size, 0),)),
    )


def _prefix_axes(box: Box) -> _Space:
    """Requests, new tokens and cached tokens per request."""

    def batch(place: Coordinates) -> Batch | None:
        requests, new, prefix = _whole(place)
        if requests * new > box.new_tokens:
            return None
        return Batch(prefill=((new, prefix),) * requests)

    return _Space(
        low=(1, SHORTEST_CHUNK, SHORTEST_PREFIX),
        high=(max(1, box.prefill_requests // 2), box.new_tokens, box.prefix_tokens),
        batch=batch,
    )


def _decode_axes(box: Box) -> _Space:
    """Requests, their mean KV length, and its spread."""

    def batch(place: Coordinates) -> Batch | None:
        requests, mean = _whole(place[:2])
        decode = _lengths(requests, mean, place[2])
        return Batch(decode=decode) if max(decode) <= box.kv_tokens else None

    middle = round((SHORTEST_KV * box.kv_tokens) ** 0.5)
    return _Space(
        low=(1, SHORTEST_KV, 0),
        high=(box.decode_requests, box.kv_tokens, 1),
        batch=batch,
        edge=lambda requests: Batch(decode=(middle,) * requests),
    )


def _mixed_axes(box: Box) -> _Space:
    """One chunk's new and cached tokens, and the decodes beside it."""

    def batch(place: Coordinates) -> Batch | None:
        new, prefix, requests, mean = _whole(place[:4])
        decode = _lengths(requests, mean, place[4])
        if new + requests > box.new_tokens or max(decode) > box.kv_tokens:
            return None
        return Batch(prefill=((new, prefix if prefix >= SHORTEST_PREFIX else 0),), decode=decode)

    return _Space(
        low=(SHORTEST_CHUNK, 1, 1, SHORTEST_KV, 0),
        high=(box.new_tokens, box.prefix_tokens, box.decode_requests, box.kv_tokens, 1),
        batch=batch,
    )


_AXES: dict[Regime, Callable[[Box], _Space]] = {
    "prefill": _prefill_axes,
    "prefix": _prefix_axes,
    "decode": _decode_axes,
    "mixed": _mixed_axes,
}


def _whole(place: Sequence[float]) -> list[int]:
    return [max(1, round(value)) for value in place]


def _lengths(requests: int, mean: int, spread: float) -> tuple[int, ...]:
    """KV lengths from mean × (1 - spread) to mean × (1 + spread), evenly; small spreads are none.

    Equal lengths tell the cost of a request from that of its KV, unequal ones what the longest
    costs: a plan needs both.
    """
    if requests == 1 or spread < EQUAL_BELOW:
        return (mean,) * requests
    steps = [2 * index / (requests - 1) - 1 for index in range(requests)]
    return tuple(max(1, round(mean * (1 + spread * step))) for step in steps)


def _reached(batches: Sequence[Batch]) -> Box:
    """The largest value per axis over all points."""
    return Box(
        new_tokens=max(
            sum(new for new, _ in batch.prefill) + len(batch.decode) for batch in batches
        ),
        prefix_tokens=max(prefix for batch in batches for _, prefix in [*batch.prefill, (0, 0)]),
        prefill_requests=max(len(batch.prefill) for batch in batches),
        decode_requests=max(len(batch.decode) for batch in batches),
        kv_tokens=max(kv for batch in batches for kv in (*batch.decode, 0)),
        pool_tokens=max(pool_tokens(batch) for batch in batches),
    )
