"""The numerics suite under Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def test_kernels_agree_with_float64_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("the interpreter of triton 3.6 needs numpy < 2.4")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "numerics"),
    ]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | one_thread | {"TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert " passed" in report
    assert "skipped" not in report, report
