"""The ``dynamo_profile`` provider: NVIDIA's ``.npz`` latency tables, read and evaluated its way.

Prefill is linear in the pass' new tokens, decode bilinear in (KV tokens, mean context); outside the
grid the edge's line goes on without limit. Error texts are the reference's.
"""

from __future__ import annotations

import io
import os
import zipfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from passtime.errors import ConfigError, DocumentError
from passtime.profiles.reading import convert_document
from passtime.sched.timing import FloatArray, IntArray

PREFILL_FLOOR_MS = 0.0
DECODE_FLOOR_MS = 1.0


class DynamoConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``{"path": FILE}``, relative to the current directory."""

    path: str


def from_config(config: Any, *, source: str) -> DynamoTiming:
    """The table that ``config`` names. ConfigError for the config, DocumentError for the file."""
    read = convert_document(config, DynamoConfig, source=source, error=ConfigError)
    return DynamoTiming.load(Path(read.path))


class DynamoTiming:
    """A prefill curve and a decode surface."""

    def __init__(
        self,
        *,
        prefill_isl: FloatArray,
        prefill_ttft_ms: FloatArray,
        decode_active_kv_tokens: FloatArray,
        decode_context_length: FloatArray,
        decode_itl: FloatArray,
    ) -> None:
        """Arrays as in the file; DocumentError where their shapes or axes do not fit."""
        _check_prefill(prefill_isl, prefill_ttft_ms)
        _check_decode(decode_active_kv_tokens, decode_context_length, decode_itl)
        self._tokens = prefill_isl.tolist()
        self._prefill_ms = prefill_ttft_ms.tolist()
        self._kv_axis, self._context_axis, self._grid = (
            decode_active_kv_tokens,
            decode_context_length,
            decode_itl,
        )
        self._kv_nodes = decode_active_kv_tokens.tolist()
        self._context_nodes = decode_context_length.tolist()
        self._decode_ms = decode_itl.tolist()

    @classmethod
    def load(cls, path: Path) -> DynamoTiming:
        """The table in the file at ``path``. Raises DocumentError."""
        try:
            file = path.open("rb")
        except OSError as fault:
            raise DocumentError(
                f'Failed to open NPZ file: "{path}": {os.strerror(fault.errno or 0)} '
                f"(os error {fault.errno})"
            ) from None
        with file:
            try:
                archive = zipfile.ZipFile(file)
            except (zipfile.BadZipFile, OSError) as fault:
                raise DocumentError(
                    f'Failed to create NPZ reader for: "{path}": zip file error: {fault}'
                ) from None
            with archive:
                try:
                    return cls(**{name: _array(archive, name, rank) for name, rank in _ARRAYS})
                except DocumentError as fault:
                    raise DocumentError(f"{path}: {fault}") from None

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        """Linear in batch · (mean prompt - mean prefix); at least 0, and 0 where NaN."""
        tokens = float(batch_size * (mean_isl - mean_prefix))
        if tokens <= 0.0:
            return 0.0
        nodes, times = self._tokens, self._prefill_ms
        at = _cell(nodes, tokens)
        time = _line(nodes[at], times[at], nodes[at + 1], times[at + 1], tokens)
        return time if time > PREFILL_FLOOR_MS else PREFILL_FLOOR_MS

    def predict_decode_ms(
        self,
        batch_size: int,
        active_kv_tokens: int,
        mean_context_length: int,
        total_kv_tokens: int,
    ) -> float:
        """Bilinear in KV tokens and their floored mean; at least 1 ms, and 1 ms where NaN."""
        if batch_size <= 0:
            return 0.0
        kv_tokens, context = float(active_kv_tokens), float(active_kv_tokens // batch_size)
        row, column = _cell(self._kv_nodes, kv_tokens), _cell(self._context_nodes, context)
        near, far = self._kv_nodes[row], self._kv_nodes[row + 1]
        below, above = self._decode_ms[row], self._decode_ms[row + 1]
        low = _line(near, below[column], far, above[column], kv_tokens)
        high = _line(near, below[column + 1], far, above[column + 1], kv_tokens)
        short, long = self._context_nodes[column], self._context_nodes[column + 1]
        time = _line(short, low, long, high, context)
        return time if time > DECODE_FLOOR_MS else DECODE_FLOOR_MS

    def predict_decode_many(
        self, batch_size: int, active_kv_tokens: IntArray, total_kv_tokens: int
    ) -> FloatArray:
        """:meth:`predict_decode_ms` for many steps of one batch, bit for bit."""
        if batch_size <= 0:
            return np.zeros(len(active_kv_tokens))
        totals = np.asarray(active_kv_tokens)
        context = (totals // batch_size).astype(np.float64)
        kv_tokens = totals.astype(np.float64)
        row, column = _cells(self._kv_axis, kv_tokens), _cells(self._context_axis, context)
        near, far = self._kv_axis[row], self._kv_axis[row + 1]
        grid = self._grid
        with np.errstate(invalid="ignore", over="ignore"):
            low = _line(near, grid[row, column], far, grid[row + 1, column], kv_tokens)
            high = _line(near, grid[row, column + 1], far, grid[row + 1, column + 1], kv_tokens)
            short, long = self._context_axis[column], self._context_axis[column + 1]
            time = _line(short, low, long, high, context)
            floored: FloatArray = np.where(time > DECODE_FLOOR_MS, time, DECODE_FLOOR_MS)
        return floored


_ARRAYS = (
    ("prefill_isl", 1),
    ("prefill_ttft_ms", 1),
    ("decode_active_kv_tokens", 1),
    ("decode_context_length", 1),
    ("decode_itl", 2),
)


def _line(x1: Any, y1: Any, x2: Any, y2: Any, x: Any) -> Any:
    """The line through two points, in the reference's order of operations."""
    return (y2 - y1) / (x2 - x1) * (x - x1) + y1


