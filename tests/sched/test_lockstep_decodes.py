"""Members in lock step against the same members kept one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from passtime.sched.lockstep.decodes import Decodes
from passtime.sched.lockstep.sequence import Sequence


@dataclass
class Member:
    """A decoding request, spelled out."""

    sequence: Sequence
    known: int
    left: int

    @property
    def computed(self) -> int:
        return self.known - 1


class Spelled:
    """What ``Decodes`` claims to know, from a list."""

    def __init__(self, rng: random.Random, block_tokens: int) -> None:
        self.rng = rng
        self.block_tokens = block_tokens
        self.decodes = Decodes(block_tokens, track_longest=True)
        self.members: list[Member] = []
        self.now = 0
        self.order = 0

    def join(self) -> None:
        """One or two sequences get a token in the pass before ``now``."""
        joining = []
        for _ in range(self.rng.randint(1, 2)):
            prompt, limit = self.rng.randint(1, 20), self.rng.randint(2, 12)
            made = self.rng.randint(1, limit - 1)
            sequence = Sequence(self.order, prompt, limit)
            sequence.known_tokens = prompt + made
            sequence.order = self.order
            self.order += 1
            joining.append(sequence)
            self.members.append(Member(sequence, prompt + made, limit - made))
        self.decodes.join(joining, self.now - 1)

    def check(self) -> None:
        decodes, now, size = self.decodes, self.now, self.block_tokens
        needing = [m for m in self.members if m.computed % size == 0]
        assert decodes.count == len(self.members) == sum(decodes.takers)
        assert decodes.kv_tokens(now) == sum(m.known for m in self.members)
        assert decodes.takers[now % size] == len(needing)
        assert [m for m in self.members if decodes.needs_block(m.sequence, now)] == needing
        if self.members:
            assert decodes.longest_tokens(now) == max(m.known for m in self.members)
            assert decodes.next_finish <= now + min(m.left for m in self.members) - 1
            for passes in (1, size - 1, size, 2 * size + 1):
                assert decodes.blocks_needed(now, passes) == self.blocks(passes)
            room = self.rng.randint(0, 3 * len(self.members))
            passes = decodes.passes_within(now, room)
            assert self.blocks(passes) <= room < self.blocks(passes + 1)

    def blocks(self, passes: int) -> int:
        """Blocks taken when every member decodes ``passes`` tokens more."""
        return sum(
            -(-(m.computed + passes) // self.block_tokens) - -(-m.computed // self.block_tokens)
            for m in self.members
        )

    def leave(self) -> None:
        member = self.members.pop(self.rng.randrange(len(self.members)))
        self.decodes.leave(member.sequence)
        member.sequence.last_pass = -1

    def decode(self, stalled: set[int]) -> None:
        """A pass in which the members at ``stalled`` get nothing."""
        for index, member in enumerate(self.members):
            if index in stalled:
                self.decodes.stall(member.sequence, self.now)
            else:
                member.known += 1
                member.left -= 1
        if stalled:
            scheduled = [m.known - 1 for i, m in enumerate(self.members) if i not in stalled]
            assert self.decodes.longest_tokens(self.now) == max(scheduled, default=0)
        finished = [m.sequence for m in self.members if m.left == 0]
        if self.decodes.next_finish == self.now:
            assert self.decodes.finish(self.now) == finished
        else:
            assert finished == []
        self.members = [m for m in self.members if m.left]
        self.now += 1


@pytest.mark.parametrize("seed", range(40))
def test_aggregates_equal_the_members_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    spelled = Spelled(rng, rng.choice((2, 3, 4, 16)))
    for _ in range(60):
        draw = rng.random()
        if draw < 0.3:
            spelled.join()
        elif draw < 0.4 and spelled.members:
            spelled.leave()
        spelled.check()
        stalls = rng.random() < 0.15
        few = range(len(spelled.members) // 2) if stalls else range(0)
        spelled.decode(set(few))


def test_a_stall_breaks_the_series_of_tokens_and_moves_its_end() -> None:
    decodes = Decodes(4)
    sequence = Sequence(0, 3, 6)
    sequence.known_tokens = 4
    decodes.join([sequence], 0)
    assert (sequence.first_pass, sequence.last_pass) == (0, 5)
    decodes.stall(sequence, 2)
    decodes.stall(sequence, 3)
    assert sequence.series_until(100) == [(0, 1), (4, 7)]
    assert sequence.series_until(5) == [(0, 1), (4, 5)]
    assert decodes.next_finish <= 7
    assert decodes.last_stall == 3


def test_entries_of_those_who_left_are_not_finished() -> None:
    decodes = Decodes(4)
    stays, leaves = Sequence(0, 3, 4), Sequence(1, 5, 4)
    for order, sequence in enumerate((stays, leaves)):
        sequence.order = order
        sequence.known_tokens += 1
    decodes.join([stays, leaves], 0)
    decodes.leave(leaves)
    leaves.last_pass = -1
    assert decodes.next_finish == 3
    assert decodes.finish(3) == [stays]
    assert decodes.count == 0
