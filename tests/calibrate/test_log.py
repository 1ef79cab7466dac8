"""The measurement log: what is written is on disk, what is torn or wrong is told from it."""

import os
import re
import resource
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.calibrate.log import (
    SCHEMA,
    Addition,
    Batch,
    Header,
    Log,
    LogWriter,
    Note,
    Point,
    Visit,
    log_hash,
    read_log,
    require_same_run,
)
from passtime.errors import DocumentError, RunError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import load_model

PLAN = (
    Point(id=0, regime="prefill", batch=Batch(prefill=((128, 0),))),
    Point(id=1, regime="decode", batch=Batch(decode=(512, 512)), held_out=True),
)
HEADER = Header(
    schema=SCHEMA,
    device=DeviceFacts(kind="cpu", name="A CPU", memory_bytes=2**33),
    model=load_model("tiny"),
    software={"numpy": "2.3.5"},
    policy={"clock": "thread_cpu", "box": {"new_tokens": 2048}},
    plan=PLAN,
    seed=7,
    started_at="2026-01-01T00:00:00+00:00",
)


def visit(point: int = 0, round_: int = 0, attempt: int = 1, **fields: object) -> Visit:
    values: dict[str, object] = {"samples_ms": (1.5,), "stop": "converged", **fields}
    return msgspec.convert(
        {"line": "visit", "point": point, "round": round_, "attempt": attempt, **values}, Visit
    )


def written(path: Path, *lines: Visit | Note | Addition) -> Path:
    with LogWriter.create(path, HEADER) as writer:
        for line in lines:
            writer.append(line)
    return path


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    lines = (visit(), visit(1, flags=("threads",)), Note(topic="start", values={"load": 0.5}))
    log = read_log(written(tmp_path / "a.jsonl", *lines))
    assert log.header == HEADER
    assert (*log.visits, *log.notes) == lines
    assert log.torn_bytes == 0


def test_every_line_is_on_disk_before_the_next_one_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter.create(path, HEADER) as writer:
        for round_ in range(3):
            writer.append(visit(round_=round_))
            assert len(read_log(path).visits) == round_ + 1


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_log_cut_anywhere_is_resumed_with_every_complete_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(
        tmp_path_factory.mktemp("log") / "a.jsonl", visit(), visit(1), visit(0, 1), visit(1, 1)
    )
    content = path.read_bytes()
    header_bytes = content.index(b"\n") + 1
    size = data.draw(st.integers(header_bytes, len(content)))
    path.write_bytes(content[:size])
    complete = content[:size].count(b"\n") - 1
    resumed = LogWriter.resume(path)
    assert resumed is not None
    writer, log = resumed
    assert len(log.visits) == complete
    with writer:
        writer.append(visit(1, 9))
    after = read_log(path)
    assert after.torn_bytes == 0
    assert after.visits == (*log.visits, visit(1, 9))


