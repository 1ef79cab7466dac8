"""``passtime compare``: columns, differences, the sentence, and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from passtime import comparison
from passtime.comparison import Comparison, compare, with_companions
from passtime.errors import InputError
from passtime.profiles.document import load_profile, save_profile
from passtime.sched.config import EngineConfig, ExternalConfig, FixedConfig, LaunchConfig
from passtime.sched.replay.metrics import Slo
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic
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


def test_the_table_says_how_much_was_beyond_the_measured_range(
    passtime: Command, engine: Path, profile: Path
) -> None:
    ran = passtime("compare", "--engine", engine, *LOAD, "--timing", profile)
    assert ran.code == 0
    for tag in ("inside", "held", "extrapolated"):
        assert f"queries {tag}" in ran.out


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


# --- The command --------------------------------------------------------------------------------

LOAD = ("--workload", "conversation", "--num-prompts", 12, "--request-rate", 4)
MODELS = ("--timing", "polynomial", "--timing", "fixed:from=polynomial")


def test_the_table_shows_models_units_and_differences(passtime: Command, engine: Path) -> None:
    ran = passtime("compare", "--engine", engine, *LOAD, *MODELS)
    assert ran.code == 0
    for words in ("constants of polynomial", "p99 TTFT", "tokens/s", " %)", "best decode constant"):
        assert words in ran.out
    assert ran.out.rstrip().splitlines()[-1].startswith("Constants ")
    assert "12 requests under 2 models" in ran.err


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


def test_parsing_loads_no_numbers() -> None:
    """``passtime --help`` should not wait for numpy."""
    program = "import sys, passtime.commands.compare, passtime.commands.simulate\n"
    program += "sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
