"""The lock-step core against the literal one, on random workloads that reach every branch."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lockstep_comparison import differences, run_lockstep
from workload_generators import random_case

from passtime.sched.config import EngineConfig, LaunchConfig
from passtime.sched.lockstep.decodes import Decodes
from passtime.sched.lockstep.durations import Durations
from passtime.sched.lockstep.runs import RunPool
from passtime.sched.lockstep.vllm import LockstepRank
from passtime.sched.simulate import ReplayOptions
from passtime.sched.workload.rows import Workload


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_workloads_end_as_in_the_literal_core(first: int) -> None:
    found = {seed: differences(random_case(seed)) for seed in range(first, first + 50)}
    assert {seed: said for seed, said in found.items() if said} == {}


def test_prompts_that_are_hit_again_and_again_leave_no_litter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    count_calls(monkeypatch, seen, RunPool, "_compact", lambda *_: "compacted")
    prompts = [[0], [0, 1], [0, 2]] * 100
    case = dataclasses.replace(
        random_case(0),
        workload=Workload(
            source="repeats",
            timestamp_ms=[0.0] * len(prompts),
            input_tokens=[4 * len(ids) + 1 for ids in prompts],
            output_tokens=[1] * len(prompts),
            block_ids=[[*ids, 9] for ids in prompts],
            trace_block_size=4,
        ),
        launch=LaunchConfig(engine=EngineConfig(block_size=4, num_gpu_blocks=40, max_num_seqs=2)),
        options=ReplayOptions(concurrency=3, capture_admissions=True),
    )
    assert differences(case) == []
    assert seen["compacted"] > 1


def count_calls(
    monkeypatch: pytest.MonkeyPatch,
    counts: Counter[str],
    owner: type,
    method: str,
    label: Callable[..., str | None],
) -> None:
    """Count the calls of a method under the label made of its arguments, before it runs."""
    original = getattr(owner, method)

    def counting(*args: Any, **kwargs: Any) -> Any:
        name = label(*args, **kwargs)
        if name is not None:
            counts[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, counting)


def test_the_random_workloads_reach_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    def watch(owner: type, method: str, label: Callable[..., str | None]) -> None:
        count_calls(monkeypatch, seen, owner, method, label)

    def preemption(rank: LockstepRank, victim: Any, now: int, *, scheduled: bool) -> str:
        if victim is rank._partial:
            return "partial preempted"
        return f"{'fifo' if rank._fifo else 'lifo'} preempted, scheduled={scheduled}"

    watch(LockstepRank, "_preempt", preemption)
    watch(LockstepRank, "_stretch", lambda rank, passes, *_: "stretch" if passes > 1 else None)
    watch(Decodes, "stall", lambda *_: "stall")
    watch(Decodes, "passes_within", lambda *_: "stretch cut by the pool")
    watch(Durations, "_extend", lambda *_: "many asked at once")
    watch(RunPool, "_cut", lambda pool, run, depth: "split" if run.start < depth else None)
    watch(
        RunPool,
        "_cut",
        lambda pool, run, depth: (
            "split in the LRU" if run.start < depth and not run.references else None
        ),
    )
    watch(RunPool, "_take_back_tail", lambda pool, s: "tail found again" if s.tail else None)
    watch(
        RunPool,
        "_succeed",
        lambda pool, run, duplicate: f"duplicate succeeds, held={duplicate.maker is not None}",
    )
    watch(RunPool, "release", lambda pool, s, _: "duplicate released" if s.duplicate else None)
    for seed in range(1000):
        run = run_lockstep(random_case(seed))
        if run.outcome is None:
            seen[type(run.error).__name__] += 1
        else:
            seen["rejected"] += int((run.outcome.status == 2).sum())
            seen["zero outputs"] += int(
                ((run.outcome.status == 1) & (run.outcome.output_tokens == 0)).sum()
            )
            seen["stopped early"] += int((run.outcome.status == 0).any())
    expected = {
        "partial preempted",
        "lifo preempted, scheduled=False",
        "fifo preempted, scheduled=False",
        "fifo preempted, scheduled=True",
        "stretch",
        "stall",
        "stretch cut by the pool",
        "many asked at once",
        "split",
        "split in the LRU",
        "tail found again",
        "duplicate succeeds, held=True",
        "duplicate succeeds, held=False",
        "duplicate released",
        "DeadEndError",
        "rejected",
        "zero outputs",
        "stopped early",
    }
    assert expected <= {name for name, number in seen.items() if number}, sorted(seen.items())
