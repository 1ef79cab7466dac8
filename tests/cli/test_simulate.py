"""``passtime simulate`` as people use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from passtime import simulation
from passtime.replay_inputs import ReplayInputs
from passtime.sched.config import EngineConfig, LaunchConfig
from passtime.sched.replay.report import summary
from passtime.sched.simulate import replay
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic
from passtime.timing_spec import ProfileSpec

ENGINE: dict[str, Any] = {
    "backend": "vllm",
    "block_size": 16,
    "num_gpu_blocks": 500,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "timing_model": {"type": "fixed", "prefill_ms": 100.0, "decode_ms": 1.0},
}

Command = Callable[..., Any]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(ENGINE))
    return path


def trace_of(folder: Path, *rows: dict[str, Any], name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp: float, tokens: int = 64, output: int = 4, first_id: int = 0) -> dict[str, Any]:
    blocks = -(-tokens // 16)
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": list(range(first_id, first_id + blocks)),
    }


def report_of(passtime: Command, *argv: object) -> dict[str, Any]:
    ran = passtime("simulate", *argv, "--json")
    assert ran.code == 0, ran.err
    document: dict[str, Any] = json.loads(ran.out)
    return document


def summary_of(passtime: Command, *argv: object) -> dict[str, Any]:
    found: dict[str, Any] = report_of(passtime, *argv)["summary"]
    return found


CONSTANT = ("--workload", "constant", "--input-len", 64, "--output-len", 4, "--num-prompts", 20)


# --- What is printed where ----------------------------------------------------------------------


def test_the_table_is_on_stdout_with_units_and_the_time_on_stderr(
    passtime: Command, engine: Path
) -> None:
    ran = passtime("simulate", "--engine", engine, *CONSTANT)
    assert ran.code == 0
    for words in ("latency, ms", "TTFT", "requests/s", "tokens/s", "p99", "preemptions"):
        assert words in ran.out
    assert "20 requests" in ran.err
    assert "\x1b[" not in ran.out


def test_json_is_all_that_stdout_gets_and_the_file_holds_the_same(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    target = tmp_path / "report.json"
    ran = passtime("simulate", "--engine", engine, *CONSTANT, "--json", "-o", target)
    assert json.loads(ran.out) == json.loads(target.read_text())


def test_same_inputs_same_bytes(passtime: Command, engine: Path) -> None:
    load = ("--workload", "code", "--num-prompts", 40, "--request-rate", 5, "--seed", 7)
    argv = ("simulate", "--engine", engine, *load, "--json")
    assert passtime(*argv).out == passtime(*argv).out


def test_columns_are_named_for_what_they_measure(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """M04: prefill 100 ms, decode 1 ms."""
    found = summary_of(passtime, "--engine", engine, "--trace", trace_of(tmp_path, row(0)))
    assert found["mean_ttft_ms"] == 100.0
    assert found["mean_tpot_ms"] == 1.0
    assert found["mean_e2e_latency_ms"] == 103.0


# --- Traces -------------------------------------------------------------------------------------


def test_overlapping_arrivals_overlap(passtime: Command, engine: Path, tmp_path: Path) -> None:
    """T14: arrivals at 0, 1, 1, 1 ms during a pass of 100 ms all wait for its end together."""
    rows = [row(time, output=1, first_id=10 * n) for n, time in enumerate((0, 1, 1, 1))]
    records = tmp_path / "records.jsonl"
    trace = trace_of(tmp_path, *rows)
    report_of(
        passtime, "--engine", engine, "--trace", trace, "--trace-block-size", 16,
        "--per-request", records,
    )  # fmt: skip
    admitted = [json.loads(line)["first_admit_ms"] for line in records.read_text().splitlines()]
    assert admitted == [0.0, 100.0, 100.0, 100.0]


def test_an_epoch_clock_is_rebased(passtime: Command, engine: Path, tmp_path: Path) -> None:
    """T02."""
    epoch = trace_of(tmp_path, row(1787000000000), row(1787000000020))
    found = summary_of(passtime, "--engine", engine, "--trace", epoch)
    assert found["completed_requests"] == 2
    assert found["duration_ms"] < 1000.0


def test_notes_about_a_trace_are_on_stderr(passtime: Command, engine: Path, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, row(5), row(-5))
    ran = passtime("simulate", "--engine", engine, "--trace", trace, "--json")
    assert "not in order" in ran.err
    assert "becomes time 0" in ran.err
    json.loads(ran.out)


def test_failed_requests_of_burstgpt_are_counted_on_stderr(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text(
        "Timestamp(s),Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0,GPT-4,50,3,53,API log\n1,GPT-4,50,0,50,API log\n"
    )
    ran = passtime("simulate", "--engine", engine, "--trace", trace, "--json")
    assert "1 of 2 requests failed" in ran.err
    assert json.loads(ran.out)["summary"]["num_requests"] == 1


def test_a_partial_last_block_is_not_shared(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """T12: both prompts end in the same, partly used block; only whole engine blocks are reused."""
    rows = [row(0, tokens=40), row(500, tokens=40)]
    trace = trace_of(tmp_path, *rows)
    found = summary_of(passtime, "--engine", engine, "--trace", trace, "--trace-block-size", 16)
    assert found["prefix_cache_reused_ratio"] == 32 / 80


def test_exported_imported_simulated_equals_the_first_run(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """T08."""
    exported = tmp_path / "exported.jsonl"
    first = report_of(
        passtime, "--engine", engine, *CONSTANT, "--request-rate", 20, "--seed", 5,
        "--shared-prefix-ratio", 0.5, "--num-prefix-groups", 2, "--write-trace", exported,
    )  # fmt: skip
    again = report_of(passtime, "--engine", engine, "--trace", exported, "--trace-block-size", 16)
    assert first["summary"]["prefix_cache_reused_ratio"] > 0.1
    assert again["summary"] == first["summary"]
    assert again["counts"] == first["counts"]


def test_a_trace_made_for_larger_blocks_is_refused_with_the_size_that_fits(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """T10."""
    rows = [{**row(0), "input_length": 500 * n, "hash_ids": list(range(n))} for n in (2, 5)]
    ran = passtime(
        "simulate", "--engine", engine, "--trace", trace_of(tmp_path, *rows),
        "--trace-block-size", 64,
    )  # fmt: skip
    assert ran.code == 2
    assert "fit trace blocks of 512 tokens" in ran.err


def test_seconds_with_their_unit_give_the_same_result(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """T16."""
    times = [0.0, 103.7, 2500.25]
    in_ms = trace_of(tmp_path, *(row(time) for time in times))
    in_s = trace_of(tmp_path, *(row(time / 1000) for time in times), name="seconds.jsonl")
    assert summary_of(passtime, "--engine", engine, "--trace", in_ms) == summary_of(
        passtime, "--engine", engine, "--trace", in_s, "--trace-time-unit", "s"
    )


def test_a_zero_length_prompt_is_refused(passtime: Command, engine: Path, tmp_path: Path) -> None:
    """T04."""
    trace = trace_of(tmp_path, {**row(0), "input_length": 0})
    ran = passtime("simulate", "--engine", engine, "--trace", trace)
    assert ran.code == 2
    assert "positive input_length" in ran.err


# --- Metrics ------------------------------------------------------------------------------------


def test_a_request_cut_short_divides_by_what_it_made(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """M02: max_model_len ends the request after 5 of 100 tokens."""
    engine.write_text(json.dumps({**ENGINE, "max_model_len": 69}))
    found = summary_of(
        passtime, "--engine", engine, "--trace", trace_of(tmp_path, row(0, output=100))
    )
    assert found["total_output_tokens"] == 5
    assert found["mean_tpot_ms"] == 1.0


def test_two_equal_requests_at_once_have_equal_records(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """M10."""
    records = tmp_path / "records.jsonl"
    trace = trace_of(tmp_path, row(0), row(0, first_id=90))
    report_of(passtime, "--engine", engine, "--trace", trace, "--per-request", records)
    first, second = (json.loads(line) for line in records.read_text().splitlines())
    for name in ("uuid", "session_id"):
        assert first.pop(name) != second.pop(name)
    assert first == second
    assert first["ttst_ms"] == 1.0
    assert first["admission_history"] == [{"at_ms": 0.0, "reused_input_tokens": 0, "pool": None}]


def test_rejected_requests_do_not_drag_the_percentiles(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    """M06: half of the prompts can never fit the model length."""
    engine.write_text(json.dumps({**ENGINE, "max_model_len": 200}))
    rows = [row(n * 1000, tokens=64 if n % 2 else 300, first_id=50 * n) for n in range(10)]
    trace = trace_of(tmp_path, *rows)
    found = report_of(passtime, "--engine", engine, "--trace", trace)
    assert found["counts"]["completed_requests"] == found["counts"]["rejected_requests"] == 5
    assert found["summary"]["max_ttft_ms"] == 100.0
    table = passtime("simulate", "--engine", engine, "--trace", trace).out
    assert "rejected requests" in table


def test_percentiles_that_are_asked_for_are_shown_and_reported(
    passtime: Command, engine: Path
) -> None:
    """M12: unsorted, twice, 0 and 100."""
    argv = ("--engine", engine, *CONSTANT, "--percentiles", "99.9,50,0,50,100")
    found = summary_of(passtime, *argv)
    assert found["p0_ttft_ms"] == found["min_ttft_ms"]
    assert found["p100_ttft_ms"] == found["max_ttft_ms"]
    assert found["p50_itl_ms"] == found["median_itl_ms"]
    assert found["p99.9_ttft_ms"] <= found["p100_ttft_ms"]
    table = passtime("simulate", *argv).out
    assert [f"p{p}" in table for p in ("0", "50", "99.9", "100")] == [True] * 4


@pytest.mark.parametrize("text", ["101", "-1", "fifty", ""])
def test_percentiles_that_are_none_are_refused(passtime: Command, engine: Path, text: str) -> None:
    ran = passtime("simulate", "--engine", engine, *CONSTANT, f"--percentiles={text}")
    assert ran.code == 2
    assert "--percentiles" in ran.err


def test_an_impossible_bound_gives_zero_and_says_why(passtime: Command, engine: Path) -> None:
    """C02: goodput is a figure, not a gate: the exit code is 0."""
    argv = ("simulate", "--engine", engine, *CONSTANT, "--goodput", "ttft:0.1", "tpot:50")
    ran = passtime(*argv)
    assert ran.code == 0
    sentence = "No request keeps TTFT <= 0.1 ms and TPOT <= 50 ms: the smallest TTFT is 100 ms."
    assert sentence in ran.out
    as_json = passtime(*argv, "--json")
    assert json.loads(as_json.out)["summary"]["goodput_completed_requests"] == 0
    assert sentence in as_json.err


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (["itl:5"], "known keys: ttft, tpot, e2e"),
        (["ttft"], "expected ttft:MILLISECONDS"),
        (["ttft:x"], "expected ttft:MILLISECONDS"),
        (["ttft:5", "ttft:6"], "given twice"),
        (["ttft:0"], "must be a positive time"),
    ],
)
def test_bounds_that_are_none_are_refused(
    passtime: Command, engine: Path, bounds: list[str], message: str
) -> None:
    ran = passtime("simulate", "--engine", engine, *CONSTANT, "--goodput", *bounds)
    assert ran.code == 2
    assert message in ran.err


# --- Every flag arrives (S11) -------------------------------------------------------------------

LOAD = ("--workload", "constant", "--input-len", 640, "--output-len", 6, "--num-prompts", 40,
        "--request-rate", 20)  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ("--timing", "fixed:90,1"),
        ("--timing", "polynomial"),
        ("--input-len", 641),
        ("--output-len", 7),
        ("--num-prompts", 41),
        ("--request-rate", 21),
        ("--burstiness", 0.5),
        ("--constant-intervals",),
        ("--seed", 1),
        ("--shared-prefix-ratio", 0.5),
        ("--num-workers", 2),
        ("--arrival-speedup-ratio", 1.5),
        ("--max-sim-time-ms", 500),
        ("--goodput", "ttft:300"),
        ("--percentiles", "12.5"),
    ],
    ids=lambda flags: str(flags[0]),
)
def test_every_flag_changes_the_result(
    passtime: Command, engine: Path, flags: tuple[object, ...]
) -> None:
    """A flag given twice counts the last time, so each is varied by appending it."""
    base = report_of(passtime, "--engine", engine, *LOAD)
    varied = report_of(passtime, "--engine", engine, *LOAD, *flags)
    assert varied["summary"] != base["summary"]
    assert varied["inputs"] != base["inputs"]


def test_closed_loop_flags_change_the_result(passtime: Command, engine: Path) -> None:
    burst = report_of(passtime, "--engine", engine, *CONSTANT)
    closed = report_of(passtime, "--engine", engine, *CONSTANT, "--concurrency", 2)
    assert closed["summary"] != burst["summary"]
    assert closed["inputs"]["replay"]["concurrency"] == 2


def test_prefix_groups_change_the_result(passtime: Command, engine: Path) -> None:
    shared = (*LOAD, "--shared-prefix-ratio", 0.5)
    one = summary_of(passtime, "--engine", engine, *shared)
    many = summary_of(passtime, "--engine", engine, *shared, "--num-prefix-groups", 8)
    assert many["prefix_cache_reused_ratio"] < one["prefix_cache_reused_ratio"]


def test_a_profile_is_asked_as_it_says(passtime: Command, engine: Path, profile: Path) -> None:
    calls = summary_of(passtime, "--engine", engine, *LOAD, "--timing", profile)
    named = summary_of(passtime, "--engine", engine, *LOAD, "--timing", f"{profile}@calls")
    whole = summary_of(passtime, "--engine", engine, *LOAD, "--timing", f"{profile}@pass")
    assert named == calls
    assert whole != calls


def test_a_profile_says_how_far_it_was_asked(
    passtime: Command, engine: Path, profile: Path
) -> None:
    argv = ("simulate", "--engine", engine, *LOAD, "--timing")
    ran = passtime(*argv, profile, "--json")
    document = json.loads(ran.out)
    coverage = document["coverage"]
    assert list(coverage) == ["inside", "held", "extrapolated"]
    assert sum(coverage.values()) >= document["counts"]["passes"]
    outside = 100 * (1 - coverage["inside"] / sum(coverage.values()))
    sentence = f"{outside:.1f} % of the queries to the timing model lay outside its measured range"
    assert outside > 1.0
    assert sentence in ran.err
    assert sentence in passtime(*argv, profile).out
    constants = passtime(*argv, "polynomial", "--json")
    assert json.loads(constants.out)["coverage"] is None
    assert "measured range" not in constants.err


def test_counting_what_a_profile_was_asked_changes_no_number(profile: Path) -> None:
    launch = LaunchConfig(engine=EngineConfig(num_gpu_blocks=500, block_size=16))
    workload = synthetic(SyntheticLoad(kind="conversation", num_prompts=30, request_rate=2.0))
    plain = replay(workload, launch, ProfileSpec(str(profile)).model(launch))
    inputs = ReplayInputs(workload=workload, deployment=launch)
    counted = simulation.simulate(inputs, str(profile)).report
    assert counted.coverage is not None
    assert counted.summary == summary(plain, workload)


def test_engine_settings_are_echoed(passtime: Command, engine: Path) -> None:
    echoed = report_of(passtime, "--engine", engine, *CONSTANT)["inputs"]["engine"]["engine"]
    assert echoed["num_gpu_blocks"] == 500
    assert echoed["timing_model"] == {"type": "fixed", "prefill_ms": 100.0, "decode_ms": 1.0}


def test_constants_that_were_found_are_echoed(passtime: Command, engine: Path) -> None:
    found = report_of(passtime, "--engine", engine, *CONSTANT, "--timing", "fixed:from=config")
    assert found["inputs"]["timing"]["spec"] == "fixed:from=config"
    assert found["inputs"]["timing"]["prefill_ms"] == 100.0
    assert found["inputs"]["timing"]["decode_ms"] == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--trace-block-size", 64), "--trace-block-size goes with --trace only"),
        (("--trace-format", "azure"), "--trace-format goes with --trace only"),
        (("--concurrency", 4, "--request-rate", 3), "--request-rate goes with an open loop"),
        (("--concurrency", 0), "concurrency must be at least 1"),
        (("--num-workers", 0), "num_workers must be at least 1"),
        (("--arrival-speedup-ratio", 0), "finite positive number"),
        (("--max-sim-time-ms", -1), "max_sim_time_ms must be finite and non-negative"),
        (("--burstiness", 2), "need a finite request_rate"),
    ],
)
def test_flags_that_could_do_nothing_are_refused(
    passtime: Command, engine: Path, flags: tuple[object, ...], message: str
) -> None:
    ran = passtime("simulate", "--engine", engine, *CONSTANT, *flags)
    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_flags_of_a_synthetic_load_are_refused_with_a_trace(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    ran = passtime("simulate", "--engine", engine, "--trace", trace_of(tmp_path, row(0)),
                   "--seed", 3)  # fmt: skip
    assert ran.code == 2
    assert "--seed goes with --workload only" in ran.err


def test_an_input_given_twice_is_refused(passtime: Command, engine: Path) -> None:
    """Whoever names two files, or two models, does not want one of them ignored."""
    for flags in (("--engine", engine), ("--timing", "config", "--timing", "polynomial")):
        ran = passtime("simulate", "--engine", engine, *CONSTANT, *flags)
        assert ran.code == 2
        assert f"argument {flags[0]}: given twice" in ran.err


def test_bounds_of_two_flags_hold_together(passtime: Command, engine: Path) -> None:
    one = report_of(passtime, "--engine", engine, *CONSTANT, "--goodput", "ttft:500", "tpot:50")
    two = report_of(
        passtime, "--engine", engine, *CONSTANT, "--goodput", "ttft:500", "--goodput", "tpot:50"
    )
    assert two == one


# --- The engine file ----------------------------------------------------------------------------


def test_launch_form_and_bare_engine_are_both_read(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps({"engine": ENGINE}))
    assert summary_of(passtime, "--engine", engine, *CONSTANT) == summary_of(
        passtime, "--engine", launch, *CONSTANT
    )


def test_unknown_timing_keys_are_warned_about(passtime: Command, engine: Path) -> None:
    timing = {**ENGINE["timing_model"], "colour": "red"}
    engine.write_text(json.dumps({**ENGINE, "timing_model": timing}))
    ran = passtime("simulate", "--engine", engine, *CONSTANT)
    assert ran.code == 0
    assert "timing_model.colour is ignored" in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"num_gpu_blocks": 4, "num_gpu_blocks": 8}', "key 'num_gpu_blocks' is given twice"),
        ('{"speedup_ratio": NaN}', "speedup_ratio must be finite"),
        ("[]", "expected a JSON object"),
        ('{"blocksize": 4}', "unknown key"),
        ('{"num_gpu_blocks": 0}', "num_gpu_blocks must be positive"),
    ],
)
def test_a_bad_engine_file_is_one_clear_message(
    passtime: Command, engine: Path, text: str, message: str
) -> None:
    engine.write_text(text)
    ran = passtime("simulate", "--engine", engine, *CONSTANT)
    assert ran.code == 2
    assert message in ran.err
    assert str(engine) in ran.err
    assert ran.out == ""


def test_an_unknown_timing_model_is_one_line(passtime: Command, engine: Path) -> None:
    """P09."""
    ran = passtime("simulate", "--engine", engine, *CONSTANT, "--timing", "no-such-gpu")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1


def test_a_run_that_cannot_finish_is_no_success(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    engine.write_text(json.dumps({**ENGINE, "num_gpu_blocks": 8}))
    trace = trace_of(tmp_path, row(0, output=400))
    ran = passtime("simulate", "--engine", engine, "--trace", trace)
    assert ran.code == 1
    assert "in-flight" in ran.err
    assert ran.out == ""
