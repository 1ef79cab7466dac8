"""The command line: find the command, parse, call, turn errors into exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from passtime import __version__
from passtime.errors import PasstimeError

COMMANDS = (
    "devices",
    "calibrate",
    "fit",
    "check",
    "engine",
    "simulate",
    "compare",
    "profile",
    "demo",
)

EPILOG = """exit codes: 0 done; 1 it ran and could not finish, or a stated gate failed;
2 bad usage or input; 3 no suitable device; 130 interrupted, partial results kept"""


def parser() -> argparse.ArgumentParser:
    """The whole command line, every command's arguments included."""
    top = argparse.ArgumentParser(
        prog="passtime",
        description="Measure what a forward pass costs, fit a timing model, simulate schedules.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"passtime {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"passtime.commands.{name}")
        assert module.__doc__ is not None
        command = commands.add_parser(
            name,
            help=module.__doc__.partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's fault prints one message, never a traceback."""
    if sys.stdout is None:  # closed (>&-): nobody wants to read what is printed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except PasstimeError as error:
        print(f"passtime {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"passtime {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) is gone: that is no fault, and nothing more can be said.
        _drop_unwritten()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
            raise
        # Files name themselves (replace_file): what is left is what was printed.
        print(f"passtime {args.command}: standard output: {error.strerror}", file=sys.stderr)
        _drop_unwritten()
        return 1


def _drop_unwritten() -> None:
    """Let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
