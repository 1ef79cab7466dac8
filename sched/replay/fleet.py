"""Workers under one virtual clock: placement, driving, completions (R-10 … R-15)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count

from passtime.sched.config import LaunchConfig
from passtime.sched.contract import Command, CommandEffects, CompletionEffects
from passtime.sched.group import GroupedEngine, GroupPass
from passtime.sched.replay.stalls import (
    SAME_INSTANT_RETRIES,
    STALLED_PASSES,
    exhausted,
    live_lock,
    too_many_retries,
)
from passtime.sched.timing import TimingModel


class StallGuard:
    """Counts passes since anything got ahead: the replay's live-lock detector (R-15, V-86)."""

    def __init__(self) -> None:
        """Nothing has stalled yet."""
        self._stalled = 0

    def progress(self) -> None:
        """An output, a terminal event or an arrival."""
        self._stalled = 0

    def executed(self, group_pass: GroupPass) -> None:
        """A pass was executed; LiveLockError if it was one too many without progress."""
        self._stalled = 0 if group_pass.progressed else self._stalled + 1
        if self._stalled >= STALLED_PASSES:
            raise live_lock(group_pass.started_at_ms)


class Fleet:
    """The workers of one pool. Two fleets may share one clock (R-42)."""

    def __init__(
        self,
        launch: LaunchConfig,
        timing: TimingModel,
        num_workers: int,
        *,
        guard: StallGuard,
        pooled: bool,
        on_start: Callable[[int, GroupPass, float], None],
        on_complete: Callable[[int, list[CompletionEffects], float], None],
    ) -> None:
        """Idle workers; the callbacks get (worker, pass or effects, time).

        ``pooled`` fleets share their clock with another, and the reference treats their zero-length
        passes otherwise: what they did shows in the next round, ties of completion go by worker
        and not by start, and an effect-free pass that no retry can help waits for the next event
        instead of ending the replay.
        """
        self.engines = [GroupedEngine(i, launch, timing) for i in range(num_workers)]
        self.dp_size = launch.dp_size
        self._guard = guard
        self._pooled = pooled
        self._started = count()
        self._on_start = on_start
        self._on_complete = on_complete
        self._completions: list[tuple[float, int, int, GroupPass]] = []
        self._retries: Counter[int] = Counter()
        self._late: list[tuple[int, list[CompletionEffects]]] = []
        self._set_aside: set[int] = set()

    def apply(self, worker: int, dp_rank: int, command: Command, now_ms: float) -> CommandEffects:
        """Send a command to one rank, whether or not its worker is busy (R-11)."""
        return self.engines[worker].apply_command(dp_rank, command, now_ms)

    def next_completion(self) -> float | None:
        """When the pass ends that ends first."""
        return self._completions[0][0] if self._completions else None

    def complete_next(self, now_ms: float) -> bool:
        """Complete the pass that ends first (R-2.1); whether that changed anything."""
        _, _, worker, group_pass = heapq.heappop(self._completions)
        return self._complete(worker, group_pass, now_ms)

    def apply_late(self, now_ms: float) -> None:
        """Show what the zero-length passes of the last round did (pooled fleets only)."""
        late, self._late = self._late, []
        for worker, effects in late:
            self._on_complete(worker, effects, now_ms)

    def is_drained(self) -> bool:
        """Whether no worker owns anything (R-3)."""
        return not self._completions and all(engine.is_drained() for engine in self.engines)

    def begin_round(self) -> None:
        """Workers set aside by an effect-free pass may be tried again (R-14)."""
        self._set_aside.clear()

    def drive(self, now_ms: float) -> bool:
        """Start passes on idle ready workers, lowest id first, until none is left (R-12, R-14).

        Returns whether anything changed.
        """
        changed = False
        while (worker := self._next_ready()) is not None:
            group_pass = self.engines[worker].execute_pass(now_ms)
            assert group_pass is not None
            self._guard.executed(group_pass)
            self._on_start(worker, group_pass, now_ms)
            if group_pass.end_ms > now_ms:
                order = worker if self._pooled else next(self._started)
                entry = (group_pass.end_ms, order, worker, group_pass)
                heapq.heappush(self._completions, entry)
                changed = True
            else:
                changed |= self._complete(worker, group_pass, now_ms)
        return changed

    def _next_ready(self) -> int | None:
        for worker, engine in enumerate(self.engines):
            if worker not in self._set_aside and engine.is_ready():
                return worker
        return None

    def _complete(self, worker: int, group_pass: GroupPass, now_ms: float) -> bool:
        """Make a pass's effects visible; False if it had none and took no time (R-14)."""
        effects = self.engines[worker].complete_pass(group_pass.pass_id, now_ms)
        if self._pooled and group_pass.end_ms == group_pass.started_at_ms:
            self._late.append((worker, effects))
        else:
            self._on_complete(worker, effects, now_ms)
        if group_pass.end_ms > group_pass.started_at_ms or _made_progress(group_pass, effects):
            self._retries[worker] = 0
            return True
        if not self._tries_again(worker, group_pass):
            self._set_aside.add(worker)
        return False

    def _tries_again(self, worker: int, group_pass: GroupPass) -> bool:
        """What the hint of an effect-free zero-length pass asks for (R-15, S-63)."""
        hint = group_pass.same_timestamp_retry
        if hint == "exhausted" and not self._pooled:
            raise exhausted(worker, group_pass.started_at_ms)
        if hint in ("not_applicable", "exhausted"):
            return False
        self._retries[worker] += 1
        if self._retries[worker] > SAME_INSTANT_RETRIES:
            raise too_many_retries(worker, group_pass.started_at_ms)
        return True


def _made_progress(group_pass: GroupPass, effects: list[CompletionEffects]) -> bool:
    """Whether a zero-length pass did anything (R-14)."""
    started = any(
        rank.start_effects.admissions or rank.start_effects.pressure_events
        for rank in group_pass.ranks
    )
    return started or any(
        effect.outputs
        or effect.lifecycle_events
        or effect.kv_events
        or effect.forward_pass.num_prefill_requests > 0
        or effect.forward_pass.num_decode_requests > 0
        for effect in effects
    )
