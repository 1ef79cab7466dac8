"""The measurement log: JSON lines, append-only, one header and then one line per visit.

Between visits there may be notes, and lines that add points to the header's plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Literal, Self, TypeAlias

import msgspec
from msgspec import Struct

from passtime.errors import DocumentError, RunError
from passtime.profiles.device import DeviceFacts as DeviceFacts
from passtime.profiles.shapes import ModelShape

Regime: TypeAlias = Literal["prefill", "prefix", "decode", "mixed"]
StopReason: TypeAlias = Literal[
    "converged", "max_samples", "max_time", "throttled", "failed", "oom"
]

VisitKey: TypeAlias = tuple[int, int, int]

SCHEMA = 2  # 1 had no additions

FAULTS_SHOWN = 20
LONGEST_SAMPLE_MS = 1e9  # a pass of eleven days is none


class OtherRunError(DocumentError):
    """A log that was begun with other settings cannot be continued with these."""


class Batch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one pass computes: tokens per request.

    ``prefill``: (new tokens, prefix tokens) per prompt chunk. ``decode``: KV length per decoding
    request, before its new token.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()


class Point(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A batch to measure; ``held_out`` points are never fitted."""

    id: int
    regime: Regime
    batch: Batch
    held_out: bool = False


class Header(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="header"
):
    """First line: everything that was decided before the first sample."""

    schema: int
    device: DeviceFacts
    model: ModelShape
    software: dict[str, Any]
    policy: dict[str, Any]
    plan: tuple[Point, ...]
    seed: int
    started_at: str
    kernel_hash: str | None = None


class Visit(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="visit"
):
    """One visit of a point: every raw sample, in ms per pass, and its circumstances.

    (point, round, attempt) is unique in a log; attempts above 1 repeat a disturbed visit.
    ``clocks`` holds what the device said (SM clock, temperature, power) and ``elapsed_s``, the
    part of the budget that was used up when the visit ended.
    """

    point: int
    round: int
    samples_ms: tuple[float, ...]
    stop: StopReason
    flags: tuple[str, ...] = ()
    clocks: dict[str, Any] = {}
    error: str | None = None
    started_at: str | None = None
    attempt: int = 1

    @property
    def key(self) -> VisitKey:
        """What names the visit: point, round, attempt."""
        return self.point, self.round, self.attempt


class Note(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="note"
):
    """Anything measured beside the points: reference passes, drift, launch overhead.

    Two topics are about visits, ``values["visits"]`` lists their [point, round, attempt]:
    ``discard`` withdraws them (``values["cause"]`` says why), ``flag`` adds ``values["flag"]``.
    """

    topic: str
    values: dict[str, Any]


class Addition(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="line", tag="addition"
):
    """Points to fit that earlier lines showed to be needed; their ids go on from the last one's."""

    points: tuple[Point, ...]


Line: TypeAlias = Header | Visit | Note | Addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log that was read. ``torn_bytes`` counts the bytes of a last line cut off by a kill."""

    source: str
    header: Header
    visits: tuple[Visit, ...]
    notes: tuple[Note, ...]
    additions: tuple[Addition, ...] = ()
    torn_bytes: int = 0

    @property
    def points(self) -> tuple[Point, ...]:
        """The header's plan and what was added to it."""
        return (*self.header.plan, *(p for addition in self.additions for p in addition.points))

    def accepted(self) -> tuple[Visit, ...]:
        """The visits that no ``discard`` note withdraws, with the flags that notes added."""
        withdrawn: set[VisitKey] = set()
        added: dict[VisitKey, tuple[str, ...]] = {}
        for note in self.notes:
            if note.topic == "discard":
                withdrawn.update(_visits_of(note))
            elif note.topic == "flag":
                for key in _visits_of(note):
                    added[key] = (*added.get(key, ()), note.values["flag"])
        return tuple(
            msgspec.structs.replace(visit, flags=(*visit.flags, *added.get(visit.key, ())))
            for visit in self.visits
            if visit.key not in withdrawn
        )

    def samples_ms(self) -> dict[int, list[float]]:
        """All accepted samples per point id, in log order; points without any are absent."""
        samples: dict[int, list[float]] = {}
        for visit in self.accepted():
            if visit.samples_ms:
                samples.setdefault(visit.point, []).extend(visit.samples_ms)
        return samples

    def point_ms(self) -> dict[int, float]:
        """Milliseconds of a pass per point id: the median, over its visits, of their medians.

        Each visit has one vote, so that one in a bad moment does not outvote the others by the
        many samples it took. Points without samples are absent.
        """
        medians: dict[int, list[float]] = {}
        for visit in self.accepted():
            if visit.samples_ms:
                medians.setdefault(visit.point, []).append(median(visit.samples_ms))
        return {point: median(values) for point, values in medians.items()}

    def flags(self) -> dict[int, set[str]]:
        """Flags of accepted visits per point id; points without any are absent."""
        flags: dict[int, set[str]] = {}
        for visit in self.accepted():
            if visit.flags:
                flags.setdefault(visit.point, set()).update(visit.flags)
        return flags

    @property
    def elapsed_s(self) -> float:
        """The part of the budget that the visits in this log used up."""
        return max((float(v.clocks.get("elapsed_s", 0.0)) for v in self.visits), default=0.0)


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log; DocumentError names every bad line (the first 20) and what is wrong with it.

    A last line without its newline is what a kill in mid-write leaves: it is counted, not read.
    """
    return _parse(_content(path), os.fspath(path))


def log_hash(path: str | os.PathLike[str]) -> str:
    """``sha256:…`` of the log's complete lines: the identity that a profile records."""
    content = _content(path)
    complete = content[: content.rfind(b"\n") + 1]
    return f"sha256:{hashlib.sha256(complete).hexdigest()}"


