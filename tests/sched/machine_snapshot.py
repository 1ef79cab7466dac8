"""A deep, comparable picture of an object graph: what "exactly as it was" means (C-15)."""

from __future__ import annotations

from collections import deque
from enum import Enum
from types import FunctionType, GeneratorType
from typing import Any
from uuid import UUID

from msgspec import Struct

from passtime.sched.contract import Request

# Compared as they are: immutable, or (a generator) nothing that can be looked into.
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, UUID, Request, FunctionType})
_LEAF_BASES = (Enum, Struct, type, GeneratorType)


def snapshot(root: object) -> object:
    """Equal before and after ⇔ no attribute, no order, no sharing of objects changed.

    Order counts in dicts too: the pool's LRU is one.
    """
    numbers: dict[int, int] = {}
    alive: list[object] = []  # an id() is unique only as long as its object lives

    def picture(value: object) -> object:
        kind: type[Any] = type(value)
        if kind in _LEAVES or isinstance(value, _LEAF_BASES):
            return value
        if id(value) in numbers:
            return ("seen", numbers[id(value)])
        numbers[id(value)] = len(numbers)
        alive.append(value)
        if isinstance(value, dict):
            return (kind, *[(picture(key), picture(item)) for key, item in value.items()])
        if isinstance(value, list | tuple | deque | set | frozenset):
            return (kind, *[picture(item) for item in value])
        attributes = [
            (name, picture(getattr(value, name)))
            for name in (*_slots(kind), *getattr(value, "__dict__", ()))
            if hasattr(value, name)
        ]
        # What has no attributes (itertools.count, an array) tells its state in words.
        return (kind, *attributes) if attributes else (kind, repr(value))

    return picture(root)


def _slots(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ()))
