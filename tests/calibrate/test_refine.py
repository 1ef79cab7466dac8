"""Points that are added once the plan is measured: where they go, when they stop, what survives."""

import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from passtime.calibrate.clock import ClockPolicy
from passtime.calibrate.core import Core, fit_core
from passtime.calibrate.fit import bench_of
from passtime.calibrate.log import SCHEMA, Batch, Header, Log, LogWriter, read_log
from passtime.calibrate.measure import Measurement, Summary
from passtime.calibrate.plan import (
    SIZINGS,
    Candidate,
    Costs,
    Plan,
    guessed_pass_s,
    guessed_rates,
    make_plan,
    pool_tokens,
)
from passtime.calibrate.points import batch_columns, measured_points
from passtime.calibrate.refine import (
    BATCH_POINTS,
    BATCHES,
    ENOUGH_MAPE_PERCENT,
    ENOUGH_P95_PERCENT,
    Judgement,
    Refinement,
    most_needed,
)
from passtime.calibrate.runners.simulated import Faults, SimulatedGpu
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import load_model

MODEL = load_model("tiny")
FACTS = DeviceFacts(
    kind="cuda",
    name="Simulated",
    memory_bytes=2**34,
    peak_flops=1e14,
    peak_bytes_per_s=1e12,
)
CLOCK = ClockPolicy(
    warm_s=0.02,
    max_visit_s=0.2,
    idle_s=1.0,
    settle_step_s=0.1,
    settle_min_s=0.5,
    settle_max_s=3.0,
)
STEADY = Faults(ramp_s=0.02)
KEPT = 0.25  # of a budget
COSTS = Costs(
    pass_s=partial(guessed_pass_s, MODEL, rates=guessed_rates(FACTS)),
    visit_s=lambda pass_s: 0.05 + CLOCK.visit_s(pass_s),
    memory_bytes=lambda batch: MODEL.weight_bytes + pool_tokens(batch) * MODEL.kv_bytes_per_token,
)


def switched(batch: Batch) -> bool:
    """Where another kernel is chosen."""
    return 12 <= len(batch.decode) <= 96


def smooth_s(batch: Batch) -> float:
    return COSTS.pass_s(batch)


def truth_s(batch: Batch) -> float:
    return smooth_s(batch) * (1.35 if switched(batch) else 1.0)


class Killed(Exception):
    """Stands for a kill."""


class Doomed(SimulatedGpu):
    """Is killed at its n-th replay; never if that is None."""

    left: int | None = None

    def replay(self, work: Batch, inner: int) -> float:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed
        return super().replay(work, inner)


