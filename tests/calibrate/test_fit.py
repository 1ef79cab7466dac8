"""From a log to a profile: errors counted honestly, faults refused, the same bytes twice."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from passtime.calibrate.fit import fit_log
from passtime.calibrate.importers.table import point_of
from passtime.calibrate.isotonic import monotone
from passtime.calibrate.log import Batch, Header, Line, Note, Point, Visit
from passtime.calibrate.points import columns
from passtime.calibrate.residual import fit_surface
from passtime.errors import DocumentError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import MeasuredPoint, Profile, save_profile
from passtime.profiles.provider import ProfileTiming
from passtime.profiles.shapes import load_model

CPU = DeviceFacts(kind="cpu", name="test CPU", memory_bytes=2**34)
GPU = DeviceFacts(
    kind="cuda", name="test GPU", memory_bytes=2**36, peak_flops=9e14, peak_bytes_per_s=3e12
)


def true_ms(batch: Batch) -> float:
    new = sum(chunk for chunk, _ in batch.prefill)
    pairs = sum(chunk * prefix + chunk * (chunk + 1) / 2 for chunk, prefix in batch.prefill)
    decodes = len(batch.decode)
    time = 0.4 + 0.01 * (new + decodes) + 2e-6 * pairs + 1e-5 * sum(batch.decode)
    return time * (1.1 if new and decodes else 1.0)


def batches(count: int, seed: int = 1) -> list[Batch]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompts = tuple(
            (rng.randint(4, 1024), rng.choice([0, rng.randint(1, 2048)]))
            for _ in range(rng.randint(1, 3))
        )
        decodes = tuple(rng.randint(16, 4096) for _ in range(rng.randint(1, 24)))
        found.append(
            Batch(
                prefill=prompts if number % 3 != 1 else (),
                decode=decodes if number % 3 != 0 else (),
            )
        )
    return found


def log_file(
    path: Path,
    chosen: list[Batch],
    *,
    device: DeviceFacts = CPU,
    model: str = "tiny",
    scale: float = 1.0,
    noise: float = 0.01,
    held_out: int = 0,
    notes: tuple[Note, ...] = (),
) -> Path:
    rng = random.Random(5)
    plan = tuple(
        Point(
            id=number,
            regime="mixed" if b.prefill and b.decode else "prefill" if b.prefill else "decode",
            batch=b,
            held_out=number < held_out,
        )
        for number, b in enumerate(chosen)
    )
    header = Header(
        schema=1,
        device=device,
        model=load_model(model),
        software={"numpy": "2"},
        policy={"attention": "causal", "runner": "a test"},
        plan=plan,
        seed=1,
        started_at="2026-01-01T00:00:00Z",
    )
    visits = [
        Visit(
            point=point.id,
            round=turn,
            samples_ms=(scale * true_ms(point.batch) * rng.lognormvariate(0, noise),),
            stop="converged",
        )
        for turn in range(9)
        for point in plan
    ]
    lines: list[Line] = [header, *visits, *notes]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("fit") / "log.jsonl"
    return fit_log(log_file(path, batches(75), held_out=10))


def test_the_fit_finds_what_was_measured(profile: Profile) -> None:
    assert profile.errors.in_sample.mape_percent < 1.5
    assert profile.errors.held_out is not None
    assert profile.errors.held_out.mape_percent < 3.0
    assert profile.errors.planned is not None
    assert profile.errors.planned.mape_percent < 3.0
    assert profile.errors.noise_floor_percent == pytest.approx(1.0, rel=0.5)


def test_held_out_points_are_never_fitted(tmp_path: Path) -> None:
    chosen = batches(40)
    spoilt = log_file(tmp_path / "a.jsonl", chosen, held_out=5)
    text = spoilt.read_text().splitlines()
    honest = fit_log(spoilt)
    for index, line in enumerate(text[1:], start=1):
        visit = msgspec.json.decode(line)
        if visit["point"] < 5:
            visit["samples_ms"] = [1000.0 * sample for sample in visit["samples_ms"]]
            text[index] = msgspec.json.encode(visit).decode()
    (tmp_path / "b.jsonl").write_text("\n".join(text) + "\n")
    fooled = fit_log(tmp_path / "b.jsonl", force=True)
    assert fooled.coefficients == honest.coefficients
    assert fooled.residual == honest.residual
    assert fooled.errors.planned is not None
    assert fooled.errors.planned.mape_percent > 90.0


def test_errors_are_told_per_regime_and_beyond_every_axis(profile: Profile) -> None:
    assert set(profile.errors.by_regime) == {"prefill", "decode", "mixed"}
    assert profile.errors.worst_regime in profile.errors.by_regime
    assert {"new_tokens", "decodes"} <= set(profile.errors.extrapolation)


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log.jsonl", batches(40))
    for name in ("a.json", "b.json"):
        save_profile(fit_log(path), tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_provenance_names_log_device_and_runner(profile: Profile, tmp_path: Path) -> None:
    assert profile.provenance.timed == "a test"
    assert profile.provenance.log_sha256 is not None
    assert len(profile.provenance.log_sha256) == 64
    assert profile.device == CPU
    assert profile.device_kind == "cpu"


def test_a_measured_launch_overhead_is_kept(tmp_path: Path) -> None:
    note = Note(topic="launch_overhead", values={"ms": 0.021})
    path = log_file(tmp_path / "log.jsonl", batches(20), notes=(note,))
    assert fit_log(path).engine.launch_overhead_ms == 0.021


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_points_are_refused_out_loud(count: int, tmp_path: Path) -> None:
    path = log_file(tmp_path / "log.jsonl", batches(count))
    with pytest.raises(
        DocumentError, match=rf"log.jsonl: {count} measured points to fit, at least"
    ):
        fit_log(path)


def test_three_points_make_a_profile_that_rises(tmp_path: Path) -> None:
    chosen = [Batch(prefill=((new, 0),)) for new in (64, 256, 1024)]
    timing = ProfileTiming(fit_log(log_file(tmp_path / "log.jsonl", chosen)))
    times = [timing.predict_prefill_ms(1, new, 0) for new in (64, 256, 1024, 4096)]
    assert times == sorted(times)
    assert times[1] == pytest.approx(true_ms(chosen[1]), rel=0.15)
    assert timing.profile.errors.held_out is None


@pytest.mark.parametrize("model_class", ["affine", "roofline"])
def test_other_classes_have_no_residual_but_the_same_report(
    model_class: str, tmp_path: Path
) -> None:
    path = log_file(tmp_path / "log.jsonl", batches(60))
    profile = fit_log(path, model_class=model_class)  # type: ignore[arg-type]
    assert profile.residual == {}
    assert profile.model_class == model_class
    assert profile.errors.held_out is not None
    assert profile.errors.held_out.mape_percent < 10.0


def test_impossible_times_are_refused_unless_forced(tmp_path: Path) -> None:
    path = log_file(
        tmp_path / "log.jsonl", batches(60), device=GPU, model="llama-3.1-8b", scale=0.01
    )
    with pytest.raises(DocumentError, match=r"log.jsonl: .*peak(.|\n)*--force fits all the same"):
        fit_log(path)
    assert fit_log(path, force=True).points


# --- The residual's own promises ----------------------------------------------------------------


def test_the_residual_fades_away_from_the_data() -> None:
    passes = columns([_decode_point(batch, 500) for batch in (1, 2, 4, 8, 16, 32)])
    ratio = np.full(6, 0.2)
    surface = fit_surface(passes, ratio, np.zeros(6))
    near = surface.mean(columns([_decode_point(8, 500)]))
    far = surface.mean(columns([_decode_point(2**40, 500)]))
    assert near[0] > 0.1
    assert abs(far[0]) < 0.25 * near[0]
    assert surface.spread(columns([_decode_point(2**40, 500)]))[0] > surface.spread(passes).max()


def _decode_point(batch: int, context: int) -> MeasuredPoint:
    return point_of(decodes=batch, kv_tokens=batch * context, latency_ms=1.0)


def test_values_that_rise_already_are_not_moved() -> None:
    values = np.add.outer(np.arange(5.0), np.arange(4.0))
    slack = [np.zeros((4, 4)), np.zeros((5, 3))]
    assert monotone(values, np.ones_like(values), slack) == pytest.approx(values)


def test_values_are_moved_until_they_fall_by_no_more_than_allowed() -> None:
    rng = np.random.default_rng(0)
    for shape in ((6, 7), (4, 5, 3), (3, 4, 3, 5)):
        values = rng.normal(0, 0.3, shape)
        slack = [rng.uniform(0, 0.1, np.diff(values, axis=a).shape) for a in range(len(shape))]
        moved = monotone(values, rng.uniform(0.5, 2.0, shape), slack)
        for axis, allowed in enumerate(slack):
            assert (np.diff(moved, axis=axis) >= -allowed - 1e-12).all()


def test_a_trusted_value_moves_less_than_its_neighbours() -> None:
    values, weight = np.array([[0.3, 0.0]]), np.array([[100.0, 1.0]])
    moved = monotone(values, weight, [np.zeros((0, 2)), np.zeros((1, 1))])
    assert moved[0] == pytest.approx([0.3, 0.3], abs=0.01)
