"""Where a command writes to, looked at before it works: an hour's result must find its place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from passtime.errors import InputError


def refuse_unwritable(outputs: Iterable[str | None], *, inputs: Iterable[str | None] = ()) -> None:
    """Raise InputError for an output that could not be kept, or would replace an input.

    None stands for a flag that was not given; an input may be a name that is no file.
    """
    read = [Path(name) for name in inputs if name is not None]
    given: list[Path] = []
    for path in (Path(name) for name in outputs if name is not None):
        if path.is_dir():
            raise InputError(f"{path}: cannot be written: it is a folder")
        if not path.parent.is_dir():
            raise InputError(f"{path}: cannot be written: there is no folder {path.parent}")
        if path in given and not path.is_char_device():
            raise InputError(f"{path}: cannot be written: two outputs have this name")
        if path.is_file() and any(one.is_file() and one.samefile(path) for one in read):
            raise InputError(f"{path}: cannot be written: it is read as well")
        given.append(path)
