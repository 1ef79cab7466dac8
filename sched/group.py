"""Several ranks behind one barrier: attention data parallelism (C-50 … C-58)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from passtime.errors import CommandError, LiveLockError, PasstimeError, PoisonedError
from passtime.sched.config import LaunchConfig
from passtime.sched.contract import (
    Command,
    CommandContext,
    CommandEffects,
    CompletionEffects,
    PendingPass,
    RankIdentity,
    RankPass,
    RetryHint,
    StartEffects,
)
from passtime.sched.rank import SchedulerRank
from passtime.sched.timing import TimingModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRank:
    """What one rank did in a group pass (C-53)."""

    dp_rank: int
    end_ms: float
    start_effects: StartEffects


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPass:
    """A group pass as its driver sees it at the start (C-53)."""

    pass_id: int
    started_at_ms: float
    end_ms: float
    participating_ranks: int
    ranks: tuple[ExecutedRank, ...]
    progressed: bool
    same_timestamp_retry: RetryHint


@dataclass(slots=True)
class _InFlight:
    pass_id: int
    started_at_ms: float
    end_ms: float
    pending: dict[int, PendingPass]


class GroupedEngine:
    """A logical worker of ``dp_size`` ranks that run their passes together (C-50)."""

    def __init__(self, worker_id: int, launch: LaunchConfig, timing: TimingModel) -> None:
        """Ranks 0 … dp_size − 1 with the same configuration and timing model."""
        self.worker_id = worker_id
        self.ranks: list[SchedulerRank] = []
        for dp_rank in range(launch.dp_size):
            identity = RankIdentity(worker_id=worker_id, dp_rank=dp_rank, dp_size=launch.dp_size)
            self.ranks.append(
                SchedulerRank.with_timing_model(
                    identity, launch.engine, timing, identity.seed_offset
                )
            )
        self._in_flight: _InFlight | None = None
        self._next_pass_id = 0
        self._poison: str | None = None

    # --- State (C-52, C-58) ---------------------------------------------------------------------

    @property
    def pass_in_flight(self) -> bool:
        """Whether a pass was executed and not completed."""
        return self._in_flight is not None

    def is_ready(self) -> bool:
        """Whether a pass may start now (C-52)."""
        if self._poison is not None or self._in_flight is not None:
            return False
        return any(map(_qualifies, self.ranks))

    def waiting_for_external_command(self) -> bool:
        """Whether everybody who has anything to do waits for a command (C-52)."""
        if self._poison is not None or self._in_flight is not None:
            return False
        ready = [rank for rank in self.ranks if rank.is_ready()]
        return bool(ready) and all(rank.waiting_for_external_command() for rank in ready)

    def is_drained(self) -> bool:
        """Whether no rank owns anything and no pass is in flight (C-58)."""
        if self._poison is not None or self._in_flight is not None:
            return False
        return all(rank.is_drained() for rank in self.ranks)

    # --- Operations (C-51, C-53 … C-57) ---------------------------------------------------------

    def apply_command(self, dp_rank: int, command: Command, now_ms: float) -> CommandEffects:
        """Send a command to one rank; a refusal poisons nothing (C-51)."""
        self._refuse_if_poisoned()
        if not (math.isfinite(now_ms) and now_ms >= 0):
            raise CommandError(f"command time must be finite and non-negative, got {now_ms}")
        if not 0 <= dp_rank < len(self.ranks):
            raise CommandError(
                f"attention-DP rank {dp_rank} is out of range for dp_size {len(self.ranks)}"
            )
        in_flight = self._in_flight
        context = CommandContext(now_ms=now_ms, pass_in_flight=in_flight is not None)
        pending = in_flight.pending.get(dp_rank) if in_flight else None
        return self.ranks[dp_rank].apply_command(command, context, pending)

    def execute_pass(self, now_ms: float) -> GroupPass | None:
        """Run every rank that can, at the same instant; None if none can (C-53)."""
        self._refuse_if_poisoned()
        if self._in_flight is not None:
            raise CommandError(f"engine {self.worker_id} already has a pass in flight")
        if not (math.isfinite(now_ms) and now_ms >= 0):
            raise CommandError(f"pass start must be finite and non-negative, got {now_ms}")
        qualified = [(i, rank) for i, rank in enumerate(self.ranks) if _qualifies(rank)]
        if not qualified:
            return None
        try:
            passes = [(i, rank.execute_pass(now_ms)) for i, rank in qualified]
            self._settle(passes)
            _refuse_live_lock(passes, now_ms)
        except Exception as error:
            raise self._poisoned_by(error, f"pass {self._next_pass_id} at {now_ms} ms") from error
        end_ms = max(rank_pass.end_ms for _, rank_pass in passes)
        pass_id = self._next_pass_id
        self._next_pass_id += 1
        self._in_flight = _InFlight(
            pass_id, now_ms, end_ms, {i: rank_pass.pending for i, rank_pass in passes}
        )
        return GroupPass(
            pass_id=pass_id,
            started_at_ms=now_ms,
            end_ms=end_ms,
            participating_ranks=len(self.ranks),
            ranks=tuple(
                ExecutedRank(
                    dp_rank=i, end_ms=rank_pass.end_ms, start_effects=rank_pass.start_effects
                )
                for i, rank_pass in passes
            ),
            progressed=any(rank_pass.progressed for _, rank_pass in passes),
            same_timestamp_retry=combined_hint([p.same_timestamp_retry for _, p in passes]),
        )

    def complete_pass(self, pass_id: int, end_ms: float) -> list[CompletionEffects]:
        """Make the pass's outputs visible, rank by rank, at the modeled end (C-55, C-56)."""
        self._refuse_if_poisoned()
        in_flight = self._in_flight
        if in_flight is None:
            raise CommandError(f"engine {self.worker_id} has no pass in flight")
        if pass_id != in_flight.pass_id:
            raise CommandError(f"pass ID mismatch: expected {in_flight.pass_id}, got {pass_id}")
        if not end_ms >= in_flight.end_ms:  # NaN is no time either
            raise CommandError(
                f"pass {pass_id} completed at {end_ms}ms before its modeled boundary "
                f"{in_flight.end_ms}ms"
            )
        self._in_flight = None
        try:
            effects = [
                rank.complete_pass(in_flight.pending[i], in_flight.end_ms)
                if i in in_flight.pending
                else rank.complete_idle_group_pass(in_flight.started_at_ms, in_flight.end_ms)
                for i, rank in enumerate(self.ranks)
            ]
            if all(rank.is_drained() for rank in self.ranks):
                for rank in self.ranks:
                    rank.group_drained()
            return effects
        except Exception as error:
            raise self._poisoned_by(error, f"completion of pass {pass_id}") from error

    def _settle(self, passes: list[tuple[int, RankPass]]) -> None:
        """Tell every rank what the group did (S-43, S-44)."""
        metrics = [rank_pass.pending.effects.forward_pass for _, rank_pass in passes]
        prefilled = any(m.sum_prefill_tokens > 0 for m in metrics)
        decoded = any(
            output.token_id is not None
            for _, rank_pass in passes
            for output in rank_pass.pending.effects.outputs
        )
        for rank in self.ranks:
            rank.settle_group(group_prefilled=prefilled, group_worked=prefilled or decoded)

    def _refuse_if_poisoned(self) -> None:
        if self._poison is not None:
            raise PoisonedError(
                f"engine worker {self.worker_id} is poisoned after a prior rank mutation failure: "
                f"{self._poison}"
            )

    def _poisoned_by(self, error: Exception, place: str) -> Exception:
        """Remember why the group is unusable (C-57); the error to raise, with its place."""
        self._poison = str(error)
        if isinstance(error, PasstimeError):
            return type(error)(f"worker {self.worker_id}, {place}: {error}")
        return error


