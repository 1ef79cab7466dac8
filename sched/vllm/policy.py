"""Where vLLM and TensorRT-LLM differ (T-1 … T-7): limits, admission, preemption. All of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from passtime.sched.config import EngineConfig
from passtime.sched.contract import Request
from passtime.sched.vllm.blocks import BlockPool
from passtime.sched.vllm.handoff import DestinationTable
from passtime.sched.vllm.requests import RequestState, RequestStatus


def blocks(tokens: int, block_tokens: int) -> int:
    """ceil(tokens / block_tokens)."""
    return -(-tokens // block_tokens)


class Commitments(Protocol):
    """What the TensorRT-LLM policy counts: blocks that somebody will still take (T-4, T-12)."""

    pool: BlockPool
    running: list[RequestState]
    destinations: DestinationTable


class Policy(Protocol):
    """The questions on which the two backends disagree."""

    recomputes_last_block: bool
    """Whether a full prefix hit is cut so that something is left to compute (V-51)."""

    def output_limit(self, request: Request) -> int:
        """The output budget a request gets when it is submitted."""
        ...

    def rejects(self, request: RequestState) -> bool:
        """Whether the head of the queue can never run."""
        ...

    def admits(
        self,
        head: RequestState,
        active_hit_blocks: int,
        commitments: Commitments,
    ) -> bool:
        """Whether the head may start now; False stops admission (strict FIFO)."""
        ...

    def victim(self, running: Sequence[RequestState]) -> RequestState | None:
        """Whom to preempt when the pool is short; None: nobody."""
        ...

    destinations_reuse_prefix: bool
    """Whether a reservation takes the cached prefix of its prompt (V-75, T-12)."""

    def destination_blocks(self, request: Request) -> int:
        """Blocks beyond which a reservation is refused (C-15, T-12)."""
        ...

    def destination_fits(self, request: RequestState, commitments: Commitments) -> bool:
        """Whether there is room for a reservation beyond what the pool itself checks."""
        ...


class VllmPolicy:
    """Admit what fits now, preempt when it no longer does (V-33, V-35, V-44)."""

    recomputes_last_block = True
    destinations_reuse_prefix = True

    def __init__(self, config: EngineConfig) -> None:
        """The policy of ``backend: vllm``."""
        self._config = config

    def output_limit(self, request: Request) -> int:
        """What was asked for."""
        return request.output_limit

    def rejects(self, request: RequestState) -> bool:
        """A prompt beyond max_model_len, or a first run beyond the whole pool (V-31, V-33)."""
        config = self._config
        if config.max_model_len is not None and request.prompt_tokens >= config.max_model_len:
            return True
        needed = blocks(request.length, config.block_tokens)
        return request.preemptions == 0 and needed > config.num_gpu_blocks

    def admits(
        self,
        head: RequestState,
        active_hit_blocks: int,
        commitments: Commitments,
    ) -> bool:
        """The whole known sequence must fit beside what is active: no output reserved (V-35)."""
        needed = blocks(head.length, self._config.block_tokens) - active_hit_blocks
        return needed <= commitments.pool.capacity - commitments.pool.active

    def victim(self, running: Sequence[RequestState]) -> RequestState | None:
        """The last running request, or the first in fifo mode (V-44)."""
        if not running:
            return None
        return running[-1 if self._config.preemption_mode == "lifo" else 0]

    def destination_blocks(self, request: Request) -> int:
        """The prompt must fit (C-15)."""
        return blocks(len(request.tokens), self._config.block_tokens)

    def destination_fits(self, request: RequestState, commitments: Commitments) -> bool:
        """Nothing beyond what the pool checks (V-75)."""
        return True


class TrtllmPolicy:
    """GUARANTEED_NO_EVICT: admit only what fits to completion, preempt never (T-2 … T-7)."""

    recomputes_last_block = False
    destinations_reuse_prefix = False

    def __init__(self, config: EngineConfig) -> None:
        """The policy of ``backend: trtllm``."""
        self._config = config

    def output_limit(self, request: Request) -> int:
        """What was asked for, cut to max_model_len and to the pool (T-2)."""
        limit, prompt = request.output_limit, len(request.tokens)
        if self._config.max_model_len is not None:
            limit = min(limit, max(0, self._config.max_model_len - prompt))
        pool_tokens = self._config.total_kv_tokens
        return min(limit, pool_tokens - prompt) if prompt < pool_tokens else limit

    def rejects(self, request: RequestState) -> bool:
        """A prompt beyond max_model_len, or a completion beyond the pool (T-3)."""
        config = self._config
        if config.max_model_len is not None and request.prompt_tokens >= config.max_model_len:
            return True
        return self.completion_blocks(request) > config.num_gpu_blocks

    def admits(
        self,
        head: RequestState,
        active_hit_blocks: int,
        commitments: Commitments,
    ) -> bool:
        """Room to completion, beside what the running ones will still take (T-4)."""
        needed = max(0, self.completion_blocks(head) - active_hit_blocks)
        return needed <= self._available(commitments)

    def victim(self, running: Sequence[RequestState]) -> RequestState | None:
        """Nobody, ever (T-6)."""
        return None

    def completion_blocks(self, request: RequestState) -> int:
        """Blocks of the request at its longest: full(r) of T-4."""
        return blocks(request.prompt_tokens + request.limit, self._config.block_tokens)

    def destination_blocks(self, request: Request) -> int:
        """The whole completion must fit (T-12)."""
        tokens = len(request.tokens) + self.output_limit(request)
        return blocks(tokens, self._config.block_tokens)

    def destination_fits(self, request: RequestState, commitments: Commitments) -> bool:
        """Room to completion beside everybody else's (T-12)."""
        return self.completion_blocks(request) <= self._available(commitments)

    def _available(self, commitments: Commitments) -> int:
        """Blocks that nobody holds, was promised, or will need to complete (T-4, T-12)."""
        pool = commitments.pool
        available = max(0, pool.capacity - pool.active)
        available = max(0, available - sum(map(self._still_to_come, commitments.running)))
        destinations = commitments.destinations
        for held in destinations.reserved.values():
            available -= self.completion_blocks(held.request) - held.reserved_blocks
        for request in destinations.active.values():
            if request.status is not RequestStatus.RUNNING:
                available -= self._still_to_come(request)
        return max(0, available)

    def _still_to_come(self, request: RequestState) -> int:
        """Blocks that a request will take until it completes: still(r) of T-4."""
        owned = blocks(request.allocated, self._config.block_tokens)
        return max(0, self.completion_blocks(request) - owned)
