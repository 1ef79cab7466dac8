"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from passtime.calibrate.measure import Progress


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar that is told the share done; nothing at all where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda share, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=1.0, doing="")

        def tell(share: float, doing: str) -> None:
            bars.update(task, completed=min(share, 1.0), doing=doing)

        yield tell
