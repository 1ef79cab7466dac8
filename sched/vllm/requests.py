"""A request inside the rank (V-1), and its block table (V-2)."""

from __future__ import annotations

from enum import Enum, auto

from passtime.sched.contract import Request
from passtime.sched.tokens import local_block_hash, output_token_id, sequence_hash
from passtime.sched.vllm.blocks import BlockCopy


class RequestStatus(Enum):
    """Where a request stands (V-1)."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    REMOTE = auto()  # its KV is to come from a prefill rank


class Block:
    """One entry of a block table: tokens k·bs … of a request.

    ``identity`` is the sequence hash, None while partial, not yet computed output, or with
    caching off. ``copy`` is the physical block owned, if any.
    """

    __slots__ = ("copy", "identity", "local_hash")

    def __init__(self) -> None:
        """An entry without identity and without a physical block."""
        self.identity: int | None = None
        self.local_hash = 0
        self.copy: BlockCopy | None = None


class RequestState:
    """A request's progress: counts in tokens; ``computed`` <= ``allocated`` cover its KV.

    ``credit`` is the prefix credit of its first admission (C-21), None before it.
    """

    __slots__ = (
        "activated",
        "admission_blocks",
        "allocated",
        "arrival_order",
        "block_tokens",
        "blocks",
        "caching",
        "computed",
        "credit",
        "furthest",
        "limit",
        "planned",
        "preemptions",
        "prompt_tokens",
        "reported_credit",
        "request_id",
        "status",
        "tokens",
    )

    def __init__(
        self, request: Request, *, limit: int, arrival_order: int, block_tokens: int, caching: bool
    ) -> None:
        """A fresh request with ``limit`` output tokens at most."""
        self.request_id = request.request_id
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(self.tokens)
        self.limit = limit
        self.planned = request.output_token_ids
        self.computed = 0
        self.allocated = 0
        self.furthest = 0  # highest `computed` ever reached, for live-lock detection
        self.status = RequestStatus.WAITING
        self.preemptions = 0
        self.activated = False
        self.arrival_order = arrival_order
        self.credit: int | None = None
        self.reported_credit = False
        self.block_tokens = block_tokens
        self.caching = caching
        self.blocks: list[Block] = []
        self._extend_table()

    @property
    def length(self) -> int:
        """L: prompt and generated tokens."""
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """G: tokens produced so far."""
        return len(self.tokens) - self.prompt_tokens

    def remaining(self, max_model_len: int | None) -> int:
        """R: output tokens still to produce (V-4)."""
        left = max(0, self.limit - self.generated)
        return left if max_model_len is None else min(left, max(0, max_model_len - self.length))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` leading tokens cover, at most the whole table."""
        return min(-(-tokens // self.block_tokens), len(self.blocks))

    def append_output(self) -> int:
        """Produce the next token (V-66) and return it."""
        index = self.generated
        planned = self.planned
        if planned is not None and index < len(planned):
            token = planned[index]
        else:
            token = output_token_id(self.request_id, index)
        if self.length % self.block_tokens == 0:
            self.blocks.append(Block())
        self.tokens.append(token)
        return token

    def identify(self, index: int) -> None:
        """Give block ``index``, now full, its hashes (V-54, V-56)."""
        start = index * self.block_tokens
        block = self.blocks[index]
        block.local_hash = local_block_hash(self.tokens[start : start + self.block_tokens])
        parent = self.blocks[index - 1].identity if index else None
        block.identity = sequence_hash(parent, block.local_hash)

    def owned_copies(self) -> list[BlockCopy]:
        """Physical blocks owned, deepest first: the order in which they are released (V-55)."""
        return [block.copy for block in reversed(self.blocks) if block.copy is not None]

    def forget_copies(self) -> None:
        """The blocks were released: nothing is computed, nothing allocated."""
        for block in self.blocks:
            block.copy = None
        self.computed = self.allocated = 0

    def _extend_table(self) -> None:
        for _ in range(-(-self.prompt_tokens // self.block_tokens)):
            self.blocks.append(Block())
        if self.caching:
            for index in range(self.prompt_tokens // self.block_tokens):
                self.identify(index)
