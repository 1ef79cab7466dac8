"""The mooncake trace format: R-30, R-31, and the faults that its readers have had."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passtime.errors import TraceError
from passtime.sched.workload.formats import LoadedTrace, load_trace
from passtime.sched.workload.mooncake import fitting_block_size, write_mooncake
from passtime.sched.workload.rows import Workload


def row(**changes: Any) -> dict[str, Any]:
    """A good row of 20 tokens in 5 blocks of 4; None removes a key."""
    whole = {"timestamp": 0, "input_length": 20, "output_length": 4, "hash_ids": [1, 2, 3, 4, 5]}
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def load(path: Path, *rows: dict[str, Any] | str, **options: Any) -> LoadedTrace:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    path = path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return load_trace(path, **{"trace_block_size": 4, **options})


def fault(path: Path, *rows: dict[str, Any] | str, **options: Any) -> str:
    with pytest.raises(TraceError) as raised:
        load(path, *rows, **options)
    return str(raised.value)


def test_a_row_becomes_a_request(tmp_path: Path) -> None:
    loaded = load(tmp_path, row(timestamp=7.5))
    workload = loaded.workload
    assert loaded.trace_format == "mooncake"
    assert loaded.notes == []
    assert list(workload.timestamp_ms) == [7.5]
    assert list(workload.input_tokens) == [20]
    assert list(workload.output_tokens) == [4]
    assert workload.block_ids == [[1, 2, 3, 4, 5]]
    assert workload.session_ids is None
    assert workload.delay_ms is None


def test_aliases_mean_the_same(tmp_path: Path) -> None:
    aliased = {"created_time": 3, "input_tokens": 7, "output_tokens": 2, "hash_ids": [1, 2]}
    workload = load(tmp_path, aliased).workload
    assert (workload.timestamp_ms[0], workload.input_tokens[0], workload.output_tokens[0]) == (
        3.0,
        7,
        2,
    )


def test_a_key_beside_its_alias_is_refused(tmp_path: Path) -> None:
    assert "line 1 gives both input_length and input_tokens" in fault(
        tmp_path, row(input_tokens=20)
    )


def test_unknown_keys_and_blank_lines_are_ignored(tmp_path: Path) -> None:
    workload = load(tmp_path, "", row(colour="red", priority=3), "   ", row(timestamp=1)).workload
    assert len(workload) == 2
    assert workload.session_ids == ["request_2", "request_4"]  # numbers of lines, not of rows


def test_missing_input_length_is_the_capacity_of_the_hash_ids(tmp_path: Path) -> None:
    assert load(tmp_path, row(input_length=None)).workload.input_tokens == [20]


def test_default_block_is_512_tokens(tmp_path: Path) -> None:
    workload = load(tmp_path, row(input_length=None), trace_block_size=None).workload
    assert workload.trace_block_size == 512
    assert workload.input_tokens == [2560]


def test_surplus_hash_ids_are_cut(tmp_path: Path) -> None:
    loaded = load(tmp_path, row(input_length=9), row(), row())
    assert loaded.workload.block_ids is not None
    assert loaded.workload.block_ids[0] == [1, 2, 3]
    assert loaded.notes == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(hash_ids=None), "trace line 1 is missing hash_ids"),
        (row(output_length=None), "trace line 1 is missing output_length"),
        (
            row(input_length=33, hash_ids=[1] * 8),
            "line 1 input_length 33 exceeds hash_ids capacity 32",
        ),
        (
            row(input_length=33, hash_ids=[]),
            "line 1 input_length 33 exceeds hash_ids capacity 0",
        ),
        (
            row(output_length=2, output_token_ids=[1, 2, 3]),
            "trace line 1 output_length 2 does not match output_token_ids length 3",
        ),
        (
            row(input_length=0, hash_ids=[]),
            "session request_1 turn 0 must have a positive input_length",
        ),
        (
            '{"timestamp": null, "output_length": 1, "hash_ids": [1]}',
            "Expected `float`, got `null`",
        ),
        (row(output_length=-1), "`$.output_length`"),
        (row(hash_ids=[1, -2]), "`$.hash_ids[1]`"),
        (row(input_length="20"), "`$.input_length`"),
        ('{"timestamp": 1', "trace line 1"),
        ("[1, 2]", "Expected `object`, got `array`"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(
    tmp_path: Path, bad: dict[str, Any] | str, message: str
) -> None:
    found = fault(tmp_path, bad, row(), trace_format="mooncake")
    assert message in found
    assert str(tmp_path / "trace.jsonl") in found
    assert "line 1" in found


def test_zero_output_is_legal(tmp_path: Path) -> None:
    assert load(tmp_path, row(output_length=0)).workload.output_tokens == [0]


def test_bad_rows_are_gathered_and_the_first_twenty_shown(tmp_path: Path) -> None:
    lines = fault(tmp_path, *(row(output_length=None) for _ in range(25))).splitlines()
    assert len(lines) == 21
    assert "trace line 20 is missing" in lines[19]
    assert "and 5 more faults" in lines[20]


def test_trace_block_size_must_be_positive(tmp_path: Path) -> None:
    assert "trace_block_size must be > 0, found 0" in fault(tmp_path, row(), trace_block_size=0)


def test_sessions_keep_file_order_and_their_delays(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        row(session_id="a"),
        row(session_id="b", timestamp=1),
        row(session_id="a", timestamp=None, delay=30),
        row(session_id="b", timestamp=None, delay_ms=4.5),
    ).workload
    assert workload.session_ids == ["a", "b", "a", "b"]
    assert workload.delay_ms == [0.0, 0.0, 30.0, 4.5]
    assert list(workload.timestamp_ms) == [0.0, 1.0, None, None]


def test_a_missing_delay_is_the_distance_to_the_last_given_timestamp(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        row(session_id="a", timestamp=10),
        row(session_id="a", timestamp=None),
        row(session_id="a", timestamp=25),
    ).workload
    assert workload.delay_ms == [0.0, 0.0, 15.0]


def test_a_session_that_runs_backwards_is_refused(tmp_path: Path) -> None:
    found = fault(tmp_path, row(session_id="a", timestamp=10), row(session_id="a", timestamp=4))
    assert "trace line 2 has invalid delay -6" in found


def test_a_first_turn_has_no_delay(tmp_path: Path) -> None:
    assert "trace line 1 sets delay on the first turn of session request_1" in fault(
        tmp_path, row(delay=5)
    )
    assert load(tmp_path, row(delay=0)).workload.delay_ms is None


def test_gzipped_traces_are_read_directly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row()).encode()))
    assert len(load_trace(path, trace_block_size=4).workload) == 1


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row()).encode())[:-12])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz: damaged gzip data"):
        load_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    assert "holds no requests" in fault(tmp_path, "")


# --- T10: the block size is not in the file -----------------------------------------------------


def test_too_large_a_block_size_is_noticed_and_the_fitting_one_named(tmp_path: Path) -> None:
    rows = [row(input_length=64 * n, hash_ids=list(range(n))) for n in (1, 3, 8)]
    notes = load(tmp_path, *rows, trace_block_size=512).notes
    assert len(notes) == 1
    assert "they fit 64 (--trace-block-size 64)" in notes[0]


def test_too_small_a_block_size_is_refused_and_the_fitting_one_named(tmp_path: Path) -> None:
    rows = [row(input_length=500 * n, hash_ids=list(range(n))) for n in (1, 3, 8)]
    found = fault(tmp_path, *rows, trace_block_size=64)
    assert "exceeds hash_ids capacity 64" in found
    assert "fit trace blocks of 512 tokens" in found


@given(size=st.integers(1, 700), lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_the_fitting_block_size_explains_every_row(size: int, lengths: list[int]) -> None:
    pairs = [(tokens, -(-tokens // size)) for tokens in lengths]
    found = fitting_block_size(pairs)
    if found is None:  # only where every prompt is a single block
        assert all(ids == 1 for _, ids in pairs)
    else:
        assert all(-(-tokens // found) == ids for tokens, ids in pairs)


# --- T16: seconds in one trace, milliseconds in another ------------------------------------------


def test_the_same_trace_in_seconds_is_the_same_workload(tmp_path: Path) -> None:
    times = [0.001, 4314.579, 8_640_123.457]
    in_ms = load(tmp_path, *(row(timestamp=time) for time in times)).workload
    in_s = load(tmp_path, *(row(timestamp=time / 1000) for time in times), time_unit="s").workload
    assert in_s == in_ms


def test_a_trace_in_seconds_read_as_ms_is_asked_about(tmp_path: Path) -> None:
    in_s = [row(timestamp=n * 0.2) for n in range(200)]
    (note,) = load(tmp_path, *in_s).notes
    assert "200 requests within 0.0398 s" in note
    assert "--trace-time-unit s" in note
    assert load(tmp_path, *in_s, time_unit="s").notes == []
    assert load(tmp_path, *in_s[:20]).notes == []
    assert load(tmp_path, *(row() for _ in range(200))).notes == []  # a burst


# --- T08: written and read again ----------------------------------------------------------------


def test_written_and_read_again_is_the_same_workload(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        row(session_id="a", input_length=17),
        row(session_id="b", timestamp=1.25),
        row(session_id="a", timestamp=None, delay=30),
        row(session_id="a", timestamp=99),
    ).workload
    path = tmp_path / "again.jsonl"
    write_mooncake(workload, path)
    again = load_trace(path, trace_block_size=4).workload
    assert _columns(again) == _columns(workload)


def test_a_workload_without_content_is_written_with_distinct_blocks(tmp_path: Path) -> None:
    workload = Workload(
        source="lengths", timestamp_ms=[0.0, 1.0], input_tokens=[513, 512], output_tokens=[1, 2]
    )
    path = tmp_path / "out.jsonl"
    write_mooncake(workload, path)
    assert load_trace(path).workload.block_ids == [[0, 1], [2]]


def test_writing_leaves_no_partial_file_behind(tmp_path: Path) -> None:
    workload = Workload(source="x", timestamp_ms=[0.0], input_tokens=[1], output_tokens=[1])
    with pytest.raises(TraceError, match="cannot be written"):
        write_mooncake(workload, tmp_path / "absent" / "out.jsonl")
    write_mooncake(workload, tmp_path / "out.jsonl")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def _columns(workload: Workload) -> tuple[Any, ...]:
    return (
        list(workload.timestamp_ms),
        list(workload.input_tokens),
        list(workload.output_tokens),
        workload.block_ids,
        workload.session_ids,
        workload.delay_ms,
    )
