"""The neutral contract between a driver and one scheduler rank (C-10 … C-38).

A driver sends commands, starts passes and completes them; the rank answers with effects. Nothing
here knows a backend: the cores are in ``vllm/`` and ``sglang/``, the adapter is ``rank.py``.
All times are milliseconds of simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from uuid import UUID

from passtime.errors import ConfigError

RequestId: TypeAlias = UUID
HandoffId: TypeAlias = UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Which rank of which worker (C-38)."""

    worker_id: int = 0
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def seed_offset(self) -> int:
        """worker_id × dp_size + dp_rank; ConfigError beyond 64 bits."""
        offset = self.worker_id * self.dp_size + self.dp_rank
        if offset >= 2**64:
            raise ConfigError("native mock-engine seed offset overflow: it exceeds 64 bits")
        return offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and its output limit (C-10); planned output ids replace the limit."""

    request_id: RequestId
    tokens: Sequence[int]
    max_output_tokens: int = 0
    output_token_ids: Sequence[int] | None = None

    @property
    def output_limit(self) -> int:
        """Effective ``max_output_tokens``: the number of planned ids where they are given."""
        planned = self.output_token_ids
        return self.max_output_tokens if planned is None else len(planned)


# --- Commands (C-12) ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Remove a request; optionally drop what it has produced in the pass in flight (C-34)."""

    request_id: RequestId
    discard_pending_output: bool = False


@dataclass(frozen=True, slots=True)
class SubmitHandoffPrefill:
    """Queue a request whose KV will be handed to a decode rank (V-71)."""

    handoff_id: HandoffId
    request: Request


@dataclass(frozen=True, slots=True)
class ReserveDestination:
    """Reserve KV space on a decode rank (V-74)."""

    handoff_id: HandoffId
    request: Request


@dataclass(frozen=True, slots=True)
class ActivateDestination:
    """The KV has arrived: the reserved request may decode (V-77)."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The KV has left: the prefill rank may free it (V-73)."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class CancelSource:
    """Give a handoff up on the prefill side (V-79)."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class CancelDestination:
    """Give a handoff up on the decode side (V-79)."""

    handoff_id: HandoffId


