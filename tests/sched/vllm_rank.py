"""One vLLM or TensorRT-LLM rank to play with, and workloads for replays of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal
from uuid import UUID

from passtime.sched.config import builtin_timing, launch_config
from passtime.sched.contract import (
    Admission,
    CommandContext,
    CommandEffects,
    CompletionEffects,
    ForwardPassMetrics,
    PressureEvent,
    RankIdentity,
    RankPass,
    Request,
    Submit,
)
from passtime.sched.rank import SchedulerRank
from passtime.sched.replay.outcome import Outcome
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.timing import PassShape, TimingModel
from passtime.sched.vllm.core import VllmCore
from passtime.sched.workload.rows import Workload

BLOCK = 4
PREFILL_MS, DECODE_MS = 10.0, 5.0
FIXED = {"type": "fixed", "prefill_ms": PREFILL_MS, "decode_ms": DECODE_MS}


def words(number: int, tokens: int) -> list[int]:
    """A prompt that no other number shares."""
    return [1000 * number + position for position in range(tokens)]


def request(
    number: int, prompt: int | list[int], output: int | list[int] = 1, **more: Any
) -> Request:
    """A request by its number: a prompt of its own of so many tokens, or these tokens."""
    return Request(
        request_id=UUID(int=number),
        tokens=words(number, prompt) if isinstance(prompt, int) else prompt,
        max_output_tokens=output if isinstance(output, int) else 0,
        output_token_ids=None if isinstance(output, int) else output,
        **more,
    )


class Recorder:
    """Answers two constants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, int]] = []

    def predict_prefill_ms(self, batch_size: int, mean_isl: int, mean_prefix: int) -> float:
        self.asked.append(("prefill", batch_size, mean_isl, mean_prefix))
        return PREFILL_MS

    def predict_decode_ms(
        self, batch_size: int, active_kv_tokens: int, mean_context_length: int, total_kv_tokens: int
    ) -> float:
        self.asked.append(("decode", batch_size, active_kv_tokens, mean_context_length))
        return DECODE_MS


class ShapeRecorder(Recorder):
    """A model that wants to be asked about whole passes."""

    composition = "pass"

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[PassShape] = []

    def predict_pass_ms(self, shape: PassShape) -> float:
        self.shapes.append(shape)
        return 7.0


@dataclass(slots=True)
class Seen:
    """A pass from start to end."""

    executed: RankPass
    effects: CompletionEffects

    @property
    def outputs(self) -> list[tuple[int, int | None]]:
        """(request number, token) in order."""
        return [(output.request_id.int, output.token_id) for output in self.effects.outputs]

    @property
    def who(self) -> list[int]:
        """Whose outputs, in order."""
        return [number for number, _ in self.outputs]

    @property
    def admitted(self) -> list[tuple[int, int]]:
        """(request number, reused tokens) in order."""
        return [
            (admission.request_id.int, admission.reused_input_tokens)
            for admission in self.admissions
        ]

    @property
    def admissions(self) -> list[Admission]:
        return self.executed.start_effects.admissions

    @property
    def pressure(self) -> list[PressureEvent]:
        return self.executed.start_effects.pressure_events

    @property
    def victims(self) -> list[int]:
        return [event.request_id.int for event in self.pressure]

    @property
    def duration_ms(self) -> float:
        return self.effects.forward_pass.duration_ms

    @property
    def fpm(self) -> ForwardPassMetrics:
        return self.effects.forward_pass


@dataclass(slots=True)
class Rank:
    """A rank and its clock."""

    rank: SchedulerRank
    now_ms: float = 0.0
    flying: RankPass | None = field(default=None)

    @property
    def core(self) -> VllmCore:
        """What is inside."""
        assert isinstance(self.rank._core, VllmCore)
        return self.rank._core

    def send(self, command: Any) -> CommandEffects:
        """A command, in mid-pass if one is in flight."""
        context = CommandContext(now_ms=self.now_ms, pass_in_flight=self.flying is not None)
        return self.rank.apply_command(
            command, context, self.flying.pending if self.flying else None
        )

    def submit(self, *arguments: Any, **more: Any) -> CommandEffects:
        """Submit ``request(…)``."""
        return self.send(Submit(request(*arguments, **more)))

    def start(self) -> RankPass:
        """Execute a pass and leave it in flight."""
        assert self.flying is None
        self.flying = self.rank.execute_pass(self.now_ms)
        self.rank.settle_group(group_prefilled=False, group_worked=False)
        return self.flying

    def finish(self) -> Seen:
        """Complete the pass in flight."""
        executed, self.flying = self.flying, None
        assert executed is not None
        self.now_ms = executed.end_ms
        return Seen(executed, self.rank.complete_pass(executed.pending, executed.end_ms))

    def step(self) -> Seen:
        """A whole pass."""
        self.start()
        return self.finish()

    def steps(self, passes: int) -> list[Seen]:
        """So many whole passes."""
        return [self.step() for _ in range(passes)]

    @property
    def running(self) -> list[int]:
        return [r.request_id.int for r in self.core.running]

    @property
    def waiting(self) -> list[int]:
        return [r.request_id.int for r in self.core.waiting]


def rank_of(*, timing: TimingModel | None = None, dp_rank: int = 0, **settings: Any) -> Rank:
    """An empty rank of 64 blocks of 4 tokens, prefill 10 ms and decode 5 ms."""
    engine = {"num_gpu_blocks": 64, "block_size": BLOCK, "timing_model": FIXED} | settings
    config = launch_config({"engine": engine}, source="test").engine
    model = timing or builtin_timing(config.timing_model)
    identity = RankIdentity(dp_rank=dp_rank)
    return Rank(SchedulerRank.with_timing_model(identity, config, model, 0))


# --- Replays ------------------------------------------------------------------------------------

_fresh = count(10_000)


def prompt(tokens: int, *, head: int = 0, of: int = 0) -> tuple[int, list[int]]:
    """A prompt length and its blocks: ``head`` blocks of family ``of``, the rest of its own."""
    shared = [100 * of + block for block in range(head)]
    return tokens, shared + [next(_fresh) for _ in range(-(-tokens // BLOCK) - head)]


def run(
    *rows: tuple[float, tuple[int, list[int]], int],
    core: Literal["auto", "literal", "lockstep"] = "literal",
    timing: TimingModel | None = None,
    dp_size: int = 1,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Outcome:
    """Replay rows of (arrival, prompt, output tokens)."""
    engine = {"num_gpu_blocks": 64, "block_size": BLOCK, "timing_model": FIXED} | settings
    launch = launch_config({"engine": engine, "dp_size": dp_size}, source="test")
    workload = Workload(
        source="example",
        timestamp_ms=[arrival for arrival, _, _ in rows],
        input_tokens=[tokens for _, (tokens, _), _ in rows],
        output_tokens=[output for _, _, output in rows],
        block_ids=[blocks for _, (_, blocks), _ in rows],
        trace_block_size=BLOCK,
    )
    model = timing or builtin_timing(launch.engine.timing_model)
    asked = ReplayOptions(capture_admissions=True, core=core, **(options or {}))
    return replay(workload, launch, model, asked)


def admissions(outcome: Outcome, row: int) -> list[tuple[float, int]]:
    """(time, reused tokens) of every admission of a row."""
    assert outcome.admissions is not None
    return [(a.at_ms, a.reused_input_tokens) for a in outcome.admissions[row]]
