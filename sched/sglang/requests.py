"""A request inside the rank (S-6)."""

from __future__ import annotations

from passtime.sched.contract import Request, RequestId
from passtime.sched.sglang.lease import Lease
from passtime.sched.tokens import output_token_id


class RequestState:
    """A request's tokens, output budget and KV lease; survives retraction (S-6)."""

    __slots__ = (
        "furthest",
        "lease",
        "output_limit",
        "planned",
        "prompt_tokens",
        "request_id",
        "tokens",
    )

    def __init__(self, request: Request, *, max_model_len: int | None) -> None:
        """A fresh request; ``max_model_len`` lowers its output budget once and for all."""
        self.request_id: RequestId = request.request_id
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(self.tokens)
        self.output_limit = request.output_limit
        if max_model_len is not None:
            self.output_limit = min(self.output_limit, max(0, max_model_len - self.prompt_tokens))
        self.planned = request.output_token_ids
        self.lease = Lease()
        self.furthest = 0  # most tokens ever materialised, for live-lock detection

    @property
    def length(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """Output tokens produced so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Output tokens still to produce."""
        return max(0, self.prompt_tokens + self.output_limit - len(self.tokens))

    def append_output(self) -> int:
        """Produce the next token and return it (S-8)."""
        index = self.output_tokens
        planned = self.planned
        token = (
            output_token_id(self.request_id, index)
            if planned is None or index >= len(planned)
            else planned[index]
        )
        self.tokens.append(token)
        return token
