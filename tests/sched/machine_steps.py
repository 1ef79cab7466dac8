"""Random lives of a group: a configuration, and what is done to it, step by step.

Steps are plain data that know nothing of the state they meet: ids are small numbers, so that they
collide, repeat, and hit the right one often. So any part of a life is a life too, and a failing
one can be cut down until nothing in it is superfluous.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from uuid import UUID

from passtime.sched.contract import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    ReleaseSource,
    Request,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)

STEPS_PER_LIFE = 50
Fault: TypeAlias = Literal[
    "no time", "no rank", "start again", "wrong pass", "too early", "no pass"
]
MISUSES: tuple[Fault, ...] = get_args(Fault)
FAMILIES = [[0, 1, 2, 3] * 6, [0, 1, 2, 3, 4, 5] * 4, [7] * 24]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Send:
    """A command to one rank."""

    rank: int
    command: Command


@dataclass(frozen=True, slots=True)
class ActivateAll:
    """All KV that is on its way to a rank arrives."""

    rank: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Start a pass, or complete the one in flight, some time after that is possible."""

    wait_ms: float


@dataclass(frozen=True, slots=True)
class RunPasses:
    """Advance by whole passes."""

    count: int


@dataclass(frozen=True, slots=True)
class Misuse:
    """Something that a group refuses."""

    what: Fault


Step = Send | ActivateAll | Advance | RunPasses | Misuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What happens to one group; ``scale_ms`` 0 makes its passes take no time."""

    settings: dict[str, Any]
    dp_size: int
    scale_ms: float
    steps: Sequence[Step]


def random_life(backend: str, seed: int) -> Life:
    """The life of that number: the same on every machine."""
    draw = random.Random(f"{backend} {seed}")
    dp_size = draw.randint(1, 3)
    return Life(
        settings=_settings(draw, backend),
        dp_size=dp_size,
        scale_ms=draw.choice([0.0, 1.0, 1.0]),
        steps=[_step(draw, dp_size) for _ in range(STEPS_PER_LIFE)],
    )


def _settings(draw: random.Random, backend: str) -> dict[str, Any]:
    """Small pools, small budgets, every switch."""
    block_size = draw.choice([1, 2, 4] if backend == "sglang" else [2, 3, 4])
    settings: dict[str, Any] = {
        "backend": backend,
        "block_size": block_size,
        "num_gpu_blocks": draw.randint(4, 12) * (4 // block_size if backend == "sglang" else 1),
        "max_model_len": draw.choice([None, None, None, 12, 20]),
        "max_num_seqs": draw.choice([None, 1, 2, 3, 4]),
        "max_num_batched_tokens": draw.choice([None, 3, 6, 12, 64]),
        "enable_prefix_caching": draw.random() < 0.8,
        "worker_type": draw.choice(["aggregated", "aggregated", "prefill", "decode"]),
        "preemption_mode": draw.choice(["lifo", "fifo"]),
        "emit_kv_events": draw.random() < 0.8,
    }
    if settings["emit_kv_events"]:
        settings["emit_kv_token_ids"] = draw.random() < 0.5
    if draw.random() < 0.3:
        settings |= {"aic_nextn": 2, "aic_nextn_accept_rates": "0.7,0.5"}
    if backend == "sglang":
        settings["prefill_decode_interval"] = draw.choice([0, 0, 2])
        settings["sglang"] = {
            "schedule_policy": draw.choice(["fifo", "lpm"]),
            "chunked_prefill_size": draw.choice([4, 8, 64]) * block_size,
            "clip_max_new_tokens": draw.choice([0, 2, 8]),
        }
    else:
        settings["enable_chunked_prefill"] = draw.random() < 0.7
    if backend == "vllm":
        settings["prefill_schedule_interval"] = draw.randint(1, 3)
    return settings


def _step(draw: random.Random, dp_size: int) -> Step:
    kind = draw.choices(
        ["advance", "submit", "handoff in", "cancel", "handoff on", "activate", "run", "misuse"],
        [30, 18, 18, 6, 14, 5, 6, 3],
    )[0]
    rank = draw.randrange(dp_size)
    match kind:
        case "advance":
            return Advance(draw.choice([0.0, 0.0, 1.5]))
        case "run":
            return RunPasses(draw.randint(1, 5))
        case "misuse":
            return Misuse(draw.choice(MISUSES))
        case "activate":
            return ActivateAll(rank)
        case _:
            return Send(rank, _command(draw, kind))


def _command(draw: random.Random, kind: str) -> Command:
    handoff_id = UUID(int=draw.randint(101, 104))
    match kind:
        case "submit":
            return Submit(_request(draw))
        case "handoff in":
            kinds: list[Any] = [SubmitHandoffPrefill, ReserveDestination]
            handed: Command = draw.choice(kinds)(handoff_id, _request(draw))
            return handed
        case "cancel":
            return CancelRequest(UUID(int=draw.randint(1, 9)), draw.random() < 0.5)
        case _:
            ends: list[Any] = [ActivateDestination, ReleaseSource, CancelSource, CancelDestination]
            ended: Command = draw.choice(ends)(handoff_id)
            return ended


def _request(draw: random.Random) -> Request:
    """Prompts that share beginnings; planned outputs may run on into another prompt's words."""
    family = draw.choice(FAMILIES)
    shared = draw.randint(0, 12)
    own = [draw.randint(0, 2) for _ in range(draw.randint(0 if shared else 1, 5))]
    output = draw.choice([0, 1, 2, 3, 5, 8, 12])
    start = shared + len(own)
    return Request(
        request_id=UUID(int=draw.randint(1, 9)),
        tokens=family[:shared] + own,
        max_output_tokens=output,
        output_token_ids=family[start : start + output] if draw.random() < 0.5 else None,
    )


# --- Shrinking ----------------------------------------------------------------------------------


def shortest(life: Life, fails: Callable[[Life], bool]) -> Life:
    """Cut steps and settings out of a failing life as long as it still fails."""
    steps = _fewest(life.steps, lambda steps: fails(replace(life, steps=steps)))
    life = replace(life, steps=steps)
    settings = _fewest(
        list(life.settings.items()), lambda items: fails(replace(life, settings=dict(items)))
    )
    return replace(life, settings=dict(settings))


def _fewest(items: Sequence[Item], fails: Callable[[list[Item]], bool]) -> list[Item]:
    """Remove pieces, large ones first, until no single item can go."""
    items = list(items)
    size = len(items)
    while size:
        start = 0
        while start < len(items):
            rest = items[:start] + items[start + size :]
            if fails(rest):
                items = rest
            else:
                start += size
        size //= 2
    return items
