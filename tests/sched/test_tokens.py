"""Token ids and hashes, against the check values of V-56 and V-66."""

from __future__ import annotations

from uuid import UUID

from passtime.sched.tokens import local_block_hash, output_token_id, sequence_hash


def test_output_tokens_of_the_first_check_request() -> None:
    tokens = [output_token_id(UUID(int=1), index) for index in range(4)]
    assert tokens == [2515880452, 3600266899, 2716793611, 2249174135]


def test_output_tokens_differ_between_requests() -> None:
    assert output_token_id(UUID(int=2), 0) == 1927195132


def test_local_hashes_of_the_check_blocks() -> None:
    blocks = [range(0, 4), range(4, 8), range(8, 12)]
    assert [local_block_hash(block) for block in blocks] == [
        9143094415614847814,
        12124091508212882195,
        1088361764653601668,
    ]


def test_sequence_hashes_chain_the_local_ones() -> None:
    chain: list[int] = []
    for block in (range(0, 4), range(4, 8), range(8, 12)):
        chain.append(sequence_hash(chain[-1] if chain else None, local_block_hash(block)))
    assert chain == [9143094415614847814, 9510318385840434533, 16998148715716822651]
