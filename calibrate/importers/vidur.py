"""Vidur's attention tables: one attention call of one layer per row, times in ms over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from passtime.calibrate.importers.places import device_in
from passtime.calibrate.importers.table import ImportedTable, point_of
from passtime.calibrate.importers.textfile import Faults, Row, rows
from passtime.profiles.document import EngineFacts, MeasuredPoint
from passtime.profiles.shapes import ModelShape

_NEEDED = {"prefill_chunk_size", "kv_cache_size", "is_prefill", "n_q_head", "n_kv_head", "n_embd"}

_NO_SHAPE = ModelShape(
    name="none", layers=1, hidden_size=1, heads=1, kv_heads=1, head_dim=1, ffn_size=1, vocab_size=1
)


def recognises(header: Sequence[str]) -> bool:
    """The columns of Vidur's attention profiler."""
    return set(header) >= _NEEDED


def read(path: Path) -> ImportedTable:
    """All rows of one geometry; a table of several is refused."""
    faults, points, lines = Faults(str(path)), [], []
    shape: ModelShape | None = None
    for row in rows(path, faults):
        found = _shape(row)
        if shape is None:
            shape = found
        elif found != shape:
            faults.add(row.line, f"a second geometry ({found.name}) in one table")
            continue
        points.append(_point(row))
        lines.append(row.line)
    faults.refuse()
    return ImportedTable(
        source=str(path),
        points=tuple(points),
        lines=tuple(lines),
        model=shape,
        device=device_in(path),
        engine=EngineFacts(timed_part="attention"),
    )


def _shape(row: Row) -> ModelShape:
    """One layer of the geometry, as one tensor-parallel rank has it."""
    ranks = max(row.count("num_tensor_parallel_workers", default=1), 1)
    heads, kv_heads, hidden = (row.count(name) for name in ("n_q_head", "n_kv_head", "n_embd"))
    share = max(kv_heads // ranks, 1)
    if not heads or not kv_heads or hidden % heads or heads % ranks or heads // ranks % share:
        row.faults.add(row.line, f"no geometry: {heads} heads, {kv_heads} KV heads, {ranks} ranks")
        return _NO_SHAPE
    return ModelShape(
        name=f"attention-{heads}x{kv_heads}x{hidden // heads}",
        layers=1,
        hidden_size=hidden,
        heads=heads // ranks,
        kv_heads=share,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        vocab_size=1,
        tensor_parallel=ranks,
    )


def _point(row: Row) -> MeasuredPoint:
    prefill = str(row.cells["is_prefill"]).strip().lower() == "true"
    name = "time_stats.attn_prefill" if prefill else "time_stats.attn_decode"
    latency = row.duration(f"{name}.median")
    spread = 100.0 * row.number(f"{name}.std", default=0.0) / latency
    batch, kv_tokens = row.count("batch_size"), row.count("kv_cache_size")
    if prefill:
        return point_of(
            prompts=batch,
            new_tokens=row.count("prefill_chunk_size"),
            prefix_tokens=kv_tokens,
            latency_ms=latency,
            spread_percent=spread,
        )
    return point_of(
        decodes=batch, kv_tokens=batch * kv_tokens, latency_ms=latency, spread_percent=spread
    )