def _refuse_live_lock(passes: list[tuple[int, RankPass]], now_ms: float) -> None:
    """LiveLockError if the group would repeat a pass without time or effect for ever (S-64).

    A rank that is stuck by itself waits for others as long as their passes take time or do
    something: a command may free it between two of those.
    """
    stuck = [rank_pass.stuck for _, rank_pass in passes if rank_pass.stuck is not None]
    if not stuck:
        return
    for _, rank_pass in passes:
        start = rank_pass.start_effects
        effects = rank_pass.pending.effects.outputs or start.admissions or start.pressure_events
        may_change = rank_pass.same_timestamp_retry not in ("exhausted", "not_applicable")
        if rank_pass.end_ms > now_ms or effects or may_change:
            return
    raise LiveLockError(stuck[0])


def _qualifies(rank: SchedulerRank) -> bool:
    return rank.is_ready() and not rank.waiting_for_external_command()


def combined_hint(hints: list[RetryHint]) -> RetryHint:
    """One hint for the group: the most promising of its ranks' (C-53, S-62)."""
    if "retry" in hints:
        return "retry"
    countdowns = [hint for hint in hints if isinstance(hint, int)]
    if countdowns:
        return max(countdowns)
    return "exhausted" if "exhausted" in hints else "not_applicable"