class LogWriter:
    """The open log of a running measurement. Every line is on disk when ``append`` returns.

    The file is locked for as long as it is open, so that two measurements never share one.
    """

    def __init__(self, file: IO[bytes], source: str) -> None:
        """Take over an open, locked file whose position is its end."""
        self._file = file
        self.source = source

    @classmethod
    def create(cls, path: str | os.PathLike[str], header: Header) -> LogWriter:
        """Start a new log. DocumentError if the file holds something already."""
        file = _open_locked(path)
        if file.seek(0, os.SEEK_END):
            file.close()
            raise DocumentError(f"{os.fspath(path)}: exists already and is not empty")
        writer = cls(file, os.fspath(path))
        writer.append(header)
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> tuple[LogWriter, Log] | None:
        """Continue a log; a torn last line is cut off. None if there is no line to go on from."""
        source = os.fspath(path)
        if not Path(path).exists():
            return None
        file = _open_locked(path)
        try:
            content = file.read()
            if b"\n" not in content:
                file.truncate(0)
                file.close()
                return None
            log = _parse(content, source)
        except BaseException:
            file.close()
            raise
        file.truncate(len(content) - log.torn_bytes)
        file.seek(0, os.SEEK_END)
        return cls(file, source), log

    def append(self, line: Line) -> None:
        """Write one line through to the disk. RunError if it takes no more."""
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.source}: cannot be written: {error.strerror}; what is there is kept, and "
                "the same command goes on from it"
            ) from None

    def close(self) -> None:
        """Close and unlock."""
        with suppress(OSError):  # a line that could not be written has been told by ``append``
            self._file.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def require_same_run(found: Header, wanted: Header, source: str) -> None:
    """Check that a log may be continued: OtherRunError says what differs, and what to do.

    The plan is compared too; software versions, the driver and the start time may differ.
    """
    differences = [
        *_differences("device", _identity(found.device), _identity(wanted.device)),
        *_differences("model", _builtins(found.model), _builtins(wanted.model)),
        *_differences("policy", found.policy, wanted.policy),
        *_differences("kernel_hash", found.kernel_hash, wanted.kernel_hash),
        *_differences("seed", found.seed, wanted.seed),
    ]
    if not differences and found.plan != wanted.plan:
        differences = [f"plan: {len(found.plan)} points there, {len(wanted.plan)} other ones asked"]
    if differences:
        raise OtherRunError(
            f"{source}: line 1: this log was begun with other settings "
            f"({'; '.join(differences)}): give another --log, or repeat the old settings"
        )


# --- Reading --------------------------------------------------------------------------------------


