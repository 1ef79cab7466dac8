"""The state of a SGLang-style rank, and how it shows itself (S-9, S-56)."""

from __future__ import annotations

from collections import deque

from passtime.sched.config import EngineConfig
from passtime.sched.contract import (
    ForwardPassMetrics,
    KvEvent,
    Metrics,
    PressureState,
    RequestId,
)
from passtime.sched.moments import variance
from passtime.sched.sglang.events import KvEventRecorder
from passtime.sched.sglang.handoff import DestinationTable, SourceTable
from passtime.sched.sglang.lease import KvCache
from passtime.sched.sglang.requests import RequestState


class RankState:
    """Queues, KV cache and handoff tables of one rank.

    Invariant: a known request is in exactly one of ``waiting``, ``prebuilt``, ``running``, the
    source holds, and the pending and reserved destinations; ``requests`` maps those of the
    scheduler (the first three) by id.
    """

    def __init__(self, config: EngineConfig, *, dp_rank: int) -> None:
        """An empty rank."""
        self.config = config
        self.dp_rank = dp_rank
        recorder = KvEventRecorder(
            page_tokens=config.block_tokens,
            dp_rank=dp_rank,
            with_token_ids=config.emit_kv_token_ids,
        )
        self.cache = KvCache(
            pages=config.num_gpu_blocks,
            page_tokens=config.block_tokens,
            reuse=config.enable_prefix_caching,
            recorder=recorder if config.emit_kv_events else None,
        )
        self.requests: dict[RequestId, RequestState] = {}
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.prebuilt: deque[RequestState] = deque()  # activated destinations
        self.sources = SourceTable()
        self.destinations = DestinationTable()
        self.generation = 0  # rises whenever capacity may have improved (S-58)
        self.rounds_without_prefill = 0  # S-42

    def knows(self, request_id: RequestId) -> bool:
        """Whether a request of that id is here in any role (C-15)."""
        elsewhere = [*self.sources.held.values(), *self.destinations.unstarted()]
        return request_id in self.requests or any(
            request.request_id == request_id for request in elsewhere
        )

    def forget(self, request: RequestState) -> None:
        """A request left the scheduler: drop what names it but its source hold."""
        del self.requests[request.request_id]
        self.destinations.drop_active(request.request_id)

    # --- What it shows --------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """A fresh snapshot; the two token counts of a pass are in that pass's effects (S-56)."""
        waiting = len(self.waiting) + len(self.prebuilt) + len(self.destinations.unstarted())
        return Metrics(
            dp_rank=self.dp_rank,
            active_blocks=self.cache.occupied_pages,
            total_blocks=self.cache.total_pages,
            running_requests=len(self.running),
            waiting_requests=waiting,
            preemptions_total=0,
        )

    def add_queue_metrics(self, forward_pass: ForwardPassMetrics) -> None:
        """The queued half of the forward-pass metrics (S-56)."""
        prefill = [r.prompt_tokens for r in self.waiting if not r.output_tokens]
        decode = [r.length for r in self.waiting if r.output_tokens]
        decode += [r.length for r in self.prebuilt]
        decode += [r.prompt_tokens for r in self.destinations.unstarted()]
        forward_pass.num_queued_prefill = len(prefill)
        forward_pass.sum_queued_prefill_tokens = sum(prefill)
        forward_pass.var_queued_prefill_length = variance(prefill)
        forward_pass.num_queued_decode = len(decode)
        forward_pass.sum_queued_decode_kv_tokens = sum(decode)
        forward_pass.var_queued_decode_kv_tokens = variance(decode)

    def pressure_state(self) -> PressureState:
        """Running requests and occupied pages around a retraction (S-55)."""
        return PressureState(
            running_requests=len(self.running),
            waiting_requests=None,
            active_blocks=self.cache.occupied_pages,
        )

    def drain_kv_events(self) -> list[KvEvent]:
        """KV events since the last call, in order (C-36)."""
        return self.cache.drain_events()

    def has_requests(self) -> bool:
        """Whether a pass has anything to serve: a request, or a countdown (C-33, S-45)."""
        return bool(self.requests or self.rounds_without_prefill)

    def is_drained(self) -> bool:
        """Nothing in the scheduler, no hold, no reservation, no countdown (C-33, S-45)."""
        return not (self.has_requests() or self.sources or self.destinations)
