"""Residual tables: multilinear interpolation on a small tensor grid, held at its edges.

The scalar path is plain Python (a bisection per axis and one product per corner); the vectorised
path does the same operations in the same order, so that both give the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from passtime.profiles.document import Residual
from passtime.sched.timing import FloatArray


class GridAxis:
    """Nodes of one axis; a single node stands for a constant axis."""

    __slots__ = ("array", "first", "inverse", "inverse_array", "last", "nodes", "top")

    def __init__(self, nodes: Sequence[float]) -> None:
        """``nodes`` ascend strictly."""
        self.nodes = [float(node) for node in nodes]
        if len(self.nodes) == 1:
            self.nodes.append(self.nodes[0] + 1.0)
        self.first, self.last = self.nodes[0], self.nodes[-1]
        self.top = len(self.nodes) - 2
        self.array = np.array(self.nodes)
        self.inverse_array = 1.0 / np.diff(self.array)
        self.inverse = self.inverse_array.tolist()

    def place(self, value: float) -> tuple[int, float]:
        """Cell and position in it (0 … 1); beyond the ends the ends."""
        if value <= self.first:
            return 0, 0.0
        if value >= self.last:
            return self.top, 1.0
        index = bisect_right(self.nodes, value) - 1
        return index, (value - self.nodes[index]) * self.inverse[index]

    def place_many(self, values: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
        """:meth:`place` for an array, bit for bit."""
        index = np.clip(np.searchsorted(self.array, values, side="right") - 1, 0, self.top)
        share = (values - self.array[index]) * self.inverse_array[index]
        share = np.where(values >= self.last, 1.0, np.where(values <= self.first, 0.0, share))
        return index, share


class Table:
    """One residual: the factor exp(log_factor) over two to four axes."""

    def __init__(self, residual: Residual, values: Sequence[float]) -> None:
        """``values`` per node of ``residual``'s grid, last axis fastest."""
        self.axes = [GridAxis(axis.nodes) for axis in residual.axes]
        grid = np.asarray(values).reshape([len(axis.nodes) for axis in residual.axes])
        for number, axis in enumerate(residual.axes):
            if len(axis.nodes) == 1:
                grid = np.repeat(grid, 2, axis=number)
        self.grid: FloatArray = grid
        self.flat: list[float] = grid.ravel().tolist()
        self.strides = [
            int(np.prod(grid.shape[number + 1 :], dtype=np.int64)) for number in range(grid.ndim)
        ]

    @classmethod
    def of_factors(cls, residual: Residual) -> Table:
        """The table of factors."""
        return cls(residual, np.exp(np.array(residual.log_factor)).tolist())

    @classmethod
    def of_spreads(cls, residual: Residual) -> Table:
        """The table of predictive standard deviations (natural log)."""
        return cls(residual, residual.log_spread)

    def at2(self, x: float, y: float) -> float:
        """Interpolated value of a table of two axes."""
        first, second = self.axes
        row, u = first.place(x)
        column, v = second.place(y)
        flat, start = self.flat, row * self.strides[0] + column
        below, above = start, start + self.strides[0]
        low = flat[below] + (flat[below + 1] - flat[below]) * v
        high = flat[above] + (flat[above + 1] - flat[above]) * v
        return low + (high - low) * u

    def at3(self, x: float, y: float, z: float) -> float:
        """Interpolated value of a table of three axes."""
        first, second, third = self.axes
        (i, t), (j, u), (k, v) = first.place(x), second.place(y), third.place(z)
        start = i * self.strides[0] + j * self.strides[1] + k
        low, high = self._plane(start, u, v), self._plane(start + self.strides[0], u, v)
        return low + (high - low) * t

    def at4(self, x: float, y: float, z: float, w: float) -> float:
        """Interpolated value of a table of four axes."""
        a, b, c, d = self.axes
        (i, s), (j, t), (k, u), (m, v) = a.place(x), b.place(y), c.place(z), d.place(w)
        across, along, step, _ = self.strides
        start = i * across + j * along + k * step + m
        low, high = self._plane(start, u, v), self._plane(start + along, u, v)
        near = low + (high - low) * t
        start += across
        low, high = self._plane(start, u, v), self._plane(start + along, u, v)
        return near + (low + (high - low) * t - near) * s

    def _plane(self, start: int, u: float, v: float) -> float:
        """Bilinear over the last two axes."""
        flat, above = self.flat, start + self.strides[-2]
        low = flat[start] + (flat[start + 1] - flat[start]) * v
        high = flat[above] + (flat[above + 1] - flat[above]) * v
        return low + (high - low) * u

    def at_many(self, *coordinates: FloatArray) -> FloatArray:
        """Interpolated values, one array per axis; the bits of the scalar methods."""
        places = [
            axis.place_many(values) for axis, values in zip(self.axes, coordinates, strict=True)
        ]
        return self._blend(places, ())

    def _blend(
        self,
        places: Sequence[tuple[npt.NDArray[np.intp], FloatArray]],
        chosen: tuple[npt.NDArray[np.intp], ...],
    ) -> FloatArray:
        if len(chosen) == len(places):
            corner: FloatArray = self.grid[chosen]
            return corner
        index, share = places[len(chosen)]
        low = self._blend(places, (*chosen, index))
        high = self._blend(places, (*chosen, index + 1))
        return low + (high - low) * share