class Bench:
    """A log, a budget, and a simulated GPU; ``kept`` is the share for points to be added."""

    def __init__(self, folder: Path, *, budget_s: float, kept: float = KEPT, seed: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "log.jsonl"
        self.budget_s = budget_s
        self.kept_s = kept * budget_s
        self.seed = seed
        self.plan = planned(budget_s - self.kept_s, seed)

    def device(self, *, smooth: bool = False, seed: int = 0) -> Doomed:
        truth = smooth_s if smooth else truth_s
        return Doomed(facts=FACTS, model=MODEL, truth_s=truth, faults=STEADY, seed=seed)

    def measure(self, device: SimulatedGpu) -> Summary:
        header = Header(
            schema=SCHEMA,
            device=FACTS,
            model=MODEL,
            software={},
            policy=dict(device.policy),
            plan=self.plan.points,
            seed=self.seed,
            started_at="2026-01-01T00:00:00+00:00",
        )
        resumption = LogWriter.resume(self.path)
        writer, earlier = resumption or (LogWriter.create(self.path, header), None)
        refinement = Refinement(candidates=self.plan.spare, costs=COSTS, kept_s=self.kept_s)
        with writer:
            return Measurement(
                runner=device,
                reopen=device.reopened,
                writer=writer,
                header=header,
                earlier=earlier,
                clock=CLOCK,
                pass_s=self.plan.pass_s,
                visit_s=self.plan.visit_s,
                budget_s=self.budget_s,
                memory_bytes=FACTS.memory_bytes,
                progress=lambda share, text: None,
                refinement=refinement if self.kept_s else None,
            ).run()

    def log(self) -> Log:
        return read_log(self.path)

    def core(self) -> Core:
        log = self.log()
        return fit_core(bench_of(log), [p for p in measured_points(log) if not p.held_out])


def planned(budget_s: float, seed: int) -> Plan:
    return make_plan(
        SIZINGS["cuda"],
        COSTS,
        budget_s=budget_s,
        memory_bytes=FACTS.memory_bytes,
        min_rounds=CLOCK.min_rounds,
        seed=seed,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of visits in seconds: what a real disk needs for each is no part of these tests."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose measurement is complete."""
    bench = Bench(tmp_path_factory.mktemp("refined"), budget_s=20.0)
    bench.measure(bench.device())
    return bench


# --- What it is worth -----------------------------------------------------------------------------


def expected_error(bench: Bench, elsewhere: Plan) -> dict[str, float]:
    """Mean error in percent over the expected workload, and over the part of it that switched."""
    batches = [candidate.batch for candidate in elsewhere.spare]
    weight = np.array([candidate.weight for candidate in elsewhere.spare])
    truth_ms = np.array([1e3 * truth_s(batch) for batch in batches])
    predicted_ms = bench.core().predictor().pass_many_ms(batch_columns(batches))
    error = 100.0 * np.abs(predicted_ms / truth_ms - 1.0)
    inside = np.array([switched(batch) for batch in batches])
    return {
        "all": float(np.average(error, weights=weight)),
        "switched": float(np.average(error[inside], weights=weight[inside])),
    }


@pytest.mark.slow
def test_added_points_find_a_switch_better_than_a_larger_plan_of_the_same_budget(
    tmp_path: Path,
) -> None:
    errors = []
    for seed in range(2):
        plain = Bench(tmp_path / f"plain {seed}", budget_s=60.0, kept=0.0, seed=seed)
        adaptive = Bench(tmp_path / f"adaptive {seed}", budget_s=60.0, seed=seed)
        elsewhere = planned(40.0, seed=77)
        taken = []
        for bench in (plain, adaptive):
            summary = bench.measure(bench.device(seed=seed))
            taken.append(summary)
            errors.append(expected_error(bench, elsewhere))
        assert taken[0].added == 0 < taken[1].added
        assert taken[1].points <= taken[0].points + 8, "the same budget, the same effort"
    for key, share in (("all", 0.9), ("switched", 0.8)):
        plain_error, adaptive_error = (sum(e[key] for e in errors[i::2]) / 2 for i in (0, 1))
        assert adaptive_error < share * plain_error, key


def test_where_the_fit_is_good_enough_nothing_is_added(tmp_path: Path) -> None:
    bench = Bench(tmp_path, budget_s=20.0)
    summary = bench.measure(bench.device(smooth=True))
    (judgement,) = [note.values for note in bench.log().notes if note.topic == "judgement"]
    assert judgement["points"] == sum(point.held_out for point in bench.plan.points)
    assert judgement["mape_percent"] <= ENOUGH_MAPE_PERCENT
    assert judgement["p95_percent"] <= ENOUGH_P95_PERCENT
    assert summary.added == 0
    assert bench.log().additions == ()
    assert summary.elapsed_s <= bench.budget_s - bench.kept_s


@pytest.mark.parametrize(
    ("mape", "p95", "enough"), [(3.0, 8.0, True), (3.1, 8.0, False), (3.0, 8.1, False)]
)
def test_both_errors_have_to_be_small(mape: float, p95: float, enough: bool) -> None:
    assert Judgement(points=20, mape_percent=mape, p95_percent=p95).enough is enough


# --- What is chosen -------------------------------------------------------------------------------


def test_added_points_are_new_ones_to_fit_and_measured_like_the_others(refined: Bench) -> None:
    log = refined.log()
    assert 1 <= len(log.additions) <= BATCHES
    assert all(1 <= len(addition.points) <= BATCH_POINTS for addition in log.additions)
    assert len({point.batch for point in log.points}) == len(log.points)
    assert not any(point.held_out for addition in log.additions for point in addition.points)
    rounds = [{visit.round for visit in log.accepted() if visit.point == p.id} for p in log.points]
    assert all(seen == set(range(CLOCK.min_rounds)) for seen in rounds)
    assert len(measured_points(log)) == len(log.points)


def chosen(core: Core, candidates: list[Candidate], allowance_s: float = 1e9) -> list[Candidate]:
    return most_needed(core, candidates, cost_s=lambda batch: 1.0, allowance_s=allowance_s)


def test_choices_keep_apart_from_each_other_and_from_what_is_known(refined: Bench) -> None:
    core = refined.core()
    known = refined.log().points[0]
    lengths = (500, 501, 502, 503, 20000)
    near = [Candidate(regime="decode", batch=Batch(decode=(kv,) * 7), weight=1.0) for kv in lengths]
    there = Candidate(regime=known.regime, batch=known.batch, weight=1.0)
    first_two = {one.batch.decode[0] for one in chosen(core, [there, *near])[:2]}
    assert 20000 in first_two
    assert first_two & {500, 501, 502, 503}


def test_what_nobody_asks_for_is_not_chosen(refined: Bench) -> None:
    spare = list(refined.plan.spare)
    muted = [weighing(one, weight=0.0 if one.regime == "mixed" else one.weight) for one in spare]
    assert "mixed" in {one.regime for one in chosen(refined.core(), spare)}
    assert "mixed" not in {one.regime for one in chosen(refined.core(), muted)}


def weighing(candidate: Candidate, *, weight: float) -> Candidate:
    return Candidate(regime=candidate.regime, batch=candidate.batch, weight=weight)


def test_no_more_is_chosen_than_there_is_time_for(refined: Bench) -> None:
    spare = list(refined.plan.spare)
    assert len(chosen(refined.core(), spare)) == BATCH_POINTS
    assert len(chosen(refined.core(), spare, allowance_s=3.5)) == 3
    assert chosen(refined.core(), spare, allowance_s=0.5) == []
    assert chosen(refined.core(), []) == []


# --- Whatever happens -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [2.0, 8.0, 14.0])
def test_the_budget_is_kept_whatever_it_is(tmp_path: Path, budget_s: float) -> None:
    bench = Bench(tmp_path, budget_s=budget_s)
    device = bench.device()
    summary = bench.measure(device)
    assert summary.elapsed_s <= budget_s + 0.1
    assert device.now() <= budget_s + 0.1
    log = bench.log()
    planned_ids = {point.id for point in log.header.plan}
    before = [v.clocks["elapsed_s"] for v in log.visits if v.point in planned_ids]
    assert max(before) <= budget_s - bench.kept_s + 0.1


def test_a_measurement_killed_among_added_points_goes_on_with_them(
    tmp_path: Path, refined: Bench
) -> None:
    bench = Bench(tmp_path, budget_s=45.0, kept=2 / 3)  # for the same plan, and many starts
    assert bench.plan.points == refined.plan.points
    lines = refined.path.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"addition"' in line)
    bench.path.write_bytes(b"".join(lines[: first + 1]))
    rng = random.Random(3)
    kills = 0
    before = bench.log()
    for attempt in range(60):
        device = bench.device(seed=attempt)
        device.left = rng.randrange(400, 1000)
        try:
            bench.measure(device)
        except Killed:
            log = bench.log()
            assert log.visits[: len(before.visits)] == before.visits
            assert log.additions[: len(before.additions)] == before.additions
            kills += log.visits != before.visits
            before = log
        else:
            break
    assert kills >= 3
    log = bench.log()
    assert log.additions[: len(before.additions)] == before.additions
    assert len(log.additions) <= BATCHES
    counted = [(visit.point, visit.round) for visit in log.accepted() if visit.samples_ms]
    assert len(counted) == len(set(counted))
    assert bench.measure(bench.device()).elapsed_s <= bench.budget_s + 0.1


def test_a_kill_between_judging_and_adding_judges_again(tmp_path: Path, refined: Bench) -> None:
    lines = refined.path.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"addition"' in line)
    bench = Bench(tmp_path, budget_s=refined.budget_s)
    bench.path.write_bytes(b"".join(lines[:cut]) + lines[cut][:40])
    bench.measure(bench.device())
    log = bench.log()
    assert 1 <= len(log.additions) <= BATCHES
    judgements = [note.values for note in log.notes if note.topic == "judgement"]
    assert judgements[0] == judgements[1], "the same log is judged the same"


def test_a_complete_log_is_not_measured_again(refined: Bench) -> None:
    visits, additions = refined.log().visits, refined.log().additions
    assert len(additions) == BATCHES
    refined.measure(refined.device())
    assert refined.log().visits == visits
    assert refined.log().additions == additions
