"""``passtime compare``: columns, differences, the sentence, and the page."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from passtime import comparison
from passtime.comparison import Comparison, compare, with_companions
from passtime.comparison_drawing import colours
from passtime.comparison_table import comparison_tables
from passtime.errors import InputError
from passtime.profiles.document import load_profile, save_profile
from passtime.sched.config import EngineConfig, ExternalConfig, FixedConfig, LaunchConfig
from passtime.sched.replay.metrics import Slo
from passtime.sched.simulate import ReplayOptions
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic
from passtime.tables import number
from passtime.timing_spec import BestConstants, EngineTiming, parse_timing

ENGINE: dict[str, Any] = {
    "block_size": 16,
    "num_gpu_blocks": 2000,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
}
LAUNCH = LaunchConfig(engine=EngineConfig(**ENGINE))
WORKLOAD = synthetic(SyntheticLoad(kind="conversation", num_prompts=20, request_rate=4.0))

SHARED = Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2] / ".." / "shared"))

Command = Callable[..., Any]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(ENGINE))
    return path


def compared(*specs: str, **options: Any) -> Comparison:
    return compare(WORKLOAD, LAUNCH, specs, **options)


def values(found: Comparison, key: str) -> tuple[float | None, ...]:
    return next(row.values for row in found.rows() if row.key == key)


def test_columns_stand_in_the_order_they_were_given() -> None:
    found = compared("polynomial", "fixed:30,20", "config")
    assert [column.label for column in found.columns] == ["polynomial", "fixed:30,20", "config"]


def test_each_model_is_told_before_it_is_replayed() -> None:
    told: list[str] = []
    found = compared("polynomial", "fixed:from=polynomial", progress=told.append)
    assert told == found.titles


def test_every_column_is_a_replay_of_its_own() -> None:
    found = compared("fixed:30,20", "fixed:60,40")
    slow = values(found, "mean_itl_ms")
    assert slow[0] is not None
    assert slow[1] is not None
    assert slow[0] >= 20.0
    assert slow[1] >= 40.0


def test_a_model_given_twice_is_one_column() -> None:
    found = compared("polynomial", "fixed:30,20", "polynomial")
    assert len(found.columns) == 2


def test_one_model_alone_is_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="nothing to compare 'polynomial' with"):
        compared("polynomial")


def test_differences_are_to_the_first_column() -> None:
    found = compared("fixed:30,20", "fixed:30,30")
    row = next(row for row in found.rows() if row.key == "median_itl_ms")
    assert row.values == (20.0, 30.0)
    assert row.difference_percent(1) == pytest.approx(50.0)
    assert row.difference_percent(0) == 0.0


def test_the_metrics_asked_for_are_there() -> None:
    found = compared("polynomial", "fixed:30,20", percentiles=(25.0, 50.0), slo=Slo(ttft_ms=100.0))
    keys = [row.key for row in found.rows()]
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_latency_ms"):
        assert [key for key in keys if key.endswith(f"_{metric}")] == [
            f"mean_{metric}",
            f"p25_{metric}",
            f"median_{metric}",
        ]
    assert "goodput_request_throughput_rps" in keys
    assert keys[-1] == "preemptions"


# --- Constants and companions -------------------------------------------------------------------


def test_best_constants_are_a_column_and_say_what_they_are() -> None:
    found = compared("polynomial", "fixed:from=polynomial")
    constants = found.columns[1]
    assert constants.is_constants
    assert constants.facts["prefill_ms"] > constants.facts["decode_ms"] > 5.74
    again = compared("polynomial", f"fixed:{constants.facts['prefill_ms']!r},"
                     f"{constants.facts['decode_ms']!r}")  # fmt: skip
    assert again.columns[1].summary == constants.summary


def test_the_recorded_column_is_the_plain_replay() -> None:
    assert compared("polynomial", "fixed:from=polynomial").columns[0].summary == (
        compared("polynomial", "fixed:1,1").columns[0].summary
    )


def test_constants_without_companions_bring_none() -> None:
    specs = [parse_timing("config"), parse_timing("fixed:1,1")]
    assert with_companions(specs, LAUNCH) == specs


def test_an_engine_that_runs_on_a_profile_brings_its_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Covered:
        def coverage_prefill(self) -> None: ...
        def coverage_decode_many(self) -> None: ...
        def coverage_pass(self) -> None: ...

    monkeypatch.setattr(EngineTiming, "model", lambda self, launch: Covered())
    assert with_companions([EngineTiming()], LAUNCH) == [
        EngineTiming(),
        BestConstants(EngineTiming()),
    ]


# --- Profiles -----------------------------------------------------------------------------------


def test_a_profile_brings_its_pass_column_and_its_constants(profile: Path) -> None:
    found = compared(str(profile))
    assert [column.label for column in found.columns] == [
        str(profile),
        f"{profile}@pass",
        f"fixed:from={profile}",
    ]
    calls, whole, constants = found.columns
    assert calls.summary != whole.summary != constants.summary
    assert constants.facts["prefill_ms"] > 4.0  # a launch, and more
    assert found.verdict().startswith("Constants ")


def test_columns_are_headed_by_short_names_that_tell_them_apart(profile: Path) -> None:
    assert compared(str(profile)).titles == [
        "small-gpu",
        "small-gpu@pass",
        "constants of small-gpu",
    ]
    twin = profile.parent / "other" / profile.name
    twin.parent.mkdir()
    twin.write_bytes(profile.read_bytes())
    found = compared(str(profile), str(twin))
    assert found.titles == [column.label for column in found.columns]


def test_a_profile_without_mixed_passes_has_no_pass_column(profile: Path) -> None:
    known = load_profile(profile)
    box = {regime: axes for regime, axes in known.box.items() if regime != "mixed"}
    save_profile(msgspec.structs.replace(known, box=box), profile)
    labels = [column.label for column in compared(str(profile)).columns]
    assert labels == [str(profile), f"fixed:from={profile}"]


def test_every_query_to_a_profile_is_tagged(profile: Path) -> None:
    calls, whole, constants = compared(str(profile)).columns
    assert calls.coverage is not None
    assert whole.coverage is not None
    assert constants.coverage is None
    assert list(calls.coverage) == ["inside", "held", "extrapolated"]
    asked = constants.facts["prefill_calls"] + constants.facts["decode_calls"]
    assert sum(calls.coverage.values()) == asked
    assert sum(whole.coverage.values()) == whole.counts["passes"]
    assert calls.coverage["inside"] > 0


def test_an_engine_on_a_profile_equals_the_profile(profile: Path) -> None:
    timing = ExternalConfig(provider="passtime", config={"profile": str(profile)})
    launch = LaunchConfig(engine=EngineConfig(**ENGINE, timing_model=timing))
    found = compare(WORKLOAD, launch, ["config", str(profile)])
    config, constants, calls = found.columns[:3]
    assert config.summary == calls.summary
    assert constants.label == "fixed:from=config"


def test_the_comparison_says_how_much_was_beyond_the_measured_range(
    passtime: Command, engine: Path, profile: Path
) -> None:
    ran = passtime("compare", "--engine", engine, *LOAD, "--timing", profile)
    assert ran.code == 0
    for tag in ("inside", "held", "extrapolated"):
        assert f"queries {tag}, %" in ran.out
    assert "Queries outside the measured range: " in ran.out
    assert "% of those to small-gpu (" in ran.out


def test_a_profile_asked_within_its_range_needs_no_word_about_it() -> None:
    (column, *_) = compared("polynomial", "fixed:1,1").columns
    inside = dataclasses.replace(column, coverage={"inside": 996, "held": 3, "extrapolated": 1})
    outside = dataclasses.replace(column, coverage={"inside": 980, "held": 15, "extrapolated": 5})
    assert Comparison(columns=(inside, inside)).caveats() == []
    (sentence,) = Comparison(columns=(inside, outside)).caveats()
    assert sentence == (
        "Queries outside the measured range: 2.0 % of those to polynomial "
        "(0.5 % by a factor of more than 4)."
    )


# --- The sentence -------------------------------------------------------------------------------


def test_equal_models_agree() -> None:
    assert (
        compared("fixed:30,20", "fixed:30.0,20.0").verdict() == "The models agree on every metric."
    )
    launch = LaunchConfig(
        engine=EngineConfig(**ENGINE, timing_model=FixedConfig(prefill_ms=9.0, decode_ms=4.0))
    )
    found = compare(WORKLOAD, launch, ["config", "fixed:from=config"])
    assert found.parting() is None


def test_the_sentence_names_the_widest_gap_and_its_direction() -> None:
    found = compared("fixed:30,20", "fixed:300,20")
    sentence = found.verdict()
    assert sentence.startswith("The models part most at ")
    assert "under fixed:30,20" in sentence
    assert "under fixed:300,20" in sentence
    parting = found.parting()
    assert parting is not None
    for row in found.rows():
        if row.judged:
            difference = row.difference_percent(1)
            assert difference is not None
            assert _ratio(difference) <= _ratio(parting.percent) * (1 + 1e-12)


def test_nothing_completed_is_no_agreement() -> None:
    found = compared("fixed:30,20", "fixed:60,40", options=ReplayOptions(max_sim_time_ms=0.0))
    assert found.verdict().startswith("No request completed under any model")


def test_requests_that_are_missing_are_told() -> None:
    found = compared("fixed:1,1", "fixed:900,500", options=ReplayOptions(max_sim_time_ms=9000.0))
    (sentence,) = found.caveats()
    completed = values(found, "completed_requests")
    arrived = [column.counts["arrived_requests"] for column in found.columns]
    assert completed[0] == arrived[0]
    assert completed[1] is not None
    assert sentence == (
        "Requests that did not complete are in no figure: "
        f"{arrived[1] - int(completed[1])} of {arrived[1]} under fixed:900,500."
    )
    assert found.document({}).caveats == [sentence]


def _ratio(percent: float) -> float:
    ratio = 1 + percent / 100
    return max(ratio, 1 / ratio)


def test_constants_are_held_against_the_model_they_stand_for() -> None:
    found = compared("fixed:30,20", "polynomial", "fixed:from=polynomial")
    parting = found.parting()
    assert parting is not None
    assert (parting.base, parting.other) == (1, 2)
    assert found.verdict().startswith("Constants ")


def test_constants_hide_what_grows_with_the_batch() -> None:
    """In a burst the polynomial's steps grow and the queue with them; a constant cannot."""
    bursts = synthetic(
        SyntheticLoad(kind="conversation", num_prompts=80, request_rate=2.0, burstiness=0.1)
    )
    found = compare(bursts, LAUNCH, ["polynomial", "fixed:from=polynomial"])
    sentence = found.verdict()
    hidden = re.match(r"Constants hide ([\d.]+) % of p99 TTFT: ", sentence)
    assert hidden, sentence
    assert float(hidden[1]) > 20.0


