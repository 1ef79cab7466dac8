"""Where commands write: files, standard output, and what they need not import for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from passtime import simulation

CONSTANT = ("--workload", "constant", "--input-len", 64, "--output-len", 4, "--num-prompts", 20)

Command = Callable[..., Any]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"num_gpu_blocks": 500}))
    return path


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-o", "--per-request", "--write-trace"])
def test_a_file_that_cannot_be_written_is_named_before_any_work(
    passtime: Command, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(simulation, "simulate", lambda *_: pytest.fail("it ran"))
    for target, fault in (
        (tmp_path / "absent" / "out", f"there is no folder {tmp_path / 'absent'}"),
        (tmp_path, "it is a folder"),
    ):
        ran = passtime("simulate", "--engine", engine, *CONSTANT, flag, target)
        assert ran.code == 2
        assert f"{target}: cannot be written: {fault}" in ran.err


def test_two_outputs_need_two_names(passtime: Command, engine: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    ran = passtime("simulate", "--engine", engine, *CONSTANT, "-o", target, "--per-request", target)
    assert ran.code == 2
    assert f"{target}: cannot be written: two outputs have this name" in ran.err


@pytest.mark.parametrize("flag", ["-o", "--per-request", "--write-trace"])
def test_an_output_never_replaces_what_is_read(
    passtime: Command, engine: Path, profile: Path, flag: str
) -> None:
    for target in (engine, profile):
        before = target.read_bytes()
        ran = passtime(
            "simulate", "--engine", engine, *CONSTANT, "--timing", f"{profile}@pass", flag, target
        )
        assert ran.code == 2
        assert f"{target}: cannot be written: it is read as well" in ran.err
        assert target.read_bytes() == before


# --- Standard output ------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_fault(
    engine: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """``passtime simulate … | head -1``, with a reader that is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    argv = ("simulate", "--engine", engine, *CONSTANT, *flags)
    ran = subprocess.run(
        [sys.executable, "-m", "passtime", *map(str, argv)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert ran.returncode == 0
    assert ran.stderr.count("\n") <= 1  # at most the line about the time taken
    assert "Error" not in ran.stderr


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_one_line(
    engine: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    words = ("-m", "passtime", "simulate", "--engine", engine, *CONSTANT, *flags)
    command = [sys.executable, *map(str, words)]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr == "passtime simulate: standard output: No space left on device\n"


def test_a_closed_standard_output_is_no_fault(engine: Path, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "passtime", "simulate", "--engine", engine, *CONSTANT, "--json")
    command = ["/bin/sh", "-c", shlex.join(map(str, words)) + " >&-"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("colour", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}])
def test_a_table_keeps_within_the_columns_it_is_given(
    passtime: Command, engine: Path, monkeypatch: pytest.MonkeyPatch, colour: dict[str, str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    ran = passtime("simulate", "--engine", engine, *CONSTANT)
    text = re.sub("\x1b\\[[0-9;]*m", "", ran.out)
    assert max(map(len, text.splitlines())) <= 80
    assert ("\x1b[" in ran.out) == ("FORCE_COLOR" in colour)


# --- What has to be imported for it ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "models"),
    [("simulate", ()), ("compare", ("--timing", "polynomial", "--timing", "config"))],
)
def test_a_document_needs_no_table(engine: Path, command: str, models: tuple[str, ...]) -> None:
    argv = [command, "--engine", str(engine), *map(str, CONSTANT), *models, "--json"]
    program = f"""
import sys
from passtime.cli import main
assert main({argv!r}) == 0
print(sorted({{"rich", "scipy", "matplotlib", "torch"}} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_help_waits_for_no_numbers(command: str) -> None:
    """Not for those of another command either: the parser knows them all."""
    program = f"""
import sys
from passtime.cli import main
try:
    main([{command!r}, "--help"])
except SystemExit:
    print(sorted({{"numpy", "scipy", "rich", "msgspec", "torch"}} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"
    for form in ("--engine E.json | --prefill-engine P.json", "--timing SPEC"):
        assert form in ran.stdout
