"""The checker: each rule finds its fault, and sound tables pass."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from passtime.calibrate.check import Finding, check_points, check_profile
from passtime.calibrate.importers.table import point_of
from passtime.calibrate.laws import Bench
from passtime.checking import check
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import (
    Accuracy,
    EngineFacts,
    Errors,
    MeasuredPoint,
    Parallelism,
    Profile,
    Provenance,
)
from passtime.profiles.shapes import load_model

SHARED = Path(os.environ.get("PASSTIME_SHARED", Path(__file__).parents[2].parent / "shared"))

GPU = DeviceFacts(
    kind="cuda",
    name="test GPU",
    memory_bytes=2**36,
    peak_flops=9e14,
    peak_bytes_per_s=3e12,
    l2_bytes=2**25,
)
ATTENTION = Bench(
    model=msgspec.structs.replace(load_model("llama-3.1-8b"), layers=1),
    engine=EngineFacts(timed_part="attention"),
    device=GPU,
)


def decode_table(scale: float = 1.0) -> list[MeasuredPoint]:
    """Attention at 80 % of the peak, batch 1 … 256 and KV 512 … 16384."""
    return [
        point_of(
            decodes=batch,
            kv_tokens=batch * kv,
            latency_ms=scale * (0.01 + batch * kv * 4096 / 2.4e12 * 1e3),
        )
        for batch in (1, 4, 16, 64, 256)
        for kv in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def rules(findings: list[Finding], severity: str) -> set[str]:
    return {finding.rule for finding in findings if finding.severity == severity}


def test_a_sound_table_has_nothing_to_say_about() -> None:
    assert check_points(decode_table(), ATTENTION) == []


def test_more_bytes_than_the_memory_can_deliver_are_a_fault() -> None:
    findings = check_points(decode_table(scale=0.3), ATTENTION)
    assert "bandwidth" in rules(findings, "fault")
    assert any("times the peak" in finding.message for finding in findings)


def test_a_few_glitches_above_the_peak_are_no_fault() -> None:
    table = decode_table() * 10
    table[-1] = msgspec.structs.replace(table[-1], latency_ms=table[-1].latency_ms / 3)
    assert "bandwidth" not in rules(check_points(table, ATTENTION), "fault")


def test_small_rows_may_run_out_of_the_cache() -> None:
    small = [
        point_of(decodes=1, kv_tokens=kv, latency_ms=kv * 4096 / 9e12 * 1e3)
        for kv in (512, 1024, 2048, 4096)
    ]
    assert rules(check_points(small, ATTENTION), "fault") == set()


def test_more_flops_than_the_peak_are_a_fault() -> None:
    table = [
        point_of(prompts=1, new_tokens=new, latency_ms=new * new / 2 * 4 * 4096 / 2e15 * 1e3)
        for new in (512, 1024, 2048, 4096)
    ]
    assert "compute" in rules(check_points(table, ATTENTION), "fault")


@pytest.mark.parametrize("scale", [1000.0, 0.001])
def test_a_unit_off_by_a_thousand_is_a_fault(scale: float) -> None:
    assert "unit" in rules(check_points(decode_table(scale), ATTENTION), "fault")


def test_more_work_in_less_time_is_a_fault_if_it_is_common() -> None:
    table = [
        msgspec.structs.replace(point, latency_ms=10.0 / (1 + index))
        for index, point in enumerate(decode_table())
    ]
    assert "monotone" in rules(check_points(table, None), "fault")


def test_one_dip_is_a_warning() -> None:
    table = decode_table()
    table[8] = msgspec.structs.replace(table[8], latency_ms=table[8].latency_ms / 2)
    findings = check_points(table, ATTENTION, lines=list(range(2, 32)))
    assert "monotone" in rules(findings, "warning")
    assert any("line 9 to line 10" in finding.message for finding in findings)


def test_noise_is_no_broken_order() -> None:
    noisy = [
        msgspec.structs.replace(
            point, latency_ms=1.0 + 0.15 * (index % 2), spread_percent=10.0, samples=3
        )
        for index, point in enumerate(decode_table())
    ]
    assert "monotone" not in rules(check_points(noisy, None), "fault")


def test_an_isolated_outlier_is_named() -> None:
    table = decode_table()
    table[14] = msgspec.structs.replace(table[14], latency_ms=table[14].latency_ms * 40)
    findings = check_points(table, None)
    assert any(f.rule == "outlier" and "point 14" in f.message for f in findings)


def test_repeats_that_disagree_are_a_warning() -> None:
    table = [
        msgspec.structs.replace(point, spread_percent=25.0, samples=3) for point in decode_table()
    ]
    assert "spread" in rules(check_points(table, ATTENTION), "warning")


def test_copies_and_disagreements_are_told_apart() -> None:
    table = decode_table()
    other = msgspec.structs.replace(table[3], latency_ms=table[3].latency_ms * 2)
    assert "duplicate" in rules(check_points([*table, table[3]], ATTENTION), "warning")
    assert "disagreement" in rules(check_points([*table, other], ATTENTION), "warning")


def test_sums_over_repeats_are_found_beside_the_table_of_single_calls() -> None:
    findings = check_points(decode_table(scale=3.0), ATTENTION, reference=decode_table())
    assert any(f.rule == "scale" and "3.00 times" in f.message for f in findings)


def test_without_a_model_the_datasheet_is_left_out_and_said_so() -> None:
    assert rules(check_points(decode_table(), None), "warning") == {"datasheet"}


def test_a_profile_with_an_impossible_coefficient_is_a_fault(cpu_like_profile: Profile) -> None:
    assert check_profile(cpu_like_profile) == []
    too_fast = msgspec.structs.replace(
        cpu_like_profile,
        coefficients=msgspec.structs.replace(
            cpu_like_profile.coefficients, decode_kv_bytes_per_s=9e12
        ),
    )
    assert rules(check_profile(too_fast), "fault") == {"coefficients"}


@pytest.fixture
def cpu_like_profile() -> Profile:
    from passtime.calibrate.core import fit_core
    from passtime.calibrate.points import measured_box

    points = decode_table()
    core = fit_core(ATTENTION, points)
    one = Accuracy(points=1, mape_percent=0, p90_percent=0, max_percent=0, bias_percent=0)
    return Profile(
        schema=1,
        name="test",
        device_kind="cuda",
        device=GPU,
        model=ATTENTION.model,
        parallelism=Parallelism(tensor_parallel=1, pipeline_parallel=1),
        provenance=Provenance(made_by="a test", timed="nothing"),
        engine=ATTENTION.engine,
        model_class="step",
        coefficients=core.law.coefficients,
        box=measured_box(points),
        errors=Errors(in_sample=one),
        points=tuple(points),
    )


def shared(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"public data are absent: {SHARED / path}")
    return SHARED / path


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("v0/H100/Llama-3.1-70B/tp4/attention.csv.gz", "bandwidth"),
        ("v0/A6000/Llama-3.1-8B/tp1/attention.csv.gz", "bandwidth"),
        ("perf/RTX4090/Llama-3.1-8B/tp1/skew.csv.gz", "scale"),
        ("perf/RTXPRO6000/Llama-3.1-8B/tp1/skew.csv.gz", "scale"),
    ],
)
def test_unsound_public_tables_are_refused(path: str, rule: str) -> None:
    checked = check(str(shared(f"data/llmservingsim/{path}")))
    assert not checked.ok
    assert rule in rules(checked.findings, "fault")


@pytest.mark.parametrize(
    "path",
    [
        "llmservingsim/perf/RTX4090/Llama-3.1-8B/tp1/attention.csv.gz",
        "llmservingsim/perf/RTXPRO6000/Qwen3-32B/tp2/attention.csv.gz",
        "vidur/compute/a30/Qwen-2-7B/attention.csv.gz",
        "aic/opsum/opsum__llama-3.1-70b__h200_sxm__vllm__tp4.csv.gz",
    ],
)
def test_sound_public_tables_pass(path: str) -> None:
    assert check(str(shared(f"data/{path}"))).ok


def test_an_impossible_table_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    source = shared("data/llmservingsim/v0/H100/Llama-3.1-70B/tp4/attention.csv.gz")
    (tmp_path / "table.csv.gz").write_bytes(source.read_bytes())
    assert not check(str(tmp_path / "table.csv.gz")).ok