@pytest.mark.parametrize("content", [b"", b'{"line":"header","sch'])
def test_a_log_killed_before_its_header_was_whole_starts_anew(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert LogWriter.resume(path) is None
    written(path, visit())
    assert len(read_log(path).visits) == 1


def test_create_does_not_overwrite(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", visit())
    with pytest.raises(DocumentError, match="exists already"):
        LogWriter.create(path, HEADER)
    assert len(read_log(path).visits) == 1


def test_two_measurements_cannot_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with (
        LogWriter.create(path, HEADER),
        pytest.raises(DocumentError, match="another measurement is writing"),
    ):
        LogWriter.resume(path)
    resumed = LogWriter.resume(path)
    assert resumed is not None
    resumed[0].close()


def test_all_bad_lines_are_named_with_their_faults(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", visit(), visit(1))
    with path.open("ab") as file:
        file.write(b"{not json}\n")
        file.write(b'{"line":"visit","point":0,"round":1,"samples_ms":[-2.0],"stop":"converged"}\n')
        file.write(b'{"line":"visit","point":5,"round":1,"samples_ms":[2.0],"stop":"converged"}\n')
        file.write(b'{"line":"visit","point":0,"round":0,"samples_ms":[2.0],"stop":"converged"}\n')
        file.write(b'{"line":"visit","point":0,"round":2,"samples_ms":[2.0],"stop":"why"}\n')
        file.write(b'{"line":"note","topic":"discard","values":{"visits":[1]}}\n')
    with pytest.raises(DocumentError) as caught:
        read_log(path)
    faults = str(caught.value).splitlines()
    assert [re.search(r"line (\d+): ", fault)[1] for fault in faults] == list("456789")  # type: ignore[index]
    assert "samples_ms: wanted 0 < x < 1e+09, found -2.0" in faults[1]
    assert "point 5 is not in the plan" in faults[2]
    assert "repeats the visit of line 2" in faults[3]
    assert "$.stop" in faults[4]
    assert "[point, round, attempt]" in faults[5]


def test_only_the_first_twenty_bad_lines_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    with path.open("ab") as file:
        file.write(b"?\n" * 33)
    with pytest.raises(DocumentError) as caught:
        read_log(path)
    assert str(caught.value).splitlines()[-1].endswith("13 more such lines")
    assert len(str(caught.value).splitlines()) == 21


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello\n", "line 1: not a measurement log's header"),
        (b'{"line":"visit"}\n', "line 1: not a measurement log's header"),
        (b'{"line":"header","schema":99}\n', "schema 99 is newer"),
        (b"", "no complete line"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        read_log(path)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"none\.jsonl: No such file"):
        read_log(tmp_path / "none.jsonl")


def test_withdrawn_visits_are_kept_but_not_accepted(tmp_path: Path) -> None:
    lines = (
        visit(0, samples_ms=(9.0, 9.5), flags=("trend",)),
        visit(1, samples_ms=(2.0,)),
        Note(topic="discard", values={"visits": [[0, 0, 1]], "cause": "drift"}),
        visit(0, attempt=2, samples_ms=(5.0, 5.5)),
        visit(1, 1, samples_ms=(2.5,), flags=("power_cap",)),
        visit(1, 2, samples_ms=(), stop="failed"),
    )
    log = read_log(written(tmp_path / "a.jsonl", *lines))
    assert len(log.visits) == 5
    assert log.samples_ms() == {0: [5.0, 5.5], 1: [2.0, 2.5]}
    assert log.flags() == {1: {"power_cap"}}


def test_flags_found_later_are_added(tmp_path: Path) -> None:
    note = Note(topic="flag", values={"visits": [[0, 0, 1]], "flag": "slow_clock"})
    log = read_log(written(tmp_path / "a.jsonl", visit(), note))
    assert log.flags() == {0: {"slow_clock"}}


def test_the_hash_is_of_complete_lines_and_changes_with_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", visit())
    before = log_hash(path)
    with path.open("ab") as file:
        file.write(b'{"line":"vis')
    assert log_hash(path) == before
    with path.open("ab") as file:
        file.write(b"\n")
    assert log_hash(path) != before


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"device": DeviceFacts(kind="cpu", name="B", memory_bytes=2**33)}, "device.name"),
        ({"model": msgspec.structs.replace(HEADER.model, layers=3)}, "model.layers: 2 there, 3"),
        ({"policy": {**HEADER.policy, "box": {"new_tokens": 1}}}, "policy.box.new_tokens"),
        ({"policy": {**HEADER.policy, "extra": 1}}, "policy.extra: None there, 1 now"),
        ({"seed": 8}, "seed: 7 there, 8 now"),
        ({"kernel_hash": "sha256:1"}, "kernel_hash"),
        ({"plan": PLAN[:1]}, "plan: 2 points there, 1 other ones asked"),
    ],
)
def test_another_run_does_not_continue_this_log(changed: dict[str, object], place: str) -> None:
    wanted = msgspec.structs.replace(HEADER, **changed)
    with pytest.raises(DocumentError, match=re.escape(place)):
        require_same_run(HEADER, wanted, "a.jsonl")


