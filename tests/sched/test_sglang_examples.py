"""The worked examples of the SGLang rules, all reproduced by the reference (S-§15), and kin."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest

from passtime.errors import ConfigError, DeadEndError, LiveLockError, PasstimeError
from passtime.sched.config import EngineConfig, FixedConfig, LaunchConfig, SglangConfig
from passtime.sched.config import builtin_timing as timing_of
from passtime.sched.replay.outcome import Outcome, Status
from passtime.sched.simulate import ReplayOptions, replay
from passtime.sched.workload.rows import Workload

PAGE = 4
_fresh = count(10_000)


def prompt(tokens: int, *, head: int = 0, of: int = 0) -> tuple[int, list[int]]:
    """A prompt length and its page contents: ``head`` pages of family ``of``, the rest unique."""
    pages = -(-tokens // PAGE)
    shared = [100 * of + page for page in range(head)]
    return tokens, shared + [next(_fresh) for _ in range(pages - head)]


def run(
    *rows: tuple[float, tuple[int, list[int]], int],
    options: ReplayOptions | None = None,
    dp_size: int = 1,
    polynomial: bool = False,
    **settings: Any,
) -> Outcome:
    """Replay rows of (arrival, prompt, output tokens) with prefill 10 ms and decode 5 ms."""
    sglang = {key: settings.pop(key) for key in SglangConfig.__struct_fields__ if key in settings}
    if not polynomial:
        settings.setdefault("timing_model", FixedConfig(10.0, 5.0))
    engine = EngineConfig(
        backend="sglang",
        block_size=PAGE,
        sglang=SglangConfig(**sglang),
        **{"num_gpu_blocks": 64} | settings,
    )
    workload = Workload(
        source="example",
        timestamp_ms=[arrival for arrival, _, _ in rows],
        input_tokens=[tokens for _, (tokens, _), _ in rows],
        output_tokens=[output for _, _, output in rows],
        block_ids=[pages for _, (_, pages), _ in rows],
        trace_block_size=PAGE,
    )
    options = options or ReplayOptions(capture_admissions=True, core="literal")
    launch = LaunchConfig(engine=engine, dp_size=dp_size)
    return replay(workload, launch, timing_of(engine.timing_model), options)


def admissions(outcome: Outcome, row: int) -> list[tuple[float, int]]:
    assert outcome.admissions is not None
    return [(a.at_ms, a.reused_input_tokens) for a in outcome.admissions[row]]


def test_a_prefill_stalls_the_running_requests() -> None:
    outcome = run((0, prompt(8), 6), (12, prompt(8), 2))
    assert outcome.first_token_ms.tolist() == [10, 25]
    assert outcome.second_token_ms.tolist() == [15, 30]
    assert outcome.last_token_ms.tolist() == [45, 30]


def test_a_long_prompt_goes_in_chunks_and_shares_its_last_one() -> None:
    outcome = run((0, prompt(20), 2), (0, prompt(12), 2), chunked_prefill_size=16)
    assert outcome.first_token_ms.tolist() == [20, 20]
    assert outcome.last_token_ms.tolist() == [25, 25]
    assert [admissions(outcome, row) for row in (0, 1)] == [[(0, 0)], [(10, 0)]]


def test_the_last_page_of_a_repeated_prompt_is_computed_again() -> None:
    outcome = run(
        (0, prompt(8, head=2), 5),
        (100, prompt(8, head=2), 2),
        (200, prompt(9, head=2), 2),
    )
    assert outcome.reused_tokens.tolist() == [0, 4, 8]


def test_a_request_without_output_completes_with_its_prefill() -> None:
    outcome = run((0, prompt(8, head=2), 0), (100, prompt(8, head=2), 0))
    assert outcome.terminal_ms.tolist() == [10, 100]
    assert outcome.output_tokens.tolist() == [0, 0]
    assert outcome.reused_tokens.tolist() == [0, 8]


def test_the_retracted_request_finds_its_published_prefix_again() -> None:
    outcome = run(
        (0, prompt(16), 20), (0, prompt(17), 20), num_gpu_blocks=14, clip_max_new_tokens=4
    )
    assert outcome.first_token_ms.tolist() == [10, 10]
    assert outcome.last_token_ms.tolist() == [155, 105]
    assert admissions(outcome, 0) == [(0, 0), (105, 16)]
    assert outcome.preemptions == 1


def test_admission_needs_strictly_more_room_than_it_takes() -> None:
    outcome = run((0, prompt(20), 4), (0, prompt(28), 4), num_gpu_blocks=14)
    assert outcome.first_admit_ms.tolist() == [0, 25]
    assert outcome.last_token_ms.tolist() == [25, 50]


def test_the_interval_lets_decodes_run_between_prefills() -> None:
    outcome = run(
        (0, prompt(8), 6), (3, prompt(8), 3), (12, prompt(8), 2), prefill_decode_interval=2
    )
    assert outcome.first_admit_ms.tolist() == [0, 20, 20]
    assert outcome.first_token_ms.tolist() == [10, 30, 30]
    assert outcome.last_token_ms.tolist() == [45, 40, 35]


@pytest.mark.parametrize(("tokens", "produced"), [(8, 4), (11, 1)])
def test_max_model_len_cuts_the_output(tokens: int, produced: int) -> None:
    outcome = run((0, prompt(tokens), 40), max_model_len=12)
    assert outcome.output_tokens.tolist() == [produced]
    assert outcome.status.tolist() == [Status.COMPLETED]


@pytest.mark.parametrize("tokens", [12, 13])
def test_a_prompt_without_room_for_output_is_rejected(tokens: int) -> None:
    outcome = run((0, prompt(8), 3), (2, prompt(tokens), 40), max_model_len=12)
    assert outcome.status.tolist() == [Status.COMPLETED, Status.REJECTED]
    assert outcome.terminal_ms.tolist() == [20, 15]
    assert math.isnan(outcome.first_admit_ms[1])


def test_the_polynomial_is_asked_with_floored_means() -> None:
    long = prompt(31, head=8)
    outcome = run(
        (0, prompt(10), 3),
        (0, long, 2),
        (400, long, 2),
        (400, prompt(13), 2),
        polynomial=True,
        num_gpu_blocks=256,
    )
    times = [round(value, 6) for value in outcome.first_token_ms]
    assert times == [17.109431, 17.109431, 416.744463, 416.744463]
    assert [round(value, 6) for value in outcome.last_token_ms[:2]] == [31.441436, 25.072041]
    assert outcome.reused_tokens.tolist() == [0, 0, 28, 0]


def test_longest_prefix_first_lets_the_cached_prompt_overtake() -> None:
    rows = (
        (0.0, prompt(9, head=2, of=1), 2),
        (12.0, prompt(8), 2),
        (12.0, prompt(9, head=2, of=1), 2),
    )
    fifo = run(*rows, max_num_seqs=1)
    lpm = run(*rows, max_num_seqs=1, schedule_policy="lpm")
    assert fifo.first_admit_ms.tolist() == [0, 15, 30]
    assert lpm.first_admit_ms.tolist() == [0, 30, 15]


def test_longest_prefix_first_keeps_only_one_of_equal_uncached_heads_in_front() -> None:
    """The second of two prompts with one long uncached head waits behind an unrelated one."""
    outcome = run(
        (0, prompt(4), 3),
        (1, prompt(40, head=9, of=2), 1),
        (1, prompt(40, head=9, of=2), 1),
        (1, prompt(40), 1),
        max_num_seqs=3,
        schedule_policy="lpm",
    )
    assert outcome.first_admit_ms.tolist() == [0, 10, 20, 10]
    assert outcome.reused_tokens.tolist() == [0, 0, 36, 0]


def test_attention_dp_ranks_divide_the_chunk_and_end_together() -> None:
    outcome = run((0, prompt(16), 2), (0, prompt(4), 2), dp_size=2, chunked_prefill_size=16)
    assert outcome.first_token_ms.tolist() == [20, 10]  # two chunks of 8 against one
    assert outcome.last_token_ms.tolist() == [25, 20]


def test_attention_dp_ranks_hold_less_of_the_pool_free() -> None:
    """The new-token ratio starts at 0.3 of its value, so that more is admitted at once."""
    rows = ((0.0, prompt(8), 60), (0.0, prompt(4), 1), (12.0, prompt(28), 20))
    alone = run(rows[0], rows[2], num_gpu_blocks=23)
    grouped = run(*rows, num_gpu_blocks=23, dp_size=2)
    assert alone.first_admit_ms[1] > 100
    assert grouped.first_admit_ms[2] == 15


def test_a_chunk_too_small_to_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill_size=4 to zero"):
        run((0, prompt(4), 1), dp_size=5, chunked_prefill_size=4)


def test_certain_speculation_produces_whole_bursts() -> None:
    outcome = run((0, prompt(8), 9), aic_nextn=2, aic_nextn_accept_rates="1,1")
    assert outcome.first_token_ms.tolist() == [10]
    assert outcome.last_token_ms.tolist() == [25]  # 1 at 10, 3 each at 15, 20; 2 left at 25
    assert dict(zip(outcome.gap_ms.tolist(), outcome.gap_count.tolist(), strict=True)) == {
        0.0: 5,
        5.0: 3,
    }


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_prefill_tokens": 4}, DeadEndError),  # a whole prompt never fits its budget
        ({"num_gpu_blocks": 3, "clip_max_new_tokens": 0}, LiveLockError),  # outgrows the pool
    ],
)
def test_a_request_that_can_never_go_on_is_told(
    settings: dict[str, Any], error: type[PasstimeError]
) -> None:
    with pytest.raises(error):
        run((0, prompt(8), 20), **settings)
