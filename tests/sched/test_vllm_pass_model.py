"""What a model that is asked about whole passes is told (PassShape), pass by pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_rank import Rank, ShapeRecorder, rank_of, request, words

from passtime.sched.contract import ActivateDestination, ReserveDestination
from passtime.sched.timing import PassShape

TOTAL = 64 * 4


def pass_rank(**settings: Any) -> tuple[Rank, list[PassShape]]:
    model = ShapeRecorder()
    return rank_of(timing=model, **settings), model.shapes


def shape(total: int = TOTAL, **counts: int) -> PassShape:
    """What is not named is 0."""
    return PassShape(**dict.fromkeys(PassShape._fields, 0) | {"total_kv_tokens": total} | counts)


def pairs(new: int, prefix: int) -> int:
    """Query-key pairs of causal attention, one query at a time."""
    return sum(prefix + position + 1 for position in range(new))


def prefill(*requests: tuple[int, int], **more: int) -> PassShape:
    """Prompts as (new tokens, prefix), and what else is in the pass."""
    return shape(
        prefill_requests=len(requests),
        prefill_new_tokens=sum(new for new, _ in requests),
        prefill_prefix_tokens=sum(prefix for _, prefix in requests),
        prefill_pairs=sum(pairs(*request) for request in requests),
        **more,
    )


def decode(*lengths: int) -> dict[str, int]:
    return {
        "decode_requests": len(lengths),
        "decode_kv_tokens": sum(lengths),
        "decode_kv_max": max(lengths),
    }


def test_prompts_then_decodes() -> None:
    r, shapes = pass_rank()
    r.submit(1, 5, 3)
    r.submit(2, 9, 3)
    assert [seen.duration_ms for seen in r.steps(3)] == [7.0] * 3
    assert shapes == [
        prefill((5, 0), (9, 0)),
        shape(**decode(6, 10)),
        shape(**decode(7, 11)),
    ]


def test_the_other_two_questions_are_not_asked() -> None:
    model = ShapeRecorder()
    r = rank_of(timing=model)
    r.submit(1, 5, 3)
    r.steps(3)
    assert model.asked == []


def test_a_chunk_beside_decodes() -> None:
    r, shapes = pass_rank(max_num_batched_tokens=8)
    r.submit(1, 4, 9)
    r.submit(2, 12, 2)
    r.steps(3)
    assert shapes == [
        prefill((4, 0), (4, 0)),
        prefill((7, 4), **decode(5)),
        prefill((1, 11), **decode(6)),  # one token, but of a prompt
    ]


def test_cached_tokens_are_prefix() -> None:
    r, shapes = pass_rank()
    r.submit(1, words(9, 8), 1)
    r.step()
    r.submit(2, [*words(9, 8), 1, 2, 3], 1)
    r.step()
    assert shapes[1] == prefill((3, 8))


def test_a_recomputed_request_is_a_prompt_of_all_it_knows() -> None:
    r, shapes = pass_rank(num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 8)
    r.submit(2, 8, 8)
    while not (preempting := r.step()).pressure:
        pass
    assert preempting.victims == [2]
    assert shapes[-1] == shape(24, **decode(13))
    while r.running:
        r.step()
    r.step()
    assert shapes[-1]._replace(total_kv_tokens=TOTAL) == prefill((13, 0))


def test_a_recomputed_chunk_of_output_alone_is_work_too() -> None:
    r, shapes = pass_rank(num_gpu_blocks=6, enable_prefix_caching=False, max_num_batched_tokens=4)
    r.submit(1, 2, 20)
    r.submit(2, 2, 20)
    while not r.step().pressure:
        pass
    while r.running:
        r.step()
    shapes.clear()
    passes = r.steps(4)
    expected = [prefill((4, 0)), prefill((4, 4)), prefill((4, 8)), shape(**decode(13))]
    assert [s._replace(total_kv_tokens=TOTAL) for s in shapes] == expected
    assert [seen.who for seen in passes] == [[], [], [], [2]]
    assert [seen.duration_ms for seen in passes] == [7.0] * 4


def test_a_burst_is_one_decode_of_the_length_before_it() -> None:
    r, shapes = pass_rank(aic_nextn=2, aic_nextn_accept_rates="1,1")
    r.submit(1, 5, 6)
    r.steps(2)
    assert shapes == [prefill((5, 0)), shape(**decode(8))]


def test_a_full_hit_is_a_decode() -> None:
    r, shapes = pass_rank(backend="trtllm")
    for number in (1, 2):
        r.submit(number, words(9, 8), 1)
        r.step()
    assert shapes[1] == shape(**decode(8))


def test_an_activated_destination_is_a_decode() -> None:
    r, shapes = pass_rank()
    r.send(ReserveDestination(UUID(int=500), request(1, 6, 2)))
    r.send(ActivateDestination(UUID(int=500)))
    r.step()
    assert shapes == [shape(**decode(6))]


def test_a_pass_without_work_is_not_asked_about() -> None:
    r, shapes = pass_rank()
    r.submit(1, words(9, 8), 0)
    r.step()
    r.submit(2, words(9, 8), 0)
    seen = r.step()
    assert (seen.who, seen.duration_ms, len(shapes)) == ([2], 0.0, 1)


@pytest.mark.parametrize(
    ("worker_type", "expected"),
    [("prefill", [prefill((5, 0))]), ("decode", [shape(**decode(5)), shape(**decode(6))])],
)
def test_a_rank_of_one_kind_counts_only_its_kind(
    worker_type: str, expected: list[PassShape]
) -> None:
    r, shapes = pass_rank(worker_type=worker_type)
    r.submit(1, 5, len(expected))
    r.steps(len(expected))
    assert shapes == expected


def test_a_decode_rank_charges_the_step_of_a_request_that_it_recomputed() -> None:
    r, shapes = pass_rank(worker_type="decode", num_gpu_blocks=6, enable_prefix_caching=False)
    r.submit(1, 8, 8)
    r.submit(2, 8, 8)
    while not r.step().pressure:
        pass
    while r.running:
        r.step()
    seen = r.step()
    assert shapes[-1] == shape(24, **decode(13))
    assert (seen.who, seen.duration_ms) == ([2], 7.0)
