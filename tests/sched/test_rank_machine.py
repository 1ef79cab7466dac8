"""Whatever is sent to a group of ranks, no request and no block gets lost.

A driver that knows no manners sends random commands with right, wrong and repeated ids, half of
them between the start and the end of a pass. After every step each rank is compared with an
independent model of it (``machine_model.py``) and its inside is audited (``machine_audit.py``).

The suite takes 2,000 steps per backend, always the same. A long run takes others, also the same
each time:

    PASSTIME_MACHINE_STEPS=200000 pytest tests/sched/test_rank_machine.py -k lost
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machine_steps import STEPS_PER_LIFE, Life, random_life, shortest
from machine_world import World

from passtime.sched.rank import SchedulerRank
from passtime.sched.vllm.blocks import BlockPool
from passtime.sched.vllm.commands import CommandedRank
from passtime.sched.vllm.handoff import DestinationTable
from passtime.sched.vllm.state import RankState

SUITE_STEPS = 2000
STEPS = int(os.environ.get("PASSTIME_MACHINE_STEPS", SUITE_STEPS))
FIRST_LIFE = 0 if STEPS == SUITE_STEPS else 1_000_000

# What 2,000 steps must have met, or they prove little: every answer to every command, each in
# mid-pass and between passes, and everything that can happen to a request.
ANSWERS = {
    "Submit": ("Submitted", "Refusal"),
    "SubmitHandoffPrefill": ("Submitted", "Refusal"),
    "ReserveDestination": ("DestinationAccepted", "Refusal"),
    "CancelRequest": ("Applied", "Noop"),
    "ActivateDestination": ("Applied", "Noop"),
    "ReleaseSource": ("Applied", "Noop"),
    "CancelSource": ("Applied", "Noop"),
    "CancelDestination": ("Applied", "Noop"),
}
EVENTS = {
    "completed",
    "completed without a token",
    "eviction told",
    "misuse refused: no pass",
    "misuse refused: no rank",
    "misuse refused: no time",
    "misuse refused: start again",
    "misuse refused: too early",
    "misuse refused: wrong pass",
    "output suppressed",
    "preemption",
    "prefix reused",
    "rejected",
    "reserved at a pass end",
    "reserved by a command",
    "source held",
} | {
    f"{command} {answer} {when}"
    for command, answers in ANSWERS.items()
    for answer in answers
    for when in ("in mid-pass", "between passes")
}


def run(life: Life, seen: Counter[str]) -> None:
    world = World(life, seen)
    for step in life.steps:
        world.take(step)
    world.end()


def fails(kind: type[Exception], life: Life) -> bool:
    try:
        run(life, Counter())
    except Exception as error:
        return type(error) is kind
    return False


def first_failure(backend: str, steps: int, seen: Counter[str]) -> tuple[int, Life] | None:
    """The first of the lives with so many steps together that goes wrong, cut down."""
    for number in range(FIRST_LIFE, FIRST_LIFE - -steps // STEPS_PER_LIFE):
        life = random_life(backend, number)
        try:
            run(life, seen)
        except Exception as error:
            return number, shortest(life, partial(fails, type(error)))
    return None


@pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])
def test_no_request_and_no_block_gets_lost(backend: str) -> None:
    seen: Counter[str] = Counter()
    assert first_failure(backend, STEPS, seen) is None
    unmet = {name for name in EVENTS if not seen[name]}
    assert unmet == ({"preemption"} if backend == "trtllm" else set())


# --- The machine finds what is planted ----------------------------------------------------------


def forget_unreferenced(original: Callable[..., Any], pool: BlockPool, copies: Any) -> None:
    original(pool, copies)
    pool._lru.popitem() if len(pool._lru) > 2 else None


def swallow_evictions(original: Callable[..., Any], rank: RankState) -> None:
    rank.pool.drain_evicted()


def count_before_checking(original: Callable[..., Any], rank: CommandedRank, *args: Any) -> None:
    rank.generation += 1
    original(rank, *args)


def keep_active(original: Callable[..., Any], table: DestinationTable, request_id: Any) -> None:
    pass


def suppress_for_every_answer(original: Callable[..., Any], *args: Any) -> Any:
    rank, command, outcome, pending = args
    suppressed = original(rank, command, outcome, pending)
    if pending is not None and hasattr(command, "discard_pending_output"):
        kept = [o for o in pending.effects.outputs if o.request_id != command.request_id]
        suppressed = len(kept) < len(pending.effects.outputs) or suppressed
        pending.effects.outputs = kept
    return suppressed


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (BlockPool, "release", forget_unreferenced),
        (RankState, "record_evictions", swallow_evictions),
        (CommandedRank, "_refuse_known", count_before_checking),
        (DestinationTable, "drop_active", keep_active),
        (SchedulerRank, "_suppress", suppress_for_every_answer),
    ],
)
def test_a_planted_fault_is_found_and_cut_down(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, fault: Callable[..., Any]
) -> None:
    original = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args: fault(original, *args))
    found = first_failure("vllm", SUITE_STEPS, Counter())
    assert found is not None
    _, life = found
    assert len(life.steps) <= 15
