"""LLMServingSim's profiles: vLLM's attention over mixed batches, other operators by tokens.

:func:`read` takes ``attention.csv`` (one call of one layer) or ``skew.csv`` (unequal decode
lengths: per row the mixture, and all at its longest) as they stand. :func:`whole_passes` composes
whole passes out of a folder: L layers of attention, norms, projections, activation, then LM head
and sampler, each interpolated at its own size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from passtime.calibrate.importers.places import device_in, required_model
from passtime.calibrate.importers.table import ImportedTable, point_of
from passtime.calibrate.importers.textfile import Faults, Row, rows
from passtime.profiles.document import EngineFacts, MeasuredPoint
from passtime.profiles.shapes import ModelShape
from passtime.sched.timing import FloatArray

_ATTENTION = {"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"}
_SKEW = {"regime", "n", "nb", "pc", "kp", "kvs", "kv_big", "t_skew_us"}
_LAYER = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
SKEW_REPEATS = 3
_NORM, _NORMS_PER_LAYER = "layernorm", 2


def recognises(header: Sequence[str]) -> bool:
    """Attention or skew."""
    return set(header) >= _ATTENTION or set(header) >= _SKEW


def read(path: Path) -> ImportedTable:
    """Attention calls of one layer; hardware, model and parallelism are the folders above."""
    faults, points, lines = Faults(str(path)), [], []
    for row in rows(path, faults):
        found = _skewed(row) if "t_skew_us" in row.cells else [_attention(row)]
        points += found
        lines += [row.line] * len(found)
    faults.refuse()
    attention = path.with_name(path.name.replace("skew", "attention"))
    return ImportedTable(
        source=str(path),
        points=tuple(points),
        lines=tuple(lines),
        model=_one_layer(required_model(path)),
        device=device_in(path),
        engine=EngineFacts(timed_part="attention"),
        reference=attention if attention != path and attention.exists() else None,
    )


def whole_passes(folder: Path, *, unequal: bool = False) -> ImportedTable:
    """Whole passes of the model in ``folder`` (HARDWARE/MODEL/tpN), one per attention row.

    ``unequal`` adds the mixtures of skew.csv, whose times are sums over three repeats.
    """
    table = read(folder / "attention.csv.gz")
    if unequal:
        table = _with_mixtures(table, read(folder / "skew.csv.gz"))
    model = required_model(folder / "attention.csv.gz")
    dense = _curves(folder / "dense.csv.gz", "tokens")
    tail = _curves(folder / "per_sequence.csv.gz", "sequences")
    measured = min(curve[0].max() for curve in dense.values())
    tokens = np.array([p.prefill_new_tokens + p.decode_requests for p in table.points], float)
    requests = np.array([p.prefill_requests + p.decode_requests for p in table.points], float)
    attention = np.array([p.latency_ms for p in table.points])
    layer = _NORMS_PER_LAYER * _at(dense, _NORM, tokens)
    layer += sum(_at(dense, name, tokens) for name in _LAYER)
    once = _at(dense, "embedding", tokens) + _at(dense, "final_layernorm", tokens)
    once += _at(tail, "lm_head", requests) + _at(tail, "sampler", requests)
    total = model.layers * (layer / 1e3 + attention) + once / 1e3
    kept = np.flatnonzero(tokens <= measured)
    return ImportedTable(
        source=str(folder),
        points=tuple(
            msgspec.structs.replace(table.points[index], latency_ms=float(total[index]))
            for index in kept
        ),
        lines=tuple(table.lines[index] for index in kept),
        model=model,
        device=table.device,
        notes=("whole passes composed of one measured layer and its tail",),
    )


def _with_mixtures(table: ImportedTable, skew: ImportedTable) -> ImportedTable:
    mixtures = [
        (msgspec.structs.replace(point, latency_ms=point.latency_ms / SKEW_REPEATS), line)
        for point, line in zip(skew.points, skew.lines, strict=True)
        if point.decode_requests * point.decode_kv_max > point.decode_kv_tokens
    ]
    return replace(
        table,
        points=table.points + tuple(point for point, _ in mixtures),
        lines=table.lines + tuple(line for _, line in mixtures),
    )


def _attention(row: Row) -> MeasuredPoint:
    new, decodes = row.count("prefill_chunk"), row.count("n_decode")
    return point_of(
        prompts=1 if new else 0,
        new_tokens=new,
        prefix_tokens=row.count("kv_prefill") if new else 0,
        decodes=decodes,
        kv_tokens=decodes * row.count("kv_decode"),
        latency_ms=row.duration("time_us") / 1e3,
    )


def _skewed(row: Row) -> list[MeasuredPoint]:
    """n decodes, nb of them of kv_big tokens and the rest of kvs; and n of kv_big tokens."""
    decodes, big = row.count("n"), row.count("nb")
    longest, rest = row.count("kv_big"), row.count("kvs")
    new = row.count("pc")
    prefix = row.count("kp") if new else 0
    prompts = 1 if new else 0
    return [
        point_of(
            prompts=prompts,
            new_tokens=new,
            prefix_tokens=prefix,
            decodes=decodes,
            kv_tokens=kv_tokens,
            kv_max=longest,
            latency_ms=row.duration(name) / 1e3,
        )
        for name, kv_tokens in (
            ("t_skew_us", big * longest + (decodes - big) * rest),
            ("t_max_us", decodes * longest),
        )
    ]


def _one_layer(model: ModelShape) -> ModelShape:
    return msgspec.structs.replace(model, layers=1)


def _curves(path: Path, size: str) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Per operator: sizes ascending, and the mean time in µs at each."""
    faults = Faults(str(path))
    times: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows(path, faults):
        times[str(row.cells["layer"])][row.count(size)].append(row.duration("time_us"))
    faults.refuse()
    return {
        name: (
            np.array(sorted(curve), dtype=float),
            np.array([float(np.mean(curve[at])) for at in sorted(curve)]),
        )
        for name, curve in times.items()
    }


def _at(
    curves: dict[str, tuple[FloatArray, FloatArray]], name: str, sizes: FloatArray
) -> FloatArray:
    return np.interp(sizes, *curves[name])
