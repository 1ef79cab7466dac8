"""List the shipped profiles, or show one: provenance, box, coefficients, errors, predictions."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``passtime profile``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show")
    listing = actions.add_parser("list", help="the profiles that ship")
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    showing = actions.add_parser("show", help="one profile, readably")
    showing.add_argument("profile", metavar="NAME|PATH")
    showing.add_argument("--json", action="store_true", help="print the document itself")


def run(args: argparse.Namespace) -> int:
    """List or show."""
    import msgspec

    from passtime.profile_tables import profile_list, profile_list_table, profile_view
    from passtime.profiles.document import load_profile
    from passtime.tables import stdout_console

    if args.action == "list":
        listed = profile_list()
        if args.json:
            document = msgspec.json.encode({"profiles": listed})
            sys.stdout.write(msgspec.json.format(document, indent=2).decode() + "\n")
        else:
            stdout_console().print(profile_list_table(listed))
        return 0
    profile = load_profile(args.profile)
    if args.json:
        document = msgspec.json.encode(profile)
        sys.stdout.write(msgspec.json.format(document, indent=2).decode() + "\n")
    else:
        stdout_console().print(profile_view(profile))
    return 0
