"""CSV traces (Azure, BurstGPT, Vidur), and how a format is found."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from passtime.errors import TraceError
from passtime.sched.workload.formats import load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp(s),Model,Request tokens,Response tokens,Total tokens,Log Type\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"

SHARED = Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2] / ".." / "shared"))


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def fault(folder: Path, text: str) -> str:
    with pytest.raises(TraceError) as raised:
        load_trace(written(folder, text))
    return str(raised.value)


def test_azure_dates_count_from_the_first_row(tmp_path: Path) -> None:
    loaded = load_trace(
        written(
            tmp_path,
            AZURE
            + "2023-11-16 18:17:03.9799600,4808,10\n"
            + "2023-11-16 18:17:04.0320000,3180,8\n"
            + "2023-11-17 00:00:03.97996,12,0\n",
        )
    )
    assert loaded.trace_format == "azure"
    assert list(loaded.workload.timestamp_ms) == [0.0, 52.04, 20_580_000.0]
    assert list(loaded.workload.input_tokens) == [4808, 3180, 12]
    assert list(loaded.workload.output_tokens) == [10, 8, 0]
    assert loaded.workload.block_ids is None


def test_azure_dates_with_an_offset_are_read(tmp_path: Path) -> None:
    loaded = load_trace(
        written(
            tmp_path,
            AZURE + "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 00:00:01.009930Z,1,1\n",
        )
    )
    assert list(loaded.workload.timestamp_ms) == [0.0, 1000.0]


def test_failed_requests_of_burstgpt_are_left_out_and_counted(tmp_path: Path) -> None:
    loaded = load_trace(
        written(
            tmp_path,
            BURSTGPT
            + "5,ChatGPT,472,18,490,Conversation log\n"
            + "45,ChatGPT,1087,0,1087,API log\n"
            + "118.5,GPT-4,417,276,693,Conversation log\n",
        )
    )
    assert loaded.trace_format == "burstgpt"
    assert list(loaded.workload.timestamp_ms) == [5000.0, 118_500.0]
    assert list(loaded.workload.output_tokens) == [18, 276]
    assert loaded.notes == [f"{tmp_path / 'trace.csv'}: 1 of 3 requests failed, they are left out"]


def test_vidur_seconds_become_exact_milliseconds(tmp_path: Path) -> None:
    loaded = load_trace(
        written(
            tmp_path,
            "num_prefill_tokens,pd_ratio,arrived_at,num_decode_tokens\n"
            "374,8.5,0.0,44\n396,3.6,4.314579,109\n374.0,1,1.7e2,44.0\n",
        )
    )
    assert loaded.trace_format == "vidur"
    assert list(loaded.workload.timestamp_ms) == [0.0, 4314.579, 170_000.0]
    assert list(loaded.workload.input_tokens) == [374, 396, 374]


def test_lengths_without_arrivals_load_with_a_note(tmp_path: Path) -> None:
    loaded = load_trace(written(tmp_path, "num_prefill_tokens,num_decode_tokens\n5,6\n"))
    assert list(loaded.workload.timestamp_ms) == [None]
    assert "only a fixed concurrency can replay it" in loaded.notes[0]


@pytest.mark.parametrize("header", [AZURE, BURSTGPT, VIDUR])
def test_a_header_alone_is_no_trace(tmp_path: Path, header: str) -> None:
    assert "holds no requests" in fault(tmp_path, header)


def test_an_unknown_header_lists_the_known_ones(tmp_path: Path) -> None:
    found = fault(tmp_path, "time,prompt,completion\n1,2,3\n")
    for name in ("mooncake", "azure", "burstgpt", "vidur", "ContextTokens", "Request tokens"):
        assert name in found
    assert "'time,prompt,completion'" in found


def test_a_format_that_is_asked_for_names_the_missing_column(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="azure format needs a column 'TIMESTAMP'"):
        load_trace(written(tmp_path, VIDUR + "0,1,1\n"), trace_format="azure")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace format 'weka'; known: mooncake, azure"):
        load_trace(written(tmp_path, VIDUR + "0,1,1\n"), trace_format="weka")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("2023-11-16 18:17:03,abc,10", "line 3, column ContextTokens: expected a whole number"),
        ("2023-11-16 18:17:03,,10", "line 3, column ContextTokens: expected a whole number"),
        ("2023-11-16 18:17:03,7.5,10", "found '7.5'"),
        ("2023-11-16 18:17:03,-7,10", "found '-7'"),
        ("2023-11-16 18:17:03,1_0,10", "found '1_0'"),
        ("2023-11-16 18:17:03,nan,10", "found 'nan'"),
        ("2023-11-16 18:17:03,0,10", "line 3, column ContextTokens: expected >= 1, found 0"),
        ("yesterday,1,10", "line 3, column TIMESTAMP: expected a date and time, found 'yesterday'"),
        ("2023-11-16 18:17:03,1", "line 3: expected 3 cells, found 2"),
    ],
)
def test_a_bad_cell_is_refused_with_line_and_column(
    tmp_path: Path, cells: str, message: str
) -> None:
    assert message in fault(tmp_path, AZURE + "2023-11-16 18:17:00,1,1\n" + cells + "\n")


def test_bad_cells_are_gathered(tmp_path: Path) -> None:
    found = fault(tmp_path, VIDUR + "x,y,z\n" * 10)
    assert len(found.splitlines()) == 21
    assert "and 10 more faults" in found


def test_an_option_without_effect_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, VIDUR + "0,1,1\n")
    with pytest.raises(TraceError, match="vidur has no hash_ids"):
        load_trace(path, trace_block_size=512)
    with pytest.raises(TraceError, match="dates of azure"):
        load_trace(written(tmp_path, AZURE + "2023-11-16 18:17:00,1,1\n"), time_unit="s")


def test_another_time_unit_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, VIDUR + "0,1,1\n2500,1,1\n")
    assert list(load_trace(path, time_unit="ms").workload.timestamp_ms) == [0.0, 2500.0]
    assert list(load_trace(path, time_unit="us").workload.timestamp_ms) == [0.0, 2.5]


# --- Clocks (T02) -------------------------------------------------------------------------------


def test_an_epoch_clock_is_kept_for_the_replay_to_rebase(tmp_path: Path) -> None:
    loaded = load_trace(written(tmp_path, VIDUR + "1787000000.000,1,1\n1787000000.020,1,1\n"))
    first, second = loaded.workload.timestamp_ms
    assert first is not None
    assert second is not None
    assert second - first == 20.0
    assert loaded.notes == []


def test_an_epoch_clock_mixed_with_a_relative_one_is_refused(tmp_path: Path) -> None:
    found = fault(tmp_path, VIDUR + "1787000000,1,1\n20,1,1\n")
    assert "span 56.6 years" in found
    assert "mix an epoch clock with a relative one" in found


def test_odd_clocks_are_noted(tmp_path: Path) -> None:
    notes = load_trace(written(tmp_path, VIDUR + "3,1,1\n-5,1,1\n")).notes
    assert any("-5000 ms; it becomes time 0" in note for note in notes)
    assert any("not in order" in note for note in notes)


# --- Files --------------------------------------------------------------------------------------


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: No such file"):
        load_trace(tmp_path / "nowhere.csv")


def test_text_that_is_no_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(VIDUR.encode() + b"0,1,1\n0,\xff,1\n")
    with pytest.raises(TraceError, match="line 3: not UTF-8"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "rows"), [("splitwise_conv.csv.gz", 19366), ("splitwise_code.csv.gz", 8819)]
)
def test_real_traces_load_fast(name: str, rows: int) -> None:
    path = SHARED / "data" / "traces" / name
    if not path.exists():
        pytest.skip(f"{name}: no such trace under PASSTIME_SHARED or ../shared")
    started = time.process_time()
    loaded = load_trace(path)
    assert time.process_time() - started < 0.6  # 0.06 s measured; ten times that is a fault
    assert loaded.notes == []
    assert len(loaded.workload) == rows
