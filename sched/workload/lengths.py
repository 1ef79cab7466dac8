"""Prompt and output lengths of real traffic, as numbers: quantiles and how the two go together.

A table holds quantiles of both lengths and their rank correlation; a sample draws
correlated ranks (a Gaussian copula) and reads both lengths off the quantiles. The tables that
ship are in ``lengths.json``; ``python -m passtime.sched.workload.lengths FOLDER`` prints that
file anew from the traces in a folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.random import Generator

from passtime.sched.timing import FloatArray, IntArray
from passtime.sched.workload.formats import load_trace

# Evenly spaced, and closer together in the last 1/256: that is where the longest requests are.
RANKS = np.concatenate([np.arange(256) / 256, 1.0 - 0.5 ** np.arange(9, 14), [1.0]])


class LengthTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lengths of one kind of traffic, in tokens.

    ``input_tokens`` and ``output_tokens`` are the quantiles at ``RANKS``, ascending;
    ``rank_correlation`` is Spearman's, between -1 and 1; ``requests`` is how many were seen.
    """

    source: str
    requests: int
    rank_correlation: float
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]

    def sample(self, generator: Generator, count: int) -> tuple[IntArray, IntArray]:
        """``count`` (input, output) lengths, each within the range that was seen."""
        inputs, outputs = _correlated_ranks(generator, count, self.rank_correlation)
        return _quantile(self.input_tokens, inputs), _quantile(self.output_tokens, outputs)


def measure_lengths(
    input_tokens: Sequence[int], output_tokens: Sequence[int], *, source: str
) -> LengthTable:
    """The table of a trace with these lengths, one entry per request."""
    inputs, outputs = np.asarray(input_tokens), np.asarray(output_tokens)
    correlation = np.corrcoef(_mean_ranks(inputs), _mean_ranks(outputs))[0, 1]
    return LengthTable(
        source=source,
        requests=len(inputs),
        rank_correlation=round(float(correlation), 4),
        input_tokens=tuple(np.quantile(inputs, RANKS).round(2).tolist()),
        output_tokens=tuple(np.quantile(outputs, RANKS).round(2).tolist()),
    )


def shipped_lengths() -> dict[str, LengthTable]:
    """The tables that ship, by the kind of traffic."""
    text = (files("passtime.sched.workload") / "lengths.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, LengthTable])


def _mean_ranks(values: IntArray) -> FloatArray:
    """Rank of every value, ties at the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: FloatArray = (last - (counts - 1) / 2.0)[inverse]
    return ranks


def _correlated_ranks(
    generator: Generator, count: int, rank_correlation: float
) -> tuple[FloatArray, FloatArray]:
    """Two uniform samples in (0, 1) whose rank correlation is the given one."""
    pearson = 2.0 * math.sin(math.pi * rank_correlation / 6.0)
    first, other = generator.standard_normal((2, count))
    second = pearson * first + math.sqrt(1.0 - pearson * pearson) * other
    return _normal_cdf(first), _normal_cdf(second)


def _normal_cdf(values: FloatArray) -> FloatArray:
    # math.erf in a loop: scipy must not be loaded here, and a thousand take half a millisecond.
    return np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in values.tolist()])


def _quantile(table: tuple[float, ...], ranks: FloatArray) -> IntArray:
    return np.rint(np.interp(ranks, RANKS, table)).astype(np.int64)


TRACES = {"conversation": "splitwise_conv.csv.gz", "code": "splitwise_code.csv.gz"}


def tables_of(folder: Path) -> dict[str, LengthTable]:
    """The tables of the traces in ``folder``, as they ship. Raises TraceError."""
    tables = {}
    for kind, name in TRACES.items():
        workload = load_trace(folder / name).workload
        tables[kind] = measure_lengths(
            workload.input_tokens,
            workload.output_tokens,
            source=f"Azure LLM inference trace 2023, {kind} (Patel et al., Splitwise, ISCA 2024; "
            "CC-BY 4.0, github.com/Azure/AzurePublicDataset), as processed for Vidur (MIT, "
            f"github.com/microsoft/vidur): {name.removesuffix('.gz')}",
        )
    return tables


def main(folder: str) -> None:
    """Print ``lengths.json`` as it comes from the traces in ``folder``."""
    lines = [
        f'"{kind}": {msgspec.json.encode(table).decode()}'
        for kind, table in tables_of(Path(folder)).items()
    ]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1])
