"""Random SGLang replays through the literal core and the lock-step one; every difference told."""

from __future__ import annotations

import dataclasses
import random

import msgspec
from lockstep_comparison import Run, _run, outcome_differences, run_lockstep, timing_of
from workload_generators import Case, random_case

from passtime.errors import LiveLockError
from passtime.sched.config import LaunchConfig, SglangConfig
from passtime.sched.replay.driver import AggregatedReplay
from passtime.sched.sglang.core import SglangCore


def random_sglang_case(seed: int) -> Case:
    """A replay by seed: pages of one token too, odd chunks, pools from far too small to plenty."""
    case = random_case(seed)
    rng = random.Random(-seed - 1)
    engine = case.launch.engine
    page = rng.choice((1, 1, engine.block_tokens))
    sglang = SglangConfig(
        schedule_policy=rng.choice(("fifo", "lpm")),
        max_prefill_tokens=rng.choice((16384, 16384, 16384, 40, 8 * page + 24)),
        chunked_prefill_size=page * rng.choice((2, 7, 16, 512, 8192)),
        clip_max_new_tokens=rng.choice((0, 1, 8, 24, 4096, 4096)),
        schedule_conservativeness=rng.choice((0.0, 0.1, 0.3, 1.0, 1.0, 1.7)),
    )
    changed = msgspec.structs.replace(
        engine,
        backend="sglang",
        enable_chunked_prefill=True,
        block_size=page,
        num_gpu_blocks=engine.num_gpu_blocks * engine.block_tokens // page,
        sglang=sglang,
    )
    return dataclasses.replace(case, launch=LaunchConfig(engine=changed))


def run_literal(case: Case) -> Run:
    """Through the core that reads as the rules do."""
    timing = timing_of(case)
    replay = AggregatedReplay(
        case.workload,
        case.launch,
        timing,
        arrivals=case.options.arrivals(case.workload),
        num_workers=case.options.num_workers,
        max_sim_time_ms=case.options.max_sim_time_ms,
        capture_admissions=True,
    )
    run = _run(replay.run, timing)
    busy = min(case.options.num_workers, len(case.workload))
    caches = []
    for engine in replay._fleet.engines[:busy]:
        core = engine.ranks[0]._core
        assert isinstance(core, SglangCore)
        caches.append(core.cache)
    pages = [cache.attainable // cache.page_tokens for cache in caches]
    free = [cache.available // cache.page_tokens for cache in caches]
    evictable = [both - unused for both, unused in zip(pages, free, strict=True)]
    return dataclasses.replace(run, free_blocks=free, unreferenced_blocks=evictable)


def differences(case: Case) -> list[str]:
    """Everything in which the two cores disagree about a case."""
    literal, lockstep = run_literal(case), run_lockstep(case)
    if literal.error is not None or lockstep.error is not None:
        said = [_said(run) for run in (literal, lockstep)]
        return [] if said[0] == said[1] else [f"literal {said[0]}; lockstep {said[1]}"]
    assert literal.outcome is not None
    assert lockstep.outcome is not None
    found = outcome_differences(literal.outcome, lockstep.outcome)
    for name in ("questions", "free_blocks", "unreferenced_blocks"):
        a, b = getattr(literal, name), getattr(lockstep, name)
        if a != b:
            found.append(f"{name}: literal {a}, lockstep {b}")
    return found


def _said(run: Run) -> str:
    """The error; of a live-lock only that it is one, since each core sees it in its own way."""
    if isinstance(run.error, LiveLockError):
        return "LiveLockError"
    return f"{type(run.error).__name__}: {run.error}"
