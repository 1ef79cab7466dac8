"""``python -m passtime``: the command line without the console script."""

from passtime.cli import main

raise SystemExit(main())
