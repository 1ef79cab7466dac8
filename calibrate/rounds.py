"""Which points a round visits, and in what order."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def visit_order(points: int, *, seed: int, round_: int) -> list[int]:
    """All point ids in the random order of a round: the same again after a resumption."""
    order = list(range(points))
    random.Random(f"{seed} {round_}").shuffle(order)
    return order


def wanted_visits(
    cost_s: Sequence[float], done: Sequence[int], *, left_s: float, fewest: int, most: int
) -> list[float]:
    """How often each point should have been visited when ``left_s`` more seconds are spent.

    Visits are dealt out by Neyman's rule for equal relative noise, ∝ 1/√cost: seconds go where
    they take the most variance away. Within ``fewest`` and ``most``, as far as the time allows.
    """

    def visits(scale: float) -> list[float]:
        return [min(max(scale / math.sqrt(cost), fewest), most) for cost in cost_s]

    def seconds(scale: float) -> float:
        dealt = zip(visits(scale), cost_s, done, strict=True)
        return sum(cost * max(0.0, wanted - have) for wanted, cost, have in dealt)

    low, high = 0.0, most * math.sqrt(max(cost_s))
    if seconds(high) <= left_s:
        return visits(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) <= left_s else (low, middle)
    return visits(low)


def due(wanted: float, done: int, *, round_: int, rounds: int) -> bool:
    """Whether a point falls behind its share of ``wanted`` visits if this round leaves it out."""
    return done < wanted * (round_ + 1) / rounds
