"""The state of a rank (V-3) and the moves that everything else is made of.

Allocation, finalisation, release and removal, each with the KV events it causes.
"""

from __future__ import annotations

from collections import deque

from passtime.sched.config import EngineConfig
from passtime.sched.contract import (
    ForwardPassMetrics,
    HandoffId,
    KvEvent,
    Metrics,
    PressureState,
    Removed,
    RequestId,
    Stored,
    StoredBlock,
)
from passtime.sched.moments import variance
from passtime.sched.vllm.blocks import BlockCopy, BlockPool
from passtime.sched.vllm.handoff import DestinationTable, SourceTable
from passtime.sched.vllm.policy import Policy, TrtllmPolicy, VllmPolicy
from passtime.sched.vllm.requests import Block, RequestState, RequestStatus


class RankState:
    """Queues, pool and tables of one rank.

    Invariant: a known request is in exactly one of ``waiting``, ``running``, the source holds and
    the destination tables; ``requests`` maps those of the scheduler (waiting, running) by id.
    """

    def __init__(self, config: EngineConfig, *, dp_rank: int) -> None:
        """An empty rank."""
        self.config = config
        self.dp_rank = dp_rank
        self.policy: Policy = (
            TrtllmPolicy(config) if config.backend == "trtllm" else VllmPolicy(config)
        )
        self.pool = BlockPool(config.num_gpu_blocks)
        self.requests: dict[RequestId, RequestState] = {}
        self.running: list[RequestState] = []
        self.waiting: deque[RequestState] = deque()
        self.materialized: deque[RequestState] = deque()  # activated destinations, V-77
        self.sources = SourceTable()
        self.destinations = DestinationTable()
        self.generation = 0  # rises whenever capacity may have improved (V-76)
        self.preemptions = 0
        self.arrivals = 0
        self._events: list[KvEvent] = []
        self._next_event_id = 0
        self._captures_events = config.emit_kv_events and config.enable_prefix_caching

    # --- Blocks ---------------------------------------------------------------------------------

    def lookup(self, request: RequestState) -> tuple[list[BlockCopy], int]:
        """First copies of the leading resident blocks, and how many of them are active (V-50)."""
        hits: list[BlockCopy] = []
        active = 0
        if self.config.enable_prefix_caching:
            for block in request.blocks:
                copy = None if block.identity is None else self.pool.first_copy(block.identity)
                if copy is None:
                    break
                active += self.pool.is_active(copy)
                hits.append(copy)
        return hits, active

    def allocate(self, request: RequestState, tokens: int, reusable_blocks: int) -> bool:
        """Own blocks for ``tokens`` leading tokens; False and no change if short (V-53)."""
        owned = request.blocks_for(request.allocated)
        target = request.blocks_for(tokens)
        if target > owned:
            reused = request.blocks[owned : max(owned, min(reusable_blocks, target))]
            hits = []
            for block in reused:
                assert block.identity is not None
                copy = self.pool.first_copy(block.identity)
                assert copy is not None
                hits.append(copy)
            fresh = self.pool.allocate(hits, target - owned - len(hits))
            if fresh is None:
                return False
            for block, copy in zip(request.blocks[owned:target], [*hits, *fresh], strict=True):
                block.copy = copy
            self.record_evictions()
        request.allocated = max(request.allocated, tokens)
        return True

    def finalise(self, request: RequestState, before: int, after: int) -> None:
        """Make the blocks findable that tokens ``before`` … ``after`` complete (V-54)."""
        if not self.config.enable_prefix_caching:
            return
        block_tokens = request.block_tokens
        first_copies: list[int] = []
        for index in range(before // block_tokens, after // block_tokens):
            block = request.blocks[index]
            if block.identity is None:
                request.identify(index)
            assert block.copy is not None
            assert block.identity is not None
            stored = block.copy.identity is None and self.pool.publish(block.copy, block.identity)
            if stored:
                first_copies.append(index)
            if first_copies and (not stored or (index + 1) * block_tokens + block_tokens > after):
                self._record_stored(request, first_copies)
                first_copies = []

    def release(self, request: RequestState) -> None:
        """Give all blocks of a request back, deepest first (V-55)."""
        self.pool.release(request.owned_copies())
        request.forget_copies()

    # --- Requests -------------------------------------------------------------------------------

    def forget(self, request: RequestState) -> None:
        """Take a request out of the scheduler; its blocks stay as they are."""
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            return
        self.waiting.remove(request)
        if request in self.materialized:
            self.materialized.remove(request)

    def remove(self, request: RequestState) -> None:
        """Take a request out with everything it owns and every table that names it (V-87)."""
        self.forget(request)
        self.release(request)
        self.sources.drop_pending(request.request_id)
        self.destinations.drop_active(request.request_id)

    def finish(self, request: RequestState) -> HandoffId | None:
        """A request completed (V-68); the handoff that now holds its blocks, if any (V-72)."""
        self.forget(request)
        self.destinations.drop_active(request.request_id)
        self.generation += 1
        handoff_id = self.sources.handoff_of(request.request_id)
        if handoff_id is None:
            self.release(request)
            return None
        del self.sources.pending[handoff_id]
        self.sources.held[handoff_id] = request
        return handoff_id

    def requeue_preempted(self, victim: RequestState) -> None:
        """Back to the front of the queue, with tokens and credit but without blocks (V-44)."""
        self.running.remove(victim)
        self.release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)
        self.generation += 1

    # --- Events and metrics ---------------------------------------------------------------------

    def record_evictions(self) -> None:
        """One Removed event for what the last allocation evicted (V-91)."""
        evicted = self.pool.drain_evicted()
        if evicted and self._captures_events:
            self._record(Removed(block_hashes=evicted))

    def _record_stored(self, request: RequestState, indices: list[int]) -> None:
        if not self._captures_events:
            return
        first = indices[0]
        parent = request.blocks[first - 1].identity if first else None
        blocks = tuple(self._stored_block(request, index) for index in indices)
        self._record(Stored(parent_hash=parent, blocks=blocks))

    def _stored_block(self, request: RequestState, index: int) -> StoredBlock:
        block: Block = request.blocks[index]
        assert block.identity is not None
        start = index * request.block_tokens
        token_ids = (
            tuple(request.tokens[start : start + request.block_tokens])
            if self.config.emit_kv_token_ids
            else None
        )
        return StoredBlock(
            block_hash=block.identity, tokens_hash=block.local_hash, token_ids=token_ids
        )

    def _record(self, data: Stored | Removed) -> None:
        self._events.append(KvEvent(event_id=self._next_event_id, dp_rank=self.dp_rank, data=data))
        self._next_event_id += 1

    def drain_kv_events(self) -> list[KvEvent]:
        """KV events since the last call, in order (C-36)."""
        events, self._events = self._events, []
        return events

    def pressure_state(self) -> PressureState:
        """Running and ordinary waiting requests, and active blocks (C-22)."""
        return PressureState(
            running_requests=len(self.running),
            waiting_requests=len(self.waiting),
            active_blocks=self.pool.active,
        )

    def metrics(self) -> Metrics:
        """A fresh snapshot (C-24)."""
        destinations = self.destinations
        return Metrics(
            dp_rank=self.dp_rank,
            active_blocks=self.pool.active,
            total_blocks=self.pool.capacity,
            running_requests=len(self.running),
            waiting_requests=len(self.waiting)
            + len(destinations.pending)
            + len(destinations.reserved),
            preemptions_total=self.preemptions,
        )

    def add_queue_metrics(self, forward_pass: ForwardPassMetrics) -> None:
        """The queued half of the forward-pass metrics (C-23)."""
        prefill: list[int] = []
        decode: list[int] = []
        for request in self.waiting:
            if request.status is RequestStatus.PREEMPTED:
                decode.append(request.length)
            elif request.activated:
                decode.append(request.prompt_tokens)
            else:
                prefill.append(request.prompt_tokens)
        decode += [entry.request.prompt_tokens for entry in self.destinations.pending]
        decode += [entry.request.prompt_tokens for entry in self.destinations.reserved.values()]
        forward_pass.num_queued_prefill = len(prefill)
        forward_pass.sum_queued_prefill_tokens = sum(prefill)
        forward_pass.var_queued_prefill_length = variance(prefill)
        forward_pass.num_queued_decode = len(decode)
        forward_pass.sum_queued_decode_kv_tokens = sum(decode)
        forward_pass.var_queued_decode_kv_tokens = variance(decode)

    def has_requests(self) -> bool:
        """Whether any request is in the scheduler (C-33)."""
        return bool(self.requests)

    def is_drained(self) -> bool:
        """Nothing in the scheduler, no hold, no reservation (C-33)."""
        return not (self.requests or self.sources or self.destinations)
