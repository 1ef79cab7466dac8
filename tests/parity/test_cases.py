"""Every recorded case of the reference, replayed and compared value by value."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import OWN_CASES, Case, load_cases, shared_folder
from comparing import first_difference
from run_cases import case_files, main

CASES = [case for path in case_files([OWN_CASES]) for case in load_cases(path)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_matches_the_reference(case: Case) -> None:
    assert first_difference(case) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_literal_core_matches_the_reference(case: Case) -> None:
    assert first_difference(case, core="literal") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conv_vllm", "splitwise_conv_sglang"])
def test_large_case_matches_the_reference(name: str) -> None:
    path = shared_folder() / "oracles" / "large" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent: set PASSTIME_SHARED to the folder that holds oracles/")
    (case,) = load_cases(path)
    assert first_difference(case) is None


def test_runner_counts_and_exits_as_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = OWN_CASES / "vllm_basic_0.json"
    assert main([str(good)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed, 0 skipped\n"
    assert main(["--backend", "sglang", str(good)]) == 2
    assert capsys.readouterr().out == "0 passed, 0 failed, 1 skipped\n"
    broken = tmp_path / "broken.json"
    broken.write_text(good.read_text().replace('"decode_ms":2.5', '"decode_ms":2.75'))
    assert main([str(broken)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL vllm_basic_0: request 0: last_token_ms: expected ")
    assert out.endswith("0 passed, 1 failed, 0 skipped\n")