def _content(path: str | os.PathLike[str]) -> bytes:
    _require_regular_file(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{os.fspath(path)}: {error.strerror}") from None


def _require_regular_file(path: str | os.PathLike[str]) -> None:
    """Refuse what has no end (/dev/zero) or keeps nothing (/dev/null); absent files are fine."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DocumentError(f"{os.fspath(path)}: a measurement log has to be a regular file")


def _parse(content: bytes, source: str) -> Log:
    *complete, torn = content.split(b"\n")
    if not complete:
        raise DocumentError(f"{source}: line 1: no complete line: this is no measurement log")
    header = _header(complete[0], source)
    known = {point.id for point in header.plan}
    visits: list[Visit] = []
    notes: list[Note] = []
    additions: list[Addition] = []
    faults: list[str] = []
    decoder = msgspec.json.Decoder(Visit | Note | Addition)
    seen: dict[VisitKey, int] = {}
    for number, text in enumerate(complete[1:], start=2):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            faults.append(f"{source}: line {number}: {error}")
            continue
        if isinstance(line, Note):
            if fault := _note_fault(line):
                faults.append(f"{source}: line {number}: {fault}")
            else:
                notes.append(line)
        elif isinstance(line, Addition):
            if fault := _addition_fault(line, max(known, default=-1) + 1):
                faults.append(f"{source}: line {number}: {fault}")
            else:
                known.update(point.id for point in line.points)
                additions.append(line)
        elif line.point not in known:
            faults.append(f"{source}: line {number}: point {line.point} is not in the plan")
        elif line.key in seen:
            faults.append(f"{source}: line {number}: repeats the visit of line {seen[line.key]}")
        elif bad := [ms for ms in line.samples_ms if not 0 < ms < LONGEST_SAMPLE_MS]:
            faults.append(
                f"{source}: line {number}: samples_ms: wanted 0 < x < {LONGEST_SAMPLE_MS:g}, "
                f"found {bad[0]}"
            )
        elif not isinstance(spent := line.clocks.get("elapsed_s", 0.0), int | float):
            faults.append(
                f"{source}: line {number}: clocks.elapsed_s: wanted a number, found {spent!r}"
            )
        else:
            seen[line.key] = number
            visits.append(line)
    if faults:
        more = len(faults) - FAULTS_SHOWN
        tail = [f"{source}: {more} more such lines"] if more > 0 else []
        raise DocumentError("\n".join(faults[:FAULTS_SHOWN] + tail))
    return Log(
        source=source,
        header=header,
        visits=tuple(visits),
        notes=tuple(notes),
        additions=tuple(additions),
        torn_bytes=len(torn),
    )


def _header(text: bytes, source: str) -> Header:
    try:
        found = msgspec.json.decode(text)
        schema = found.get("schema") if isinstance(found, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise DocumentError(
                f"{source}: line 1: log schema {schema} is newer than this passtime reads "
                f"({SCHEMA}): a newer passtime wrote it"
            )
        return msgspec.convert(found, Header)
    except msgspec.DecodeError as error:
        raise DocumentError(f"{source}: line 1: not a measurement log's header: {error}") from None


def _note_fault(note: Note) -> str | None:
    """What is wrong with a note that is about visits; None if nothing is."""
    if note.topic not in ("discard", "flag"):
        return None
    visits = note.values.get("visits")
    if not isinstance(visits, list) or not all(
        isinstance(visit, list) and [type(part) for part in visit] == [int, int, int]
        for visit in visits
    ):
        return "values.visits: wanted a list of [point, round, attempt]"
    if note.topic == "flag" and not isinstance(note.values.get("flag"), str):
        return "values.flag: wanted a name"
    return None


def _addition_fault(addition: Addition, first: int) -> str | None:
    """What is wrong with an addition whose ids have to begin at ``first``; None if nothing is."""
    ids = [point.id for point in addition.points]
    if not ids or ids != list(range(first, first + len(ids))):
        return f"points: wanted ids from {first} on, found {ids}"
    if any(point.held_out for point in addition.points):
        return "points: held_out: what is added has been chosen, and judges nothing"
    return None


def _visits_of(note: Note) -> list[VisitKey]:
    return [(point, round_, attempt) for point, round_, attempt in note.values["visits"]]


def _open_locked(path: str | os.PathLike[str]) -> IO[bytes]:
    source = os.fspath(path)
    _require_regular_file(path)
    try:
        file = os.fdopen(os.open(source, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as error:
        raise DocumentError(f"{source}: {error.strerror}") from None
    import fcntl  # here, so that logs can be read where the system has no such locks

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise DocumentError(f"{source}: another measurement is writing this log") from None
    return file


# --- Comparing headers ----------------------------------------------------------------------------


def _identity(device: DeviceFacts) -> dict[str, Any]:
    """What makes two findings the same device: a driver may be updated in between."""
    return {"kind": device.kind, "name": device.name, "memory_bytes": device.memory_bytes}


def _builtins(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _differences(place: str, found: Any, wanted: Any) -> list[str]:
    found, wanted = _builtins(found), _builtins(wanted)
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        keys = [*found, *(key for key in wanted if key not in found)]
        return [
            line
            for key in keys
            for line in _differences(f"{place}.{key}", found.get(key), wanted.get(key))
        ]
    return [] if found == wanted else [f"{place}: {found!r} there, {wanted!r} now"]
