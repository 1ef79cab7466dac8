"""Requests of a SGLang-style rank that decode in lock step, in aggregate.

Only decode passes move them; they are numbered on their own and called *steps* here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from passtime.sched.lockstep.edges import Node

NEVER = -1

Key: TypeAlias = int | tuple[int, ...]
"""What a page is found by below its parent: trace blocks, or whose output it is."""


class SteppedSequence:
    """A request from its arrival to its end. Counts are tokens unless a name says otherwise.

    While it is a member of :class:`StepDecodes` nothing of it is touched: ``known_tokens`` then
    follows from ``delta`` and the step number, and all of it is computed.

    ``row``              of the workload.
    ``output_limit``     tokens it will have produced when it ends.
    ``final_tokens``     prompt and those.
    ``known_tokens``     prompt and produced tokens.
    ``computed_tokens``  whose KV is there; a sequence in the queue, or just admitted.
    ``furthest_tokens``  the most that a prefill has ever computed of it.
    ``order``            its place in ``running``: a number that rises with each admission.
    ``lead_pass``, ``first_step``, ``last_step``  its present series of tokens: one from a prefill
                         pass (or NEVER), then one per step; ``last_step`` is planned ahead.
    ``earlier``          the series before it, broken off by a retraction.
    ``head``             equal for requests with the same head of a prompt, where they are sorted.
    The others belong to the prefix cache (``radix.py``).
    """

    __slots__ = (
        "block_ids",
        "cached_pages",
        "computed_tokens",
        "declining",
        "delta",
        "earlier",
        "final_tokens",
        "first_key",
        "first_step",
        "furthest_tokens",
        "head",
        "known_tokens",
        "last_step",
        "lead_pass",
        "node",
        "order",
        "output_limit",
        "prompt_pages",
        "prompt_tokens",
        "publishes_from",
        "row",
    )

    block_ids: Sequence[int]
    cached_pages: int
    declining: bool
    delta: int
    first_key: Key
    head: object
    node: Node
    prompt_pages: int

    def __init__(self, row: int, prompt_tokens: int, output_limit: int) -> None:
        """A request that waits for the first time."""
        self.row = row
        self.prompt_tokens = prompt_tokens
        self.output_limit = output_limit
        self.final_tokens = prompt_tokens + output_limit
        self.known_tokens = prompt_tokens
        self.computed_tokens = 0
        self.furthest_tokens = 0
        self.order = NEVER
        self.lead_pass = NEVER
        self.first_step = 0
        self.last_step = NEVER
        self.publishes_from = NEVER
        self.earlier: list[tuple[int, int, int]] | None = None

    def end_series(self, last_step: int) -> None:
        """The present series of tokens is over, with ``last_step`` or before it began."""
        self.last_step = min(self.last_step, last_step)
        if self.lead_pass >= 0 or self.last_step >= self.first_step:
            if self.earlier is None:
                self.earlier = []
            self.earlier.append((self.lead_pass, self.first_step, self.last_step))
        self.lead_pass = self.last_step = NEVER
        self.first_step = 0


class StepDecodes:
    """Sequences that get one token in every step, one number per property instead of a loop.

    A member has step + delta known tokens when a step starts, and its delta is constant: so are
    the class of steps (modulo ``page_tokens``) in which it needs a page, and its last step.

    Invariants: ``count`` members; ``takers[c]`` = members with -delta ≡ c, Σ takers = count; every
    member is in ``_finishing[member.last_step]``, in running order.
    """

    def __init__(self, page_tokens: int, *, clip_tokens: int, track_longest: bool) -> None:
        """Nobody decodes. ``clip_tokens`` is ``clip_max_new_tokens``.

        ``track_longest`` keeps the longest member findable.
        """
        self.page_tokens = page_tokens
        self.step = 0  # number of the next step
        self.count = 0
        self.takers = [0] * page_tokens
        self._delta_sum = 0
        self._finishing: dict[int, list[SteppedSequence]] = {}
        self._finish_steps: list[int] = []
        self._clip = clip_tokens
        self._capped = 0  # members with more than ``clip_tokens`` still to produce
        self._declining = 0  # the others
        self._declining_lasts = 0  # Σ last_step of those
        self._turning: dict[int, list[tuple[int, SteppedSequence]]] = {}
        self._longest: list[tuple[int, int, SteppedSequence]] | None = [] if track_longest else None

    # --- Members --------------------------------------------------------------------------------

    def join(self, sequence: SteppedSequence) -> None:
        """A sequence, with all known tokens computed, decodes from the next step on."""
        step = self.step
        sequence.delta = delta = sequence.known_tokens - step
        sequence.first_step = step
        sequence.last_step = last = sequence.final_tokens - delta - 1
        self.count += 1
        self._delta_sum += delta
        self.takers[-delta % self.page_tokens] += 1
        finishing = self._finishing.get(last)
        if finishing is None:
            finishing = self._finishing[last] = []
            heappush(self._finish_steps, last)
        finishing.append(sequence)
        turn = last + 1 - self._clip
        if turn <= step:
            sequence.declining = True
            self._declining += 1
            self._declining_lasts += last
        else:
            sequence.declining = False
            self._capped += 1
            self._turning.setdefault(turn, []).append((sequence.order, sequence))
        if self._longest is not None:
            heappush(self._longest, (-delta, sequence.order, sequence))

    def leave(self, sequence: SteppedSequence) -> None:
        """A member was retracted."""
        self._finishing[sequence.last_step].remove(sequence)
        self._subtract(sequence)

    def _subtract(self, sequence: SteppedSequence) -> None:
        self.count -= 1
        self._delta_sum -= sequence.delta
        self.takers[-sequence.delta % self.page_tokens] -= 1
        if sequence.declining:
            self._declining -= 1
            self._declining_lasts -= sequence.last_step
        else:
            self._capped -= 1
            sequence.declining = True  # its entry in ``_turning`` is stale

    def finish(self) -> list[SteppedSequence]:
        """Members whose last token comes in this step leave, in running order."""
        if not self._finish_steps or self._finish_steps[0] != self.step:
            return []
        finished = self._finishing.pop(heappop(self._finish_steps))
        for sequence in finished:
            self._subtract(sequence)
        return finished

    def advance(self, steps: int) -> None:
        """So many steps were made."""
        self.step += steps
        if self._turning:
            for turn in sorted(turn for turn in self._turning if turn <= self.step):
                for order, sequence in self._turning.pop(turn):
                    if sequence.order == order and not sequence.declining:
                        sequence.declining = True
                        self._capped -= 1
                        self._declining += 1
                        self._declining_lasts += sequence.last_step

    # --- Questions ------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """Σ known tokens of all members when the next step starts."""
        return self.count * self.step + self._delta_sum

    def steps_to_finish(self) -> int:
        """Steps up to the next one that may end a member, included; there are members."""
        return self._finish_steps[0] - self.step + 1

    def may_need_more(self, steps: int, pages: int) -> bool:
        """Whether ``steps`` steps might take more than ``pages`` pages; quicker than to know."""
        return self.count * (steps // self.page_tokens + 1) > pages

    def pages_needed(self, steps: int) -> int:
        """Pages that all members take in the next ``steps`` steps."""
        periods, rest = divmod(steps, self.page_tokens)
        start = self.step % self.page_tokens
        pages = periods * self.count + sum(self.takers[start : start + rest])
        wrapped = start + rest - self.page_tokens
        return pages + sum(self.takers[:wrapped]) if wrapped > 0 else pages

    def steps_within(self, pages: int) -> int:
        """The most steps that ``pages`` pages can feed; there are members."""
        periods, left = divmod(pages, self.count)
        steps = periods * self.page_tokens
        while (needed := self.takers[(self.step + steps) % self.page_tokens]) <= left:
            left -= needed
            steps += 1
        return steps

    @property
    def reserved_tokens(self) -> int:
        """Σ min(remaining, clip) of all members when the next step starts (S-37)."""
        falling = self._declining_lasts - self._declining * (self.step - 1)
        return self._capped * self._clip + falling

    def reserved_ahead(self, steps: int) -> Iterator[int]:
        """``reserved_tokens`` at the start of each of the next ``steps``, if nobody leaves."""
        capped, declining, lasts = self._capped, self._declining, self._declining_lasts
        turning = self._turning
        for step in range(self.step, self.step + steps):
            if step in turning and step > self.step:
                for order, sequence in turning[step]:
                    if sequence.order == order and not sequence.declining:
                        capped -= 1
                        declining += 1
                        lasts += sequence.last_step
            yield capped * self._clip + lasts - declining * (step - 1)

    def longest_tokens(self) -> int:
        """Known tokens of the longest member when the next step starts, 0 without members."""
        heap = self._longest
        assert heap is not None
        while heap:
            delta, order, sequence = heap[0]
            if sequence.order == order and sequence.last_step >= self.step:
                return self.step - delta
            heappop(heap)
        return 0
