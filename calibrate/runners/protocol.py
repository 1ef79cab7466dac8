"""Messages between the measuring process and its parent: msgpack, length-prefixed, over pipes."""

from __future__ import annotations

import struct
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from passtime.calibrate.log import Batch
from passtime.profiles.shapes import ModelShape

LENGTH = struct.Struct("<I")


class Setup(Struct, frozen=True, tag=True, kw_only=True):
    """First request: build the model with a KV pool of so many tokens. Answer: Ready."""

    model: ModelShape
    kv_tokens: int
    seed: int


class Run(Struct, frozen=True, tag=True, kw_only=True):
    """Run a batch ``inner`` times. Answer: Ran or Refused."""

    batch: Batch
    inner: int


class Ready(Struct, frozen=True, tag=True, kw_only=True):
    """The model stands. ``process_per_thread`` is 1 if BLAS keeps to one thread."""

    software: dict[str, Any]
    process_per_thread: float


class Ran(Struct, frozen=True, tag=True, kw_only=True):
    """CPU time of the thread that computed, in seconds, all repetitions together."""

    thread_s: float


class Refused(Struct, frozen=True, tag=True, kw_only=True):
    """The request could not be done; the process goes on."""

    out_of_memory: bool
    message: str


Request: TypeAlias = Setup | Run
Reply: TypeAlias = Ready | Ran | Refused


class Readable(Protocol):
    """The reading end of a pipe, buffered: ``read`` returns less only at its end."""

    def read(self, size: int, /) -> bytes:
        """Exactly ``size`` bytes, or fewer at the end."""
        ...


def framed(message: Request | Reply) -> bytes:
    """A message as it goes over the pipe."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: Readable) -> bytes | None:
    """The next message's body; None if the other side has closed, in mid-message or before."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None
