"""Holding prefills back in an attention-DP group: ``prefill_schedule_interval`` (V-89)."""

from __future__ import annotations

from collections.abc import Iterable

from passtime.sched.vllm.requests import RequestState


class PrefillGate:
    """Whether a rank's pass may compute prompts; found by experiment, see ``docs/rules.md``.

    Open in every N-th pass of the group since it was last drained, open to a rank that has nobody
    to decode, and open for as long as an open pass leaves somebody waiting. A lone rank's gate
    never closes.
    """

    def __init__(self, interval: int, *, dp_size: int) -> None:
        """``interval`` is N; only groups of several ranks heed it."""
        self._interval = interval if dp_size > 1 else 1
        self._group_passes = 0
        self._backlog = False

    def is_open(self, running: Iterable[RequestState]) -> bool:
        """Whether the pass that starts now may compute prompts."""
        if self._backlog or self._group_passes % self._interval == 0:
            return True
        return not any(request.computed >= request.prompt_tokens for request in running)

    def scheduled(self, *, was_open: bool, leaves_waiting: bool) -> None:
        """A pass looked through its whole queue: what it left behind keeps the gate open."""
        self._backlog = was_open and leaves_waiting

    def group_passed(self) -> None:
        """The group executed one more pass."""
        self._group_passes += 1

    def group_drained(self) -> None:
        """Nobody in the group has anything left to do: the count starts anew."""
        self._group_passes = 0
