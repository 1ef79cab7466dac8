"""Which prompts a prefill pass takes, and how much of them (S-4, S-35 … S-41, S-46, S-47)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from passtime.errors import ConfigError
from passtime.sched.config import EngineConfig
from passtime.sched.sglang.lease import KvCache
from passtime.sched.sglang.requests import RequestState

LPM_QUEUE_LIMIT = 128  # longer queues are not sorted (S-36)
LPM_HEAD_TOKENS = 32  # requests that share so much, uncached, wait for the first of them
_ATTENTION_DP_FACTOR = 0.3


class NewTokenRatio:
    """The share of the running requests' remaining output that admission holds free (S-4).

    Plain doubles in a fixed order of operations: admission compares them exactly.
    """

    def __init__(self, conservativeness: float) -> None:
        """The start value for ``schedule_conservativeness``."""
        self._init = 0.7 * conservativeness
        self._low = self._init * 0.14
        self._step = (self._init - self._low) / 600.0
        self.value = self._init

    @classmethod
    def of(cls, config: EngineConfig, dp_size: int) -> NewTokenRatio:
        """The ratio of one of ``dp_size`` ranks: attention-DP is less conservative (S-4a)."""
        conservativeness = config.sglang.schedule_conservativeness
        return cls(conservativeness * _ATTENTION_DP_FACTOR if dp_size > 1 else conservativeness)

    def after_decay(self, value: float) -> float:
        """What ``value`` becomes by a pass without prefill (S-47)."""
        return max(value - self._step, self._low)

    def decay(self, passes: int = 1) -> None:
        """Passes without prefill: trust a little more."""
        if self.value == self._low:
            return
        for _ in range(passes):
            before, self.value = self.value, self.after_decay(self.value)
            if self.value == before:
                return

    def raise_for(self, *, survivors: int, produced_tokens: int, limit_tokens: int) -> None:
        """Somebody was retracted: estimate anew from those who stayed (S-47).

        ``limit_tokens`` is Σ of their output budgets, ``produced_tokens`` what they have of it.
        """
        self.value = min(1.0, (produced_tokens + 20.0 * survivors) / (limit_tokens + 1.0))

    def reset(self) -> None:
        """The group was idle (S-44)."""
        self.value = self._init


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What one prefill pass of a rank may take (S-1, S-4a)."""

    max_prefill_tokens: int
    chunk_tokens: int
    clip_max_new_tokens: int
    max_num_seqs: int

    @classmethod
    def of(cls, config: EngineConfig, dp_size: int) -> PrefillLimits:
        """The limits of one of ``dp_size`` ranks: only the chunk is divided among them."""
        sglang = config.sglang
        chunk_tokens = sglang.chunked_prefill_size // dp_size
        if chunk_tokens == 0:
            raise ConfigError(
                f"attention-DP size {dp_size} reduces "
                f"sglang.chunked_prefill_size={sglang.chunked_prefill_size} to zero"
            )
        return cls(
            max_prefill_tokens=sglang.max_prefill_tokens,
            chunk_tokens=chunk_tokens,
            clip_max_new_tokens=sglang.clip_max_new_tokens,
            max_num_seqs=config.seqs_limit,
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request's share of a prefill pass: tokens ``prefix`` … ``end`` are computed."""

    request: RequestState
    prefix: int
    end: int
    is_first_chunk: bool

    @property
    def computed_tokens(self) -> int:
        """Tokens that the pass computes."""
        return self.end - self.prefix


class PrefillPass:
    """One pass's budgets and its walk along the queue."""

    def __init__(
        self,
        cache: KvCache,
        limits: PrefillLimits,
        running: Sequence[RequestState],
        ratio: NewTokenRatio,
    ) -> None:
        """Budgets at the start of a pass (S-37)."""
        self._cache = cache
        self._clip = limits.clip_max_new_tokens
        reserved = 0.0
        for request in running:
            reserved += min(request.remaining, self._clip) * ratio.value
        self._total = float(cache.attainable) - reserved
        self._input = limits.max_prefill_tokens
        self._chunk = limits.chunk_tokens
        self._slots = max(0, limits.max_num_seqs - len(running))

    def take(self, waiting: deque[RequestState]) -> list[Admitted]:
        """Admit from the head until one does not fit: nobody overtakes (S-38)."""
        batch: list[Admitted] = []
        while len(batch) < self._slots and waiting and self._chunk > 0:
            admitted = self._try(waiting[0])
            if admitted is None:
                break
            waiting.popleft()
            batch.append(admitted)
        return batch

    def _try(self, request: RequestState) -> Admitted | None:
        """The head's chunk, with its pages taken and the budgets charged; None: stop here."""
        cache, lease = self._cache, request.lease
        is_first_chunk = lease.materialized == 0
        start = self._prefix(request) if is_first_chunk else lease.materialized
        extension = request.length - start
        if extension == 0 and not is_first_chunk:
            return None
        taken = self._chunk_of(extension)
        if taken is None:
            return None
        cost = cache.ceil(taken)
        output_reserve = 0 if taken < extension else min(request.remaining, self._clip)
        if cost + output_reserve >= self._total or cost > self._input or cost > self._chunk:
            return None
        end = start + taken
        if is_first_chunk:
            prefix = cache.acquire(lease, request.tokens, end=end, prefix=start)
            if prefix is None:
                return None
        else:
            prefix = start
            if not cache.extend(lease, request.tokens, end=end):
                return None
        self._total -= cost + output_reserve
        self._input -= cost
        self._chunk -= cost
        return Admitted(request, prefix, end, is_first_chunk)

    def _prefix(self, request: RequestState) -> int:
        """Reusable tokens; one at least is computed by a request that must produce output."""
        usable = request.length if request.output_limit == 0 else request.length - 1
        return self._cache.peek(request.tokens, usable)

    def _chunk_of(self, extension: int) -> int | None:
        """Tokens of ``extension`` that the rest of the chunk budget lets in; None: not one page."""
        if self._cache.ceil(extension) <= self._chunk:
            return extension
        whole = self._cache.floor(self._chunk)
        return min(extension, whole) if whole else None


def sort_by_longest_prefix(waiting: deque[RequestState], cache: KvCache) -> None:
    """Rearrange the queue for the "lpm" policy (S-36); long queues are left as they are.

    Of several requests with the same uncached head only the first keeps its priority: the others
    will find that head in the tree once it is computed.
    """
    if not cache.reuse or len(waiting) > LPM_QUEUE_LIMIT:
        return
    head_tokens = cache.ceil(LPM_HEAD_TOKENS)
    heads: set[tuple[int, ...]] = set()

    def rank(request: RequestState) -> tuple[bool, int]:
        hit = cache.peek(request.tokens, request.length)
        deprioritised = False
        if hit <= LPM_HEAD_TOKENS and request.length >= head_tokens:
            head = tuple(request.tokens[:head_tokens])
            deprioritised = head in heads
            heads.add(head)
        return deprioritised, -hit

    ordered = sorted(waiting, key=rank)
    waiting.clear()
    waiting.extend(ordered)
