"""What a pass computes besides decoding."""

from __future__ import annotations

from passtime.sched.lockstep.sequence import Sequence
from passtime.sched.timing import PassShape


class PassWork:
    """The chunks of one pass: prompts, their parts, and recomputations (V-40.9).

    ``computed`` are the sequences whose known tokens are all computed now, in running order.
    ``prompts``, ``isl_sum`` and ``prefix_sum`` make the arguments of the prefill call (C-41);
    ``prefill_tokens`` is what the items with prompt tokens compute, produced tokens included.
    ``chunks`` holds (sequence, tokens before, tokens used) for a model that asks for whole passes.
    """

    __slots__ = (
        "chunks",
        "computed",
        "isl_sum",
        "prefill_tokens",
        "prefix_sum",
        "prompts",
    )

    def __init__(self) -> None:
        """Nothing yet."""
        self.computed: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.prompts = self.isl_sum = self.prefix_sum = self.prefill_tokens = 0

    def add(self, sequence: Sequence, before: int, used: int) -> bool:
        """A chunk was scheduled; whether it was the sequence's last."""
        after, prompt = before + used, sequence.prompt_tokens
        if before < prompt:
            self.prompts += 1
            self.isl_sum += after if after < prompt else prompt
            self.prefix_sum += before
            self.prefill_tokens += used
        self.chunks.append((sequence, before, used))
        if after < sequence.known_tokens:
            sequence.computed_tokens = after
            return False
        self.computed.append(sequence)
        return True

    def shape(
        self, batch: int, kv_tokens: int, longest_tokens: int, total_kv_tokens: int
    ) -> PassShape:
        """The whole pass, given the decodes in step.

        A chunk is a prefill, a recomputation too, unless it is one produced token's decode step.
        """
        requests = new_tokens = prefix_tokens = pairs = 0
        for sequence, before, used in self.chunks:
            known = sequence.known_tokens
            emits = before + used == known and sequence.output_limit > 0
            if emits and used == 1 and before >= sequence.prompt_tokens:
                batch += 1
                kv_tokens += known
                longest_tokens = max(longest_tokens, known)
            elif used:
                requests += 1
                new_tokens += used
                prefix_tokens += before
                pairs += used * before + used * (used + 1) // 2
        return PassShape(
            prefill_requests=requests,
            prefill_new_tokens=new_tokens,
            prefill_prefix_tokens=prefix_tokens,
            prefill_pairs=pairs,
            decode_requests=batch,
            decode_kv_tokens=kv_tokens,
            decode_kv_max=longest_tokens,
            total_kv_tokens=total_kv_tokens,
        )
