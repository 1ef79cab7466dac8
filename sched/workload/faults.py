"""Faults of one file, gathered: a user mends a file once, not row by row."""

from __future__ import annotations

from collections.abc import Callable

from passtime.errors import TraceError

SHOWN = 20


class Faults:
    """Collects messages about ``source``; :meth:`check` raises them as one TraceError."""

    def __init__(self, source: str) -> None:
        """``source`` opens every message."""
        self.source = source
        self._messages: list[str] = []

    def add(self, message: str) -> None:
        """Remember one fault; its message names the place inside the file."""
        self._messages.append(f"{self.source}: {message}")

    def check(self, advice: Callable[[], str | None] = lambda: None) -> None:
        """Raise TraceError if anything was added: the first 20 faults, then ``advice()``."""
        if not self._messages:
            return
        lines = self._messages[:SHOWN]
        if len(self._messages) > SHOWN:
            lines.append(f"{self.source}: and {len(self._messages) - SHOWN} more faults")
        hint = advice()
        if hint is not None:
            lines.append(hint)
        raise TraceError("\n".join(lines))
