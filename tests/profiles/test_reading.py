"""Files appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from passtime.errors import InputError
from passtime.profiles.provider import ProviderConfig
from passtime.profiles.reading import convert_document, write_atomically
from passtime.sched.workload.files import replace_file

both = pytest.mark.parametrize("write", [write_atomically, replace_file])


@both
def test_an_interrupted_write_leaves_nothing_behind(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "old", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


@both
def test_a_pipe_is_written_to_and_stays_one(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


@both
def test_a_folder_is_no_place_to_write_to(
    write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="Is a directory"):
        write(Path(), b"data")


def test_a_value_that_is_none_of_the_known_ones_is_told_once() -> None:
    document = {"profile": "p.json", "composition": "both"}
    with pytest.raises(InputError) as refused:
        convert_document(document, ProviderConfig, source="here")
    assert str(refused.value) == 'here: $.composition: there is no such value: "both"'
