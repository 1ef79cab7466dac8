"""The random stream of speculative decoding, against the check values of V-85 and R-33."""

from __future__ import annotations

import pytest

from passtime.sched.speculative import AcceptanceSampler, ChaChaStream


def test_draws_of_64_bits_follow_the_reference() -> None:
    stream = ChaChaStream(42)
    assert [stream.next_u64() for _ in range(3)] == [
        9713269763989775522,
        10011513049433592189,
        11740708795755607249,
    ]


def test_draws_of_32_bits_follow_the_reference() -> None:
    stream = ChaChaStream(0xD37A0A7E5EED)
    assert [stream.next_u32() for _ in range(3)] == [952584220, 694593853, 2967053780]


@pytest.mark.parametrize(
    ("seed", "bursts"),
    [
        (42, "2 4 2 1 3 4 4 3 1 2 3 1 3 2 1 1 3 3 1 4"),
        (43, "1 3 2 3 3 2 1 3 3 1 2 2 2 3 2 2 4 2 2 2"),
    ],
)
def test_bursts_follow_the_reference(seed: int, bursts: str) -> None:
    sampler = AcceptanceSampler(seed, (0.7, 0.5, 0.3))
    assert [sampler.accepted() for _ in range(20)] == [int(count) for count in bursts.split()]


def test_a_stream_runs_on_over_its_internal_batches() -> None:
    """Words of later blocks equal those of a stream read in other portions."""
    halves, wholes = ChaChaStream(7), ChaChaStream(7)
    words = [halves.next_u32() for _ in range(6000)]
    pairs = [wholes.next_u64() for _ in range(3000)]
    assert [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)] == pairs
    assert len(set(words)) > 5990


def test_a_certain_acceptance_draws_nothing() -> None:
    certain, plain = AcceptanceSampler(5, (1.0, 0.5)), AcceptanceSampler(5, (0.5,))
    assert [certain.accepted() for _ in range(50)] == [plain.accepted() + 1 for _ in range(50)]


def test_an_impossible_acceptance_draws_and_fails() -> None:
    impossible, reference = AcceptanceSampler(5, (0.5, 0.0)), ChaChaStream(5)
    for _ in range(50):
        first_accepted = reference.next_u64() < 2**63
        if first_accepted:
            reference.next_u64()
        assert impossible.accepted() == 1 + first_accepted


def test_no_rates_mean_no_speculation() -> None:
    assert AcceptanceSampler(1, ()).accepted() == 1
