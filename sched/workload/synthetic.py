"""Synthetic workloads: lengths, arrivals and shared prefixes drawn from one seed (R-35)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.random import PCG64, Generator, SeedSequence

from passtime.errors import TraceError
from passtime.sched.timing import FloatArray
from passtime.sched.workload.lengths import shipped_lengths
from passtime.sched.workload.names import KINDS, Kind
from passtime.sched.workload.rows import Workload

# Small, so that a shared prefix comes close to the share asked for in short prompts too.
BLOCK_SIZE = 16


class SyntheticLoad(Struct, frozen=True, kw_only=True):
    """What to draw; lengths in tokens. Raises TraceError for what describes no workload.

    ``kind``                 conversation and code have lengths like those of the Azure traces,
                             constant takes ``input_len`` and ``output_len`` for all.
    ``request_rate``         requests per second; infinite: all arrive at time 0.
    ``burstiness``           shape of the gamma-distributed intervals: 1 = Poisson arrivals,
                             smaller = burstier.
    ``constant_intervals``   equal intervals instead.
    ``shared_prefix_ratio``  share of every prompt that is common to its group, rounded to whole
                             blocks of 16 tokens; each prompt draws one of ``num_prefix_groups``.
    """

    kind: Kind
    num_prompts: int
    request_rate: float = math.inf
    burstiness: float = 1.0
    constant_intervals: bool = False
    input_len: int | None = None
    output_len: int | None = None
    shared_prefix_ratio: float = 0.0
    num_prefix_groups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse nonsense, and settings that would change nothing."""
        for fault in self._faults():
            raise TraceError(fault)

    def _faults(self) -> Iterator[str]:
        if self.kind not in KINDS:
            yield f"workload: expected one of {', '.join(KINDS)}, found {self.kind!r}"
        if self.num_prompts < 1:
            yield f"num_prompts must be positive, found {self.num_prompts}"
        if self.seed < 0:
            yield f"seed must be >= 0, found {self.seed}"
        if not self.request_rate > 0:
            yield f"request_rate must be positive (inf = all at once), found {self.request_rate}"
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            yield f"burstiness must be finite and positive, found {self.burstiness}"
        if self.constant_intervals and self.burstiness != 1.0:
            yield "constant intervals have no burstiness: give one of the two"
        if math.isinf(self.request_rate) and (self.constant_intervals or self.burstiness != 1.0):
            yield "burstiness and constant intervals need a finite request_rate"
        if not 0.0 <= self.shared_prefix_ratio <= 1.0:
            yield f"shared_prefix_ratio must be in 0 … 1, found {self.shared_prefix_ratio}"
        if self.num_prefix_groups < 1:
            yield f"num_prefix_groups must be positive, found {self.num_prefix_groups}"
        if self.num_prefix_groups > 1 and not self.shared_prefix_ratio:
            yield "num_prefix_groups needs a shared_prefix_ratio above 0"
        yield from self._length_faults()

    def _length_faults(self) -> Iterator[str]:
        if self.kind != "constant":
            if self.input_len is not None or self.output_len is not None:
                yield f"input_len and output_len are for constant: {self.kind} draws its lengths"
        elif self.input_len is None or self.output_len is None:
            yield "a constant workload needs input_len and output_len"
        elif self.input_len < 1:
            yield f"input_len must be positive, found {self.input_len}"
        elif self.output_len < 0:
            yield f"output_len must be >= 0, found {self.output_len}"


def synthetic(load: SyntheticLoad) -> Workload:
    """The workload that ``load`` describes; equal descriptions give equal workloads.

    Lengths, arrivals and groups have random streams of their own: another request rate leaves
    the lengths as they are.
    """
    for_lengths, for_arrivals, for_groups = (
        Generator(PCG64(stream)) for stream in SeedSequence(load.seed).spawn(3)
    )
    inputs, outputs = _lengths(for_lengths, load)
    arrivals = _arrivals_ms(for_arrivals, load)
    blocks = None
    if load.shared_prefix_ratio > 0:
        groups = for_groups.integers(load.num_prefix_groups, size=load.num_prompts).tolist()
        blocks = _shared_blocks(inputs, groups, load.shared_prefix_ratio)
    return Workload(
        source=f"{load.kind} workload",
        timestamp_ms=arrivals.tolist(),
        input_tokens=inputs,
        output_tokens=outputs,
        block_ids=blocks,
        trace_block_size=BLOCK_SIZE,
    )


def _lengths(generator: Generator, load: SyntheticLoad) -> tuple[list[int], list[int]]:
    if load.input_len is not None and load.output_len is not None:
        return [load.input_len] * load.num_prompts, [load.output_len] * load.num_prompts
    inputs, outputs = shipped_lengths()[load.kind].sample(generator, load.num_prompts)
    return inputs.tolist(), outputs.tolist()


def _arrivals_ms(generator: Generator, load: SyntheticLoad) -> FloatArray:
    """Arrival times ascending from 0."""
    if math.isinf(load.request_rate):
        return np.zeros(load.num_prompts)
    interval_ms = 1000.0 / load.request_rate
    arrivals = np.zeros(load.num_prompts)
    if load.constant_intervals:
        arrivals[1:] = np.arange(1, load.num_prompts) * interval_ms
    else:
        shape = load.burstiness
        gaps = generator.gamma(shape, interval_ms / shape, size=load.num_prompts - 1)
        arrivals[1:] = np.cumsum(gaps)
    return arrivals


def _shared_blocks(inputs: list[int], groups: list[int], ratio: float) -> list[list[int]]:
    """Block ids per prompt: first those of its group, then ids that nobody else has."""
    sizes = [-(-tokens // BLOCK_SIZE) for tokens in inputs]
    longest = max(sizes)
    fresh = (max(groups) + 1) * longest
    blocks = []
    for size, group in zip(sizes, groups, strict=True):
        shared = math.floor(size * ratio + 0.5)
        own = size - shared
        start = group * longest
        blocks.append([*range(start, start + shared), *range(fresh, fresh + own)])
        fresh += own
    return blocks
