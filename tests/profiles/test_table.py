"""Interpolation: exact at nodes, held at edges, and the same bits for scalars and arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.profiles.document import Axis, Residual, TableAxis
from passtime.profiles.table import Table

NAMES: tuple[TableAxis, ...] = (
    "prefill_new_tokens",
    "prefill_pairs",
    "decode_requests",
    "decode_kv_tokens",
)


def table(axes: int, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    nodes = [sorted(set(np.exp(rng.uniform(0, 9, 5)).round(1).tolist())) for _ in range(axes)]
    count = int(np.prod([len(line) for line in nodes]))
    residual = Residual(
        axes=tuple(
            Axis(name=name, nodes=tuple(line)) for name, line in zip(NAMES, nodes, strict=False)
        ),
        log_factor=tuple(rng.normal(0, 0.2, count).tolist()),
        log_spread=(0.01,) * count,
    )
    return Table.of_factors(residual)


def at(table: Table, *place: float) -> float:
    if len(table.axes) == 2:
        return table.at2(*place)
    return table.at3(*place) if len(table.axes) == 3 else table.at4(*place)


@pytest.mark.parametrize("axes", [2, 3, 4])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 9))
def test_scalar_and_vectorised_agree_to_the_last_bit(
    axes: int, data: st.DataObject, seed: int
) -> None:
    made = table(axes, seed)
    sizes = st.floats(0.0, 2e4, allow_subnormal=False)
    nodes = [st.sampled_from(axis.nodes) for axis in made.axes]
    place = st.tuples(*(sizes | node for node in nodes))
    places = data.draw(st.lists(place, min_size=1, max_size=20))
    many = made.at_many(*(np.array(column) for column in zip(*places, strict=True)))
    assert many.tolist() == [at(made, *one) for one in places]


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_a_node_gives_its_own_value(axes: int) -> None:
    made = table(axes)
    for index in np.ndindex(made.grid.shape):
        place = [axis.nodes[i] for axis, i in zip(made.axes, index, strict=True)]
        assert at(made, *place) == pytest.approx(made.grid[index], rel=1e-14)


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_beyond_the_edges_the_edge_is_held(axes: int) -> None:
    made = table(axes)
    low, high = [axis.first for axis in made.axes], [axis.last for axis in made.axes]
    assert at(made, *(0.0 for _ in low)) == at(made, *low)
    assert at(made, *(1e12 for _ in high)) == at(made, *high)


def test_an_axis_of_one_node_is_constant() -> None:
    residual = Residual(
        axes=(
            Axis(name="decode_requests", nodes=(4.0,)),
            Axis(name="decode_kv_tokens", nodes=(1.0, 3.0)),
        ),
        log_factor=(0.0, float(np.log(3.0))),
        log_spread=(0.0, 0.0),
    )
    made = Table.of_factors(residual)
    assert [made.at2(x, 2.0) for x in (1.0, 4.0, 4.5, 99.0)] == pytest.approx([2.0] * 4)
