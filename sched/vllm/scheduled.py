"""What a pass has scheduled so far, and what the timing model is asked about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from passtime.sched.contract import Admission, ForwardPassMetrics, PressureEvent, RequestId
from passtime.sched.moments import variance
from passtime.sched.timing import PassShape
from passtime.sched.vllm.requests import RequestState


@dataclass(slots=True, kw_only=True)
class WorkItem:
    """One request's share of a pass, counts in tokens at schedule time (V-40.9)."""

    request: RequestState
    used: int
    before: int
    prompt_new: int
    prompt_before: int
    prompt_tokens: int
    length: int
    was_complete: bool


@dataclass(slots=True)
class ScheduledPass:
    """The work table of one pass (V-10)."""

    budget: int
    counts_prefill: bool  # False on a decode worker (V-62)
    prefills: bool = True  # False in a pass that holds prompts back (V-89)
    items: dict[RequestId, WorkItem] = field(default_factory=dict)
    preempted: bool = False
    admissions: list[Admission] = field(default_factory=list)
    pressure: list[PressureEvent] = field(default_factory=list)
    rejected: list[RequestId] = field(default_factory=list)
    progressed: bool = False  # somebody's `computed` rose above its earlier maximum

    def add(self, item: WorkItem) -> None:
        """Record a scheduled request (V-40.9, V-40.10)."""
        self.items[item.request.request_id] = item
        self.budget -= item.used

    def undo(self, request: RequestState) -> None:
        """A victim's work of this pass returns to the budget, and admission ends (V-45)."""
        self.preempted = True
        item = self.items.pop(request.request_id, None)
        if item is not None:
            self.budget += item.used

    def computed_prompt(self, request: RequestState) -> bool:
        """Whether this pass computes prompt tokens of ``request``."""
        item = self.items.get(request.request_id)
        return item is not None and item.prompt_new > 0

    def prefill_arguments(self) -> tuple[int, int, int] | None:
        """(batch_size, mean_isl, mean_prefix) of the prefill call, None for no call (C-41)."""
        if not self.counts_prefill:
            return None
        prompts = [item for item in self.items.values() if item.prompt_new > 0]
        if not prompts:
            return None
        batch = len(prompts)
        mean_isl = sum(item.prompt_before + item.prompt_new for item in prompts) // batch
        mean_prefix = sum(item.prompt_before for item in prompts) // batch
        return (batch, mean_isl, mean_prefix) if mean_isl > mean_prefix else None

    def shape(self, decodes: list[RequestState], total_kv_tokens: int) -> PassShape:
        """The whole pass for a model that asks for it; ``decodes`` get a token in this pass.

        A decode item is one of ``decodes`` that computed no prompt token and at most one token;
        every other item that computed something is a prefill item, recomputation included. On a
        decode worker, where prefill is free, all of ``decodes`` are decode items (V-61, V-62).
        """
        kv_lengths: list[int] = []
        decoding: set[RequestId] = set()
        for request in decodes:
            item = self.items.get(request.request_id)
            one_step = item is None or (item.prompt_new == 0 and item.used <= 1)
            if one_step or not self.counts_prefill:
                decoding.add(request.request_id)
                kv_lengths.append(request.length)
        requests = new_tokens = prefix_tokens = pairs = 0
        if self.counts_prefill:
            for request_id, item in self.items.items():
                if item.used == 0 or request_id in decoding:
                    continue
                requests += 1
                new_tokens += item.used
                prefix_tokens += item.before
                pairs += item.used * item.before + item.used * (item.used + 1) // 2
        return PassShape(
            prefill_requests=requests,
            prefill_new_tokens=new_tokens,
            prefill_prefix_tokens=prefix_tokens,
            prefill_pairs=pairs,
            decode_requests=len(kv_lengths),
            decode_kv_tokens=sum(kv_lengths),
            decode_kv_max=max(kv_lengths, default=0),
            total_kv_tokens=total_kv_tokens,
        )

    def forward_pass_metrics(self) -> ForwardPassMetrics:
        """The scheduled half of the metrics (C-23)."""
        prompts = [item for item in self.items.values() if item.prompt_new > 0]
        decodes = [
            item for item in self.items.values() if item.prompt_new == 0 and not item.was_complete
        ]
        return ForwardPassMetrics(
            num_prefill_requests=len(prompts),
            sum_prefill_tokens=sum(item.used for item in prompts),
            var_prefill_length=variance([item.prompt_tokens for item in prompts]),
            sum_prefill_kv_tokens=sum(item.prompt_before for item in prompts),
            num_decode_requests=len(decodes),
            sum_decode_kv_tokens=sum(item.length for item in decodes),
            var_decode_kv_tokens=variance([item.length for item in decodes]),
        )