def test_newer_software_on_the_same_device_continues_a_log() -> None:
    driver = msgspec.structs.replace(HEADER.device, driver="999.9")
    later = msgspec.structs.replace(
        HEADER, software={"numpy": "3"}, device=driver, started_at="2027-01-01T00:00:00+00:00"
    )
    require_same_run(HEADER, later, "a.jsonl")


def test_elapsed_budget_is_that_of_the_last_visit() -> None:
    log = Log(
        source="x",
        header=HEADER,
        visits=(visit(clocks={"elapsed_s": 1.5}), visit(1, clocks={"elapsed_s": 2.5})),
        notes=(),
    )
    assert log.elapsed_s == 2.5


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "/dev"])
def test_a_log_that_is_no_regular_file_is_refused_unread(path: str) -> None:
    refused = pytest.raises(DocumentError, match=f"{path}: a measurement log has to be a regular")
    with refused:
        read_log(path)
    with refused:
        log_hash(path)
    with refused:
        LogWriter.create(path, HEADER)
    with refused:
        LogWriter.resume(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DocumentError, match="regular file"):
        LogWriter.resume(tmp_path / "pipe")


def test_times_that_no_pass_takes_and_clocks_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", visit(samples_ms=(1e300,)), visit(1, clocks={"elapsed_s": "x"})
    )
    with pytest.raises(DocumentError) as refused:
        read_log(path)
    assert str(refused.value).splitlines() == [
        f"{path}: line 2: samples_ms: wanted 0 < x < 1e+09, found 1e+300",
        f"{path}: line 3: clocks.elapsed_s: wanted a number, found 'x'",
    ]


def test_a_full_disk_is_told_and_leaves_a_log_to_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LogWriter.create(path, HEADER) as writer:
        writer.append(visit())
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            with pytest.raises(RunError, match=re.escape(f"{path}: cannot be written")):
                writer.append(visit(1))
            writer.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed = LogWriter.resume(path)
    assert resumed is not None
    resumed[0].close()
    assert resumed[1].visits == (visit(),)


ADDED = (
    Point(id=2, regime="prefill", batch=Batch(prefill=((96, 0),))),
    Point(id=3, regime="decode", batch=Batch(decode=(96,))),
)


def test_added_points_are_read_back_and_may_be_visited_from_there_on(tmp_path: Path) -> None:
    more = Addition(points=(Point(id=4, regime="decode", batch=Batch(decode=(9,))),))
    lines = (visit(), Addition(points=ADDED), visit(3), more, visit(4))
    log = read_log(written(tmp_path / "a.jsonl", *lines))
    assert log.header.plan == PLAN
    assert log.points == (*PLAN, *ADDED, *more.points)
    assert [found.point for found in log.visits] == [0, 3, 4]
    assert sorted(log.point_ms()) == [0, 3, 4]


def test_a_visit_before_its_point_is_added_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", visit(3), Addition(points=ADDED))
    with pytest.raises(DocumentError, match="line 2: point 3 is not in the plan"):
        read_log(path)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), r"line 2: points: wanted ids from 2 on, found \[\]"),
        (ADDED[1:], r"line 2: points: wanted ids from 2 on, found \[3\]"),
        (ADDED[::-1], r"line 2: points: wanted ids from 2 on, found \[3, 2\]"),
        ((PLAN[0],), r"line 2: points: wanted ids from 2 on, found \[0\]"),
        ((msgspec.structs.replace(ADDED[0], held_out=True),), "line 2: points: held_out"),
    ],
)
def test_additions_that_make_no_sense_are_named(
    tmp_path: Path, points: tuple[Point, ...], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        read_log(written(tmp_path / "a.jsonl", Addition(points=points)))


def test_a_log_from_before_there_were_additions_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with LogWriter.create(path, msgspec.structs.replace(HEADER, schema=1)) as writer:
        writer.append(visit())
    assert read_log(path).points == PLAN