Command: TypeAlias = (
    Submit
    | CancelRequest
    | SubmitHandoffPrefill
    | ReserveDestination
    | ActivateDestination
    | ReleaseSource
    | CancelSource
    | CancelDestination
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandContext:
    """When a command arrives, and whether the group has an uncompleted pass (C-13)."""

    now_ms: float
    pass_in_flight: bool


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was queued."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DestinationAccepted:
    """A reservation was queued; ``DestinationReserved`` tells when it holds."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Applied:
    """The command changed something."""


@dataclass(frozen=True, slots=True)
class Noop:
    """The command named nothing that it could change."""


CommandResult: TypeAlias = Submitted | DestinationAccepted | Applied | Noop


# --- Effects (C-14 … C-25) ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTiming:
    """How long a handoff's KV takes to move (C-16)."""

    mode: Literal["full_prompt", "destination_missing"]
    full_prompt_tokens: int
    kv_bytes_per_token: int | None
    bandwidth_gb_s: float | None

    def delay_ms(self, missing_tokens: int) -> float | None:
        """Transfer time given the destination's missing tokens; None without a model."""
        tokens = self.full_prompt_tokens if self.mode == "full_prompt" else missing_tokens
        size, bandwidth = self.kv_bytes_per_token, self.bandwidth_gb_s
        if size is None or bandwidth is None or bandwidth <= 0:
            return None
        return (float(tokens * size) / (bandwidth * 1e9)) * 1000


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """A handoff prefill is done; its blocks stay owned until released (V-72)."""

    handoff_id: HandoffId
    request_id: RequestId
    transfer_timing: TransferTiming


@dataclass(frozen=True, slots=True)
class DestinationReserved:
    """Space for a handoff is reserved (V-75)."""

    handoff_id: HandoffId
    request_id: RequestId
    transferable_prompt_tokens: int


LifecycleEvent: TypeAlias = SourceHeld | DestinationReserved


@dataclass(frozen=True, slots=True)
class Admission:
    """A request moved from waiting to running (C-20)."""

    request_id: RequestId
    reused_input_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """One token, a token-less completion, or a rejection (C-21)."""

    request_id: RequestId
    token_id: int | None
    completed: bool
    rejected: bool = False
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureState:
    """The rank around a preemption (C-22); SGLang does not count who waits (S-55)."""

    running_requests: int
    waiting_requests: int | None
    active_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureEvent:
    """A request lost its blocks to another (C-22, S-55)."""

    at_ms: float
    kind: Literal["vllm_preemption", "sglang_retraction"]
    request_id: RequestId
    state_before: PressureState
    state_after: PressureState
    request_active_blocks_before: int
    logical_available_blocks_before: int | None = None
    required_blocks_before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """One block of a Stored event (C-25)."""

    block_hash: int
    tokens_hash: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Blocks that became findable, in chain order after ``parent_hash``."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    start_position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Hashes whose last copy was evicted, in eviction order."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """A change of what the prefix cache holds (C-25); ids rise by one per rank."""

    event_id: int
    dp_rank: int
    data: Stored | Removed


@dataclass(slots=True, kw_only=True)
class ForwardPassMetrics:
    """What a pass computed, and what it left queued (C-23). Variances are of the population."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0
    num_queued_prefill: int = 0
    sum_queued_prefill_tokens: int = 0
    var_queued_prefill_length: float = 0.0
    num_queued_decode: int = 0
    sum_queued_decode_kv_tokens: int = 0
    var_queued_decode_kv_tokens: float = 0.0
    duration_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class Metrics:
    """A snapshot of the rank (C-24)."""

    dp_rank: int
    active_blocks: int
    total_blocks: int
    running_requests: int
    waiting_requests: int
    preemptions_total: int
    sglang_cache_hit_tokens: int = 0
    sglang_cache_total_tokens: int = 0

    @property
    def cache_usage(self) -> float:
        """Share of the pool that requests and holds own."""
        return self.active_blocks / self.total_blocks


@dataclass(slots=True, kw_only=True)
class CommandEffects:
    """What a command did (C-14)."""

    result: CommandResult
    lifecycle_events: list[LifecycleEvent]
    kv_events: list[KvEvent]
    retired_requests: list[RequestId]
    metrics: Metrics
    suppressed_pending_output: bool = False


@dataclass(slots=True, kw_only=True)
class StartEffects:
    """What is visible when a pass starts (C-26)."""

    admissions: list[Admission] = field(default_factory=list)
    pressure_events: list[PressureEvent] = field(default_factory=list)
    kv_events: list[KvEvent] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class CompletionEffects:
    """What becomes visible when a pass completes (C-26)."""

    outputs: list[Output]
    lifecycle_events: list[LifecycleEvent]
    kv_events: list[KvEvent]
    metrics: Metrics
    forward_pass: ForwardPassMetrics


@dataclass(slots=True, kw_only=True)
class PendingPass:
    """A pass between its start and its completion; commands may edit its effects (C-34)."""

    started_at_ms: float
    effects: CompletionEffects


RetryHint: TypeAlias = Literal["not_applicable", "retry", "exhausted"] | int
"""Whether a zero-length pass is worth repeating at once (C-37); an int is a countdown."""


@dataclass(slots=True, kw_only=True)
class RankPass:
    """An executed pass (C-30)."""

    end_ms: float
    start_effects: StartEffects
    pending: PendingPass
    same_timestamp_retry: RetryHint = "not_applicable"
    progressed: bool = False  # some request's KV grew beyond its earlier maximum
    stuck: str | None = None  # why this rank, left to itself, would repeat the pass for ever (S-64)
