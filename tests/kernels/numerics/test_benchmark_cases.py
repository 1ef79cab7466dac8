"""What the kernel benchmark times is right: every case at small sizes against its rival."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from passtime.kernels.operators import TimedOperators
from passtime.profiles.shapes import ModelShape, MoeShape

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"

MODEL = ModelShape(
    name="small",
    layers=1,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn_size=96,
    vocab_size=300,
    moe=MoeShape(experts=6, experts_per_token=2, expert_ffn_size=32),
)


@pytest.fixture
def kernel_cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("kernel_cases", None)
    import kernel_cases

    return kernel_cases


def test_every_case_computes_what_its_rival_computes(device: str, kernel_cases: ModuleType) -> None:
    bench = kernel_cases.Bench(
        operators=TimedOperators.on(device),
        model=MODEL,
        experts=MODEL,
        grid=kernel_cases.Grid(
            prefill=[(20, 0), (7, 30)],
            decode=[(2, 50)],
            product_rows=[5],
            rows=[3],
            expert_rows=[4],
        ),
        device=torch.device(device),
        cold_bytes=30_000,
    )
    seen = set()
    for case in kernel_cases.cases(bench):
        seen.add(case.kernel)
        for rotation in {0, case.rotations - 1}:
            found = case.run(rotation)
            if case.baseline is None:
                continue
            wanted = case.baseline(rotation).double()
            error = (found.double() - wanted).norm() / wanted.norm()
            # e4m3 keeps three bits; everything else rounds to bf16 once or twice.
            assert error <= (0.06 if case.kernel == "fp8 product" else 1e-2), case
    assert len(seen) >= 9
