"""The lock-step SGLang core against the literal one, on workloads that reach every branch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from lockstep_comparison import run_lockstep
from sglang_comparison import differences, random_sglang_case

from passtime.sched.config import EngineConfig, FixedConfig, LaunchConfig, SglangConfig
from passtime.sched.lockstep.radix import RadixPages
from passtime.sched.lockstep.replay import supports
from passtime.sched.lockstep.room import Room
from passtime.sched.lockstep.sglang import SglangLockstepRank
from passtime.sched.lockstep.sglang_queue import PrefillQueue
from passtime.sched.lockstep.steps import StepDecodes, SteppedSequence
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.timing import FixedTiming
from passtime.sched.workload.rows import Workload


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_workloads_end_as_in_the_literal_core(first: int) -> None:
    found = {seed: differences(random_sglang_case(seed)) for seed in range(first, first + 50)}
    assert {seed: said for seed, said in found.items() if said} == {}


def test_the_random_workloads_reach_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    def watch(owner: type, method: str, label: Callable[..., str | None]) -> None:
        """Count calls by a label made of result, instance and arguments."""
        original = getattr(owner, method)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            name = label(result, self, *args, **kwargs)
            if name is not None:
                seen[name] += 1
            return result

        monkeypatch.setattr(owner, method, counting)

    def split(upper: Any, pool: Any, lower: Any, page: int) -> str:
        place = "output" if page > upper.prompt_end else "prompt"
        return f"split in {place}, {'held' if upper.locks else 'unlocked'}"

    def acquired(got: bool, pool: Any, sequence: Any, match: Any, end: int) -> str:
        if not got:
            return "no room beside the match"
        own = match.edges and match.edges[-1][0].owner == sequence.row
        return "found own output again" if own else "acquired"

    def added_up(result: bool, room: Any, tokens: int) -> str | None:
        doubtful = abs(room._estimate - tokens) <= room._margin
        return "room added up" if doubtful and any(True for _ in room._each_reserved()) else None

    def blocked(found: int, rank: Any, tokens: int, steps: int) -> str:
        return "head blocked" if found == steps else f"head blocked {'for a while' * bool(found)}"

    watch(RadixPages, "_split", split)
    watch(RadixPages, "acquire", acquired)
    watch(
        RadixPages, "publish", lambda _, pool, *args, order=None: order and "mid-step publication"
    )
    watch(RadixPages, "_remove", lambda _, pool, leaf, feeds: feeds and "removed in a stretch")
    watch(Room, "exceeds", added_up)
    watch(SglangLockstepRank, "_blocked_steps", blocked)
    watch(SglangLockstepRank, "_stretch", lambda _, rank, steps, *args: f"stretch {steps > 1}")
    watch(SglangLockstepRank, "_first_tokens", lambda got, rank, s, n: f"tokens {got or not s}")
    watch(SglangLockstepRank, "_dead_end", lambda *_: "dead end")
    watch(PrefillQueue, "come_back", lambda _, queue, retracted: "retracted")
    for seed in range(300):
        run_lockstep(random_sglang_case(seed))
    assert set(seen) >= {
        "split in prompt, held",
        "split in prompt, unlocked",
        "split in output, unlocked",
        "acquired",
        "found own output again",
        "no room beside the match",
        "mid-step publication",
        "removed in a stretch",
        "room added up",
        "head blocked",
        "head blocked ",
        "head blocked for a while",
        "stretch True",
        "stretch False",
        "tokens True",
        "tokens False",
        "dead end",
        "retracted",
    }


@pytest.mark.parametrize(
    ("engine", "dp_size"),
    [
        (EngineConfig(backend="sglang", aic_nextn=2), 1),
        (EngineConfig(backend="sglang", prefill_decode_interval=1), 1),
        (EngineConfig(backend="sglang", emit_kv_events=True), 1),
        (EngineConfig(backend="sglang"), 2),
    ],
)
def test_what_is_per_request_by_nature_is_left_to_the_literal_core(
    engine: EngineConfig, dp_size: int
) -> None:
    workload = Workload(
        source="one", timestamp_ms=[0.0], input_tokens=[1], output_tokens=[1], block_ids=[[0]]
    )
    launch = LaunchConfig(engine=engine, dp_size=dp_size)
    assert not supports(launch, workload, ReplayOptions())


def test_a_queue_longer_than_the_limit_is_sorted_as_it_shrinks() -> None:
    """Arrivals around 128 waiting requests: when each was there decides how often it is sorted."""
    requests = 180
    workload = Workload(
        source="queue",
        timestamp_ms=[0.7 * row for row in range(requests)],
        input_tokens=[40 + row % 5 for row in range(requests)],
        output_tokens=[3 + row % 7 for row in range(requests)],
        block_ids=[[row % 9, row % 4, 1000 + row] for row in range(requests)],
        trace_block_size=20,
    )
    engine = EngineConfig(
        backend="sglang",
        block_size=1,
        num_gpu_blocks=600,
        max_num_seqs=3,
        timing_model=FixedConfig(10.0, 5.0),
        sglang=SglangConfig(schedule_policy="lpm"),
    )
    timing = FixedTiming(prefill_ms=10.0, decode_ms=5.0)
    outcomes = [
        replay(workload, LaunchConfig(engine=engine), timing, ReplayOptions(core=core))
        for core in ("literal", "auto")
    ]
    assert (outcomes[0].first_admit_ms == outcomes[1].first_admit_ms).all()
    assert (outcomes[0].reused_tokens == outcomes[1].reused_tokens).all()


@given(
    attainable=st.integers(0, 200_000),
    terms=st.lists(st.integers(0, 4096), max_size=40),
    ratio=st.floats(0.0, 1.0),
    charges=st.lists(st.integers(1, 5000), max_size=3),
    offset=st.integers(-1, 1),
)
@settings(deadline=None)
def test_the_estimated_room_decides_as_the_sum_of_doubles(
    attainable: int, terms: list[int], ratio: float, charges: list[int], offset: int
) -> None:
    reserved = 0.0
    for term in terms:
        reserved += term * ratio
    total = float(attainable) - reserved
    room = Room(attainable, sum(terms), ratio, lambda: terms)
    for charge in charges:
        total -= charge
        room.charge(charge)
    tokens = max(0, round(total) + offset)  # where they are most likely to disagree
    assert room.exceeds(tokens) == (total > tokens)


@given(
    page=st.integers(1, 4),
    clip=st.integers(0, 12),
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 15)), max_size=12
    ),
    leaves=st.sets(st.integers(0, 11), max_size=4),
)
@settings(deadline=None)
def test_members_in_step_add_up_to_what_each_of_them_has(
    page: int, clip: int, arrivals: list[tuple[int, int, int]], leaves: set[int]
) -> None:
    """The aggregate against one loop over members, step by step."""
    decodes = StepDecodes(page, clip_tokens=clip, track_longest=True)
    members: list[SteppedSequence] = []
    waiting = sorted(enumerate(arrivals), key=lambda entry: entry[1][0])
    known: dict[SteppedSequence, int] = {}
    for step in range(30):
        while waiting and waiting[0][1][0] <= step:
            row, (_, prompt, output) = waiting.pop(0)
            sequence = SteppedSequence(row, prompt, output)
            sequence.order = row
            known[sequence] = prompt
            decodes.join(sequence)
            members.append(sequence)
        for sequence in [s for s in members if s.row in leaves and step == s.row]:
            decodes.leave(sequence)
            sequence.order = -1
            members.remove(sequence)
        assert decodes.count == len(members)
        if members:
            assert decodes.kv_tokens == sum(known[s] for s in members)
            assert decodes.longest_tokens() == max(known[s] for s in members)
            assert decodes.pages_needed(1) == sum(known[s] % page == 0 for s in members)
            ahead = list(decodes.reserved_ahead(decodes.steps_to_finish()))
            assert ahead[0] == decodes.reserved_tokens
            for later, reserved in enumerate(ahead):
                left = [s.prompt_tokens + s.output_limit - known[s] - later for s in members]
                assert reserved == sum(min(tokens, clip) for tokens in left)
        finished = decodes.finish()
        for sequence in members:
            known[sequence] += 1
        done = [s for s in members if known[s] == s.prompt_tokens + s.output_limit]
        assert sorted(s.row for s in finished) == sorted(s.row for s in done)
        members = [s for s in members if s not in done]
        decodes.advance(1)
