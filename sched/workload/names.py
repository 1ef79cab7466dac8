"""Names that users type for workloads; a module of its own, so that a parser loads nothing else."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

TraceFormat: TypeAlias = Literal["mooncake", "azure", "burstgpt", "vidur"]
Kind: TypeAlias = Literal["conversation", "code", "constant"]
TimeUnit: TypeAlias = Literal["s", "ms", "us"]

TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)
KINDS: tuple[Kind, ...] = get_args(Kind)
TIME_UNITS: tuple[TimeUnit, ...] = get_args(TimeUnit)
