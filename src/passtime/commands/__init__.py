"""One module per command: its arguments, and the call it makes. No logic lives here.

A command module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code); its
docstring's first line is the help text. Heavy imports stay inside ``run``.
"""
