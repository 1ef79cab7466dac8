"""Strict reading of JSON documents: every error names the file, the place, found and wanted."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from passtime.errors import DocumentError, InputError

T = TypeVar("T")

_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d+)\]|\[(\.\.\.)\]")
_WORDS = {
    "float": "a number",
    "int": "an integer",
    "str": "a text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def decode_json(
    data: bytes, kind: type[T], *, source: str, error: type[InputError] = DocumentError
) -> T:
    """``data`` as ``kind``; raises ``error`` with `source: $.place: expected …, found …`."""
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError as fault:
        raise error(f"{source}: not JSON: {fault}") from None
    return convert_document(document, kind, source=source, error=error)


def convert_document(
    document: Any, kind: type[T], *, source: str, error: type[InputError] = DocumentError
) -> T:
    """A parsed JSON value as ``kind``; the errors of :func:`decode_json`."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as fault:
        if isinstance(fault.__cause__, InputError):
            raise error(f"{source}: {_place(fault)}: {fault.__cause__}") from None
        raise error(f"{source}: {_located(fault, document)}") from None


def read_bytes(path: Path, *, error: type[InputError] = DocumentError) -> bytes:
    """The file's content; raises ``error`` naming it."""
    try:
        return path.read_bytes()
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None


def write_atomically(path: Path, data: bytes, *, error: type[InputError] = DocumentError) -> None:
    """Replace ``path`` by ``data`` in one step: readers see the old file or the new one."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device: there is nothing to replace
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as fault:
        raise error(f"{path}: cannot write: {fault.strerror}") from None


def _place(fault: msgspec.ValidationError) -> str:
    """`$.a[3].b` out of msgspec's message, which ends in " - at `$.a[3].b`"."""
    _, found, place = str(fault).rpartition(" - at `")
    return place.rstrip("`") if found else "$"


def _located(fault: msgspec.ValidationError, document: Any) -> str:
    place = _place(fault)
    wanted = str(fault).rpartition(" - at `")[0] or str(fault)
    if missing := re.fullmatch(r"Object missing required field `(.+)`", wanted):
        return f"{place}.{missing[1]}: this field is required and is missing"
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", wanted):
        return f"{place}.{unknown[1]}: unknown key"
    if wanted.startswith("Invalid enum value"):
        return f"{place}: there is no such value: {_shown(_value_at(document, place))}"
    wanted = wanted.partition(", got ")[0]
    wanted = wanted[:1].lower() + wanted[1:]
    wanted = re.sub(r"`(\w+)`", lambda word: _WORDS.get(word[1], word[1]), wanted)
    return f"{place}: {wanted}, found {_shown(_value_at(document, place))}"


def _value_at(document: Any, place: str) -> Any:
    value = document
    for name, index, _ in _STEP.findall(place):
        try:
            if name:
                value = value[name]
            elif index:
                value = value[int(index)]
            else:
                return "a value of another kind"  # a mapping's value: msgspec keeps no key
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