def _cell(nodes: list[float], value: float) -> int:
    return min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)


def _cells(nodes: FloatArray, values: FloatArray) -> Any:
    return np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, len(nodes) - 2)


def _array(archive: zipfile.ZipFile, name: str, rank: int) -> FloatArray:
    member = next((n for n in (f"{name}.npy", name) if n in archive.namelist()), None)
    if member is None:
        raise DocumentError(
            f"Failed to load {name} from NPZ: zip file error: specified file not found in archive"
        )
    try:
        array = np.load(io.BytesIO(archive.read(member)), allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as fault:
        raise DocumentError(
            f"Failed to load {name} from NPZ: error reading npy file in npz archive: {fault}"
        ) from None
    if not isinstance(array, np.ndarray):
        raise DocumentError(f"Failed to load {name} from NPZ: no npy file in npz archive")
    if array.dtype.str != "<f8":
        raise DocumentError(
            f"Failed to load {name} from NPZ: error reading npy file in npz archive: "
            f"incorrect descriptor ('{array.dtype.str}') for this type"
        )
    if array.ndim != rank:
        raise DocumentError(
            f"Failed to load {name} from NPZ: ndim {array.ndim} of array did not match "
            f"Dimension type with NDIM = Some({rank})"
        )
    return np.ascontiguousarray(array)


def _check_prefill(tokens: FloatArray, times: FloatArray) -> None:
    if len(tokens) != len(times):
        raise DocumentError(f"Prefill array length mismatch: isl={len(tokens)}, ttft={len(times)}")
    failed = "Failed to build prefill interpolator:"
    if len(tokens) < 2:
        raise DocumentError(
            f"{failed} The chosen Interpolation strategy needs at least 2 data points"
        )
    if not (np.diff(tokens) > 0).all():
        raise DocumentError(f"{failed} Values in the x axis need to be strictly monotonic rising")


def _check_decode(kv_tokens: FloatArray, context: FloatArray, times: FloatArray) -> None:
    if times.shape != (len(kv_tokens), len(context)):
        raise DocumentError(
            f"Decode array dimension mismatch: itl shape={times.shape}, "
            f"active_kv={len(kv_tokens)}, context={len(context)}"
        )
    failed = "Failed to build decode interpolator:"
    for number, axis in enumerate((kv_tokens, context)):
        if len(axis) < 2:
            raise DocumentError(
                f"{failed} The {number}-dimension has not enough data for the chosen "
                f"interpolation strategy. Provided: {len(axis)}, Reqired: 2"
            )
    for name, axis in (("x", kv_tokens), ("y", context)):
        if not (np.diff(axis) > 0).all():
            raise DocumentError(f"{failed} The {name}-axis needs to be strictly monotonic rising")
