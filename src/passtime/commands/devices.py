"""List the devices that can be profiled here: the CPU, and NVIDIA GPUs.

GPUs are found through nvidia-ml-py, else through torch; neither is needed otherwise.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime devices``."""
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Look, print."""
    import msgspec

    from passtime.calibrate.devices import find_devices
    from passtime.calibrate.tables import devices_table
    from passtime.tables import stdout_console

    found = find_devices()
    if args.json:
        listed = [{"device": key, **msgspec.to_builtins(facts)} for key, facts in found]
        document = msgspec.json.encode({"devices": listed, "no_gpu_because": found.missing})
        sys.stdout.write(msgspec.json.format(document, indent=2).decode() + "\n")
        return 0
    stdout_console().print(devices_table(found))
    if found.missing is not None:
        print(f"passtime devices: no NVIDIA GPU: {found.missing}", file=sys.stderr)
    return 0
