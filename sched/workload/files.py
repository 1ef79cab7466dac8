"""Reading traces that may be gzipped, and writing files that appear whole or not at all."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from passtime.errors import InputError, TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_trace_file(path: Path) -> bytes:
    """The bytes of ``path``, unpacked if they are gzipped. Raises TraceError."""
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip data: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    return data.removeprefix(_BYTE_ORDER_MARK)


def replace_file(path: Path, data: bytes, *, error: type[InputError] = InputError) -> None:
    """Write ``data`` beside ``path`` and move it there. Raises ``error`` if it cannot be."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device: there is nothing to replace
            return
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as fault:
        raise error(f"{path}: cannot be written: {fault.strerror}") from None
