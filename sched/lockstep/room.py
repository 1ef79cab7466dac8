"""The token room that admission sees (S-37), without adding up what every request reserves."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Room:
    """attainable − Σ min(remaining, clip) · ratio, less what was charged since.

    The rules add doubles one request after the other, and compare the result exactly. The integer
    sum times the ratio decides as well, except within a margin; there the literal sum is made.
    """

    def __init__(
        self,
        attainable_tokens: int,
        reserved_tokens: int,
        ratio: float,
        each_reserved: Callable[[], Iterable[int]],
    ) -> None:
        """``each_reserved`` lists the terms of ``reserved_tokens``, in running order."""
        self._attainable = attainable_tokens
        self._ratio = ratio
        self._each_reserved = each_reserved
        self._charged: list[int] = []
        self._estimate = attainable_tokens - reserved_tokens * ratio
        self._margin = margin(attainable_tokens, reserved_tokens * ratio)

    def exceeds(self, tokens: int) -> bool:
        """Whether the room is larger than ``tokens``."""
        surplus = self._estimate - tokens
        if surplus > self._margin:
            return True
        if surplus < -self._margin:
            return False
        reserved = 0.0
        for term in self._each_reserved():
            reserved += term * self._ratio
        total = float(self._attainable) - reserved
        for charge in self._charged:
            total -= charge
        return total > tokens

    def charge(self, tokens: int) -> None:
        """A chunk was admitted."""
        self._charged.append(tokens)
        self._estimate -= tokens


def may_exceed(attainable_tokens: int, reserved: float, tokens: int) -> bool:
    """Whether what is not ``reserved`` might be more than ``tokens``; if not, it surely is not."""
    return tokens < attainable_tokens - reserved + margin(attainable_tokens, reserved)


def margin(attainable_tokens: int, reserved: float) -> float:
    """How far the estimate of a room may be from the sum of doubles, generously."""
    return 1e-9 * (1.0 + reserved) + 1e-12 * attainable_tokens
