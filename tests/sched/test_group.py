"""Groups of ranks: who takes part, the barrier, poisoning, prefills held back (C-50 …, V-89)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import FIXED, Recorder, prompt, request, run

from passtime.errors import CommandError, PoisonedError, RunError
from passtime.sched.config import launch_config
from passtime.sched.contract import (
    ActivateDestination,
    CancelRequest,
    CompletionEffects,
    DestinationReserved,
    Noop,
    ReserveDestination,
    RetryHint,
    Submit,
)
from passtime.sched.group import GroupedEngine, GroupPass, combined_hint
from passtime.sched.rank import SchedulerRank

HANDOFF = UUID(int=500)


def group_of(dp_size: int, model: Any = None, **settings: Any) -> GroupedEngine:
    engine = {"block_size": 4, "num_gpu_blocks": 16, "timing_model": FIXED} | settings
    launch = launch_config({"engine": engine, "dp_size": dp_size}, source="test")
    return GroupedEngine(7, launch, model or Recorder())


def execute(group: GroupedEngine, now_ms: float) -> GroupPass:
    group_pass = group.execute_pass(now_ms)
    assert group_pass is not None
    return group_pass


def whole_pass(group: GroupedEngine) -> list[CompletionEffects]:
    group_pass = execute(group, 0.0)
    return group.complete_pass(group_pass.pass_id, group_pass.end_ms)


# --- Prefills held back (V-89): observed with the reference, times in ms ------------------------


@pytest.mark.parametrize(
    ("interval", "admitted", "first_token"), [(1, 15, 30), (2, 15, 30), (3, 20, 35), (4, 25, 40)]
)
def test_a_prompt_waits_for_the_group_s_next_nth_pass(
    interval: int, admitted: float, first_token: float
) -> None:
    outcome = run(
        (0, prompt(8), 10),
        (0, prompt(9), 10),
        (12, prompt(5), 2),
        dp_size=2,
        prefill_schedule_interval=interval,
    )
    assert outcome.first_admit_ms.tolist() == [0, 0, admitted]
    assert outcome.first_token_ms.tolist() == [10, 10, first_token]


def test_a_lone_rank_holds_nothing_back() -> None:
    outcome = run((0, prompt(8), 10), (12, prompt(5), 2), prefill_schedule_interval=3)
    assert outcome.first_admit_ms.tolist() == [0, 15]


def test_a_prompt_of_one_token_is_not_held_back() -> None:
    outcome = run(
        (0, prompt(8), 10),
        (0, prompt(9), 10),
        (12, prompt(1), 2),
        (13, prompt(2), 2),
        dp_size=2,
        prefill_schedule_interval=4,
    )
    assert outcome.first_admit_ms.tolist() == [0, 0, 15, 35]
    assert outcome.first_token_ms.tolist() == [10, 10, 30, 50]


@pytest.mark.parametrize("interval", [2, 3, 4])
def test_a_rank_with_nobody_to_decode_holds_nothing_back(interval: int) -> None:
    outcome = run(
        (0, prompt(8), 10), (12, prompt(5), 2), dp_size=2, prefill_schedule_interval=interval
    )
    assert outcome.first_admit_ms.tolist() == [0, 15]
    assert outcome.first_token_ms.tolist() == [10, 25]


@pytest.mark.parametrize(
    ("interval", "first_token", "last_token"),
    [
        (2, [10, 20, 75, 75], [90, 95, 80, 85]),
        (3, [10, 20, 90, 90], [90, 95, 95, 100]),
        (4, [10, 20, 90, 100], [80, 90, 100, 110]),
    ],
)
def test_a_prompt_in_chunks_is_held_back_between_them(
    interval: int, first_token: list[float], last_token: list[float]
) -> None:
    outcome = run(
        (0, prompt(8), 10),
        (0, prompt(9), 10),
        (12, prompt(20), 2),
        (13, prompt(21), 3),
        dp_size=2,
        prefill_schedule_interval=interval,
        max_num_batched_tokens=8,
    )
    assert outcome.first_token_ms.tolist() == first_token
    assert outcome.last_token_ms.tolist() == last_token


@pytest.mark.parametrize(("interval", "admitted"), [(2, 115), (3, 120), (4, 125)])
def test_the_count_starts_anew_when_the_group_has_drained(interval: int, admitted: float) -> None:
    outcome = run(
        (0, prompt(8), 2),
        (0, prompt(9), 3),
        (100, prompt(5), 6),
        (100, prompt(6), 5),
        (112, prompt(7), 2),
        dp_size=2,
        prefill_schedule_interval=interval,
    )
    assert outcome.first_admit_ms.tolist() == [0, 0, 100, 100, admitted]


def test_who_could_not_all_start_in_an_open_pass_goes_on_in_the_next() -> None:
    outcome = run(
        (0, prompt(8), 10),
        (0, prompt(9), 10),
        (12, prompt(10), 2),
        (12, prompt(11), 2),
        (12, prompt(12), 2),
        (12, prompt(13), 2),
        dp_size=2,
        prefill_schedule_interval=3,
        max_num_batched_tokens=9,
    )
    assert outcome.first_admit_ms.tolist() == [0, 0, 20, 20, 35, 35]
    assert outcome.first_token_ms.tolist() == [10, 10, 50, 50, 70, 70]


def test_places_that_are_taken_leave_a_backlog_too() -> None:
    outcome = run(
        (0, prompt(8), 10),
        (0, prompt(9), 10),
        (0, prompt(10), 9),
        (0, prompt(11), 8),
        (12, prompt(5), 2),
        (12, prompt(6), 2),
        dp_size=2,
        prefill_schedule_interval=4,
        max_num_seqs=2,
    )
    assert outcome.first_admit_ms.tolist() == [0, 0, 0, 0, 60, 45]
    assert outcome.first_token_ms.tolist() == [10, 10, 10, 10, 75, 60]


# --- The barrier and who takes part (C-52 … C-56) -----------------------------------------------


def test_ids_are_taken_only_by_passes_that_run() -> None:  # C-53, C-54
    group = group_of(2)
    assert group.execute_pass(0.0) is None
    ids = []
    for now_ms, number in ((0.0, 1), (20.0, 2)):
        group.apply_command(number % 2, Submit(request(number, 4, 1)), now_ms)
        group_pass = execute(group, now_ms)
        group.complete_pass(group_pass.pass_id, group_pass.end_ms)
        assert group.execute_pass(group_pass.end_ms) is None
        ids.append(group_pass.pass_id)
    assert ids == [0, 1]


def test_a_rank_of_reservations_alone_waits_for_a_command() -> None:  # C-33, C-52
    group = group_of(2)
    group.apply_command(1, ReserveDestination(HANDOFF, request(1, 4, 2)), 0.0)
    assert group.waiting_for_external_command()
    assert not group.is_ready()
    assert not group.is_drained()
    group.apply_command(0, Submit(request(2, 4, 1)), 0.0)
    assert group.is_ready()
    assert not group.waiting_for_external_command()
    assert [rank.dp_rank for rank in execute(group, 0.0).ranks] == [0]


def test_an_idle_rank_counts_as_busy_while_a_sibling_computes() -> None:  # C-13, C-32
    group = group_of(2, num_gpu_blocks=2)
    group.apply_command(0, Submit(request(1, 4, 1)), 0.0)
    group_pass = execute(group, 0.0)
    deferred = group.apply_command(1, ReserveDestination(HANDOFF, request(2, 4, 2)), 3.0)
    assert deferred.lifecycle_events == []
    busy, idle = group.complete_pass(group_pass.pass_id, group_pass.end_ms)
    assert len(busy.outputs) == 1
    assert idle.lifecycle_events == [DestinationReserved(HANDOFF, UUID(int=2), 4)]
    assert idle.outputs == []
    assert idle.forward_pass.duration_ms == group_pass.end_ms
    assert idle.metrics.active_blocks == 1


def test_a_command_edits_the_pending_pass_of_its_own_rank_only() -> None:  # C-34, C-51
    group = group_of(2)
    for rank in (0, 1):
        group.apply_command(rank, Submit(request(1, 4, 1)), 0.0)  # one id, on two ranks
    group_pass = execute(group, 0.0)
    effects = group.apply_command(1, CancelRequest(UUID(int=1), discard_pending_output=True), 1.0)
    assert effects.result == Noop()
    assert effects.suppressed_pending_output
    shown = group.complete_pass(group_pass.pass_id, group_pass.end_ms)
    assert [len(effects.outputs) for effects in shown] == [1, 0]


def test_a_rank_that_joins_in_mid_pass_starts_with_the_next() -> None:  # C-55
    group = group_of(2)
    group.apply_command(0, Submit(request(1, 4, 2)), 0.0)
    first = execute(group, 0.0)
    group.apply_command(1, Submit(request(2, 4, 1)), 1.0)
    with pytest.raises(CommandError, match="already has a pass in flight"):
        group.execute_pass(2.0)
    group.complete_pass(first.pass_id, first.end_ms)
    assert [rank.dp_rank for rank in execute(group, first.end_ms).ranks] == [0, 1]


def test_every_rank_draws_its_own_bursts() -> None:  # C-38, S21
    group = group_of(3, aic_nextn=4, aic_nextn_accept_rates="0.5,0.5,0.5,0.5")
    for rank in range(3):
        group.apply_command(rank, Submit(request(1, 4, 40)), 0.0)
    bursts: list[list[int]] = [[], [], []]
    for _ in range(6):
        for rank, effects in enumerate(whole_pass(group)):
            bursts[rank].append(len(effects.outputs))
    assert len({tuple(burst) for burst in bursts}) == 3
    again = group_of(3, aic_nextn=4, aic_nextn_accept_rates="0.5,0.5,0.5,0.5")
    again.apply_command(1, Submit(request(1, 4, 40)), 0.0)
    assert [len(whole_pass(again)[1].outputs) for _ in range(6)] == bursts[1]


# --- Hints (C-53, S-62) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hints", "combined"),
    [
        (["not_applicable"], "not_applicable"),
        (["not_applicable", "not_applicable"], "not_applicable"),
        (["not_applicable", "exhausted"], "exhausted"),
        (["exhausted", 0], 0),
        ([2, 5, "exhausted"], 5),
        ([5, "retry"], "retry"),
        (["exhausted", "retry"], "retry"),
    ],
)
def test_a_group_says_the_most_promising_of_its_hints(
    hints: list[RetryHint], combined: RetryHint
) -> None:
    assert combined_hint(hints) == combined


def test_a_vllm_group_never_asks_for_a_retry() -> None:  # C-37
    group = group_of(2, enable_chunked_prefill=False, max_num_batched_tokens=4)
    group.apply_command(0, Submit(request(1, 5, 1)), 0.0)
    assert execute(group, 0.0).same_timestamp_retry == "not_applicable"


# --- Poisoning (C-57) ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["execute_pass", "complete_pass", "complete_idle_group_pass"])
@pytest.mark.parametrize("error", [RunError("the disk is full"), OSError("the disk is full")])
def test_a_failing_rank_makes_its_group_unusable(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    group = group_of(2)
    group.apply_command(0, Submit(request(1, 4, 2)), 0.0)

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(SchedulerRank, where, fail)
    with pytest.raises(type(error), match="the disk is full") as caught:
        whole_pass(group)
    if isinstance(error, RunError):
        place = "pass 0 at 0.0 ms" if where == "execute_pass" else "completion of pass 0"
        assert f"worker 7, {place}: the disk is full" in str(caught.value)
    assert not group.is_ready()
    assert not group.is_drained()
    assert not group.waiting_for_external_command()
    for act in (
        lambda: group.execute_pass(1.0),
        lambda: group.complete_pass(0, 1.0),
        lambda: group.apply_command(1, ActivateDestination(HANDOFF), 1.0),
    ):
        with pytest.raises(PoisonedError, match=r"worker 7 is poisoned .*: the disk is full"):
            act()


@pytest.mark.parametrize("now_ms", [-1.0, float("nan"), float("inf")])
def test_a_pass_starts_at_a_time(now_ms: float) -> None:
    group = group_of(1)
    group.apply_command(0, Submit(request(1, 4, 1)), 0.0)
    with pytest.raises(CommandError, match=f"finite and non-negative, got {now_ms}"):
        group.execute_pass(now_ms)
    assert group.is_ready()


def test_a_refused_command_poisons_nothing() -> None:  # C-51
    group = group_of(1)
    group.apply_command(0, Submit(request(1, 4, 1)), 0.0)
    with pytest.raises(CommandError, match="already active"):
        group.apply_command(0, Submit(request(1, 4, 1)), 0.0)
    assert group.is_ready()
