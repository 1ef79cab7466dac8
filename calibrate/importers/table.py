"""What an importer returns: measured points and what they were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import EngineFacts, MeasuredPoint, Regime
from passtime.profiles.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTable:
    """Points of one device and one model. ``device`` or ``model`` is None where a file is silent.

    ``lines``: the line of every point in its file, for messages. ``reference``: another file that
    measured some of the same shapes, to be compared with.
    """

    source: str
    points: tuple[MeasuredPoint, ...]
    lines: tuple[int, ...]
    model: ModelShape | None = None
    device: DeviceFacts | None = None
    engine: EngineFacts = EngineFacts()  # noqa: RUF009  (frozen)
    notes: tuple[str, ...] = ()
    reference: Path | None = None


def point_of(
    *,
    prompts: int = 0,
    new_tokens: int = 0,
    prefix_tokens: int = 0,
    decodes: int = 0,
    kv_tokens: int = 0,
    kv_max: int | None = None,
    latency_ms: float,
    spread_percent: float | None = None,
    samples: int = 1,
) -> MeasuredPoint:
    """A point of ``prompts`` equal prompts and ``decodes`` decoding requests.

    ``new_tokens`` and ``prefix_tokens`` are per prompt; ``kv_tokens`` is the sum over decodes and
    ``kv_max`` the longest (default: all equal).
    """
    regime: Regime = "mixed" if prompts and decodes else "prefill" if prompts else "decode"
    pairs = new_tokens * prefix_tokens + new_tokens * (new_tokens + 1) // 2
    return MeasuredPoint(
        regime=regime,
        prefill_requests=prompts,
        prefill_new_tokens=prompts * new_tokens,
        prefill_prefix_tokens=prompts * prefix_tokens,
        prefill_pairs=prompts * pairs,
        decode_requests=decodes,
        decode_kv_tokens=kv_tokens,
        decode_kv_max=-(-kv_tokens // decodes) if kv_max is None and decodes else kv_max or 0,
        latency_ms=latency_ms,
        spread_percent=spread_percent,
        samples=samples,
    )
