"""Runs a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from passtime import cli


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def passtime(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """``passtime("simulate", "--engine", …)``: exit code, stdout, stderr."""

    def run(*argv: object) -> Ran:
        monkeypatch.setattr(cli, "COMMANDS", (str(argv[0]),))  # the others need not be importable
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as stopped:  # argparse: bad usage
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