# --- The table ----------------------------------------------------------------------------------


def rendered(found: Comparison, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for table in comparison_tables(found, width=width):
        console.print(table, "")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_figure_is_folded_or_cut_however_narrow_the_terminal(width: int) -> None:
    """Models that do not fit side by side stand in a table of their own, each once."""
    found = compared("fixed:30,20", "polynomial", "fixed:from=polynomial", "fixed:9000,400")
    lines = rendered(found, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    figures = [
        line.split("┃" if "metric" in line else "│")[1:] for line in lines if "p99 E2E" in line
    ]
    shown = [cell.split()[0] for row in figures for cell in row]
    assert shown == [number(value) for value in values(found, "p99_e2e_latency_ms")]


def test_wide_enough_is_one_table() -> None:
    lines = rendered(compared("fixed:30,20", "polynomial", "fixed:from=polynomial"), 80)
    assert sum(line.startswith("metric") for line in lines) == 1


def test_constants_stand_only_where_there_are_some() -> None:
    lines = rendered(compared("fixed:30,20", "polynomial", "fixed:from=polynomial"), 50)
    tables = "\n".join(lines).split("\n\n")
    assert [("best decode constant" in table) for table in tables] == [False, False, True]


# --- The command --------------------------------------------------------------------------------

LOAD = ("--workload", "conversation", "--num-prompts", 12, "--request-rate", 4)
MODELS = ("--timing", "polynomial", "--timing", "fixed:from=polynomial")


def test_the_table_shows_models_units_and_differences(passtime: Command, engine: Path) -> None:
    ran = passtime("compare", "--engine", engine, *LOAD, *MODELS)
    assert ran.code == 0
    for words in ("constants of polynomial", "p99 TTFT, ms", "tokens/s", " %", "decode constant"):
        assert words in ran.out
    assert ran.out.rstrip().splitlines()[-1].startswith("Constants ")
    assert "12 requests under 2 models" in ran.err


def test_names_in_a_table_are_text(passtime: Command, engine: Path, profile: Path) -> None:
    odd = profile.rename(profile.with_name("[b]:gear:.json"))
    ran = passtime("compare", "--engine", engine, *LOAD, "--timing", odd)
    assert ran.code == 0
    assert "[b]:gear:@pass" in ran.out
    assert "under [b]:gear:" in ran.out


def test_json_holds_every_column_whole(passtime: Command, engine: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    ran = passtime("compare", "--engine", engine, *LOAD, *MODELS, "--json", "-o", target)
    document = json.loads(ran.out)
    assert document == json.loads(target.read_text())
    assert document["schema"] == 1
    assert [column["timing"] for column in document["columns"]] == [
        "polynomial",
        "fixed:from=polynomial",
    ]
    assert document["columns"][1]["summary"]["completed_requests"] == 12
    assert document["inputs"]["timing"] == ["polynomial", "fixed:from=polynomial"]
    assert document["verdict"].startswith("Constants ")


def test_one_model_alone_is_bad_usage(passtime: Command, engine: Path) -> None:
    ran = passtime("compare", "--engine", engine, *LOAD, "--timing", "polynomial")
    assert ran.code == 2
    assert "give --timing at least twice, or a profile" in ran.err


def test_the_page_is_one_file_and_always_the_same(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    pages = []
    for name in ("first.html", "second.html"):
        target = tmp_path / name
        assert passtime("compare", "--engine", engine, *LOAD, *MODELS, "--html", target).code == 0
        pages.append(target.read_text())
    assert pages[0] == pages[1]
    page = pages[0]
    assert "<svg" in page
    assert "p99 TTFT" in page
    assert "Constants " in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)  # nothing is loaded from anywhere
    assert "12 requests (conversation, 4 per second)" in page
    assert "&quot;num_gpu_blocks&quot;: 2000" in page  # everything that was asked for


def test_a_page_without_a_single_sample_says_so(
    passtime: Command, engine: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "page.html"
    ran = passtime(
        "compare", "--engine", engine, *LOAD, *MODELS, "--max-sim-time-ms", 0, "--html", target
    )
    assert ran.code == 0
    page = target.read_text()
    assert page.count("no samples") == 4
    assert "No request completed" in page
    assert '<ul class="caveats">' in page


def test_names_on_a_page_are_text(passtime: Command, engine: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}
    trace = tmp_path / "<b>.jsonl"
    trace.write_text(json.dumps(row))
    target = tmp_path / "page.html"
    ran = passtime("compare", "--engine", engine, "--trace", trace, *MODELS, "--html", target)
    assert ran.code == 0
    page = target.read_text()
    assert "1 request of &lt;b&gt;.jsonl" in page
    assert "<b>" not in page


def test_constants_are_drawn_in_the_colour_of_their_model() -> None:
    found = compared("polynomial", "fixed:30,20", "fixed:from=polynomial")
    model, other, constants = colours(found)
    assert constants == model != other


def test_a_page_without_matplotlib_is_refused_before_any_work(
    passtime: Command, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("passtime.comparison_page.find_spec", lambda name: None)
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: pytest.fail("it ran"))
    target = tmp_path / "page.html"
    ran = passtime("compare", "--engine", engine, *LOAD, *MODELS, "--html", target)
    assert ran.code == 2
    assert "pip install 'passtime[report]'" in ran.err
    assert not target.exists()


@pytest.mark.slow
def test_a_whole_trace_under_two_models_and_their_constants_takes_seconds(
    passtime: Command, engine: Path, profile: Path
) -> None:
    trace = SHARED / "data" / "traces" / "splitwise_conv.csv.gz"
    if not trace.exists():
        pytest.skip("splitwise_conv.csv.gz: no such trace under PASSTIME_SHARED or ../shared")
    engine.write_text(json.dumps({**ENGINE, "num_gpu_blocks": 20_000, "max_num_seqs": 256}))
    started = time.process_time()
    ran = passtime(
        "compare", "--engine", engine, "--trace", trace, "--timing", profile, *MODELS, "--json"
    )
    assert time.process_time() - started < 60.0  # 5 s measured
    columns = json.loads(ran.out)["columns"]
    assert [column["counts"]["completed_requests"] for column in columns] == [19366] * 5
