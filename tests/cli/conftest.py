"""Runs a command in this process; a profile for the commands that take one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from passtime import cli
from passtime.profiles.device import DeviceFacts
from passtime.profiles.document import (
    REGIME_AXES,
    SCHEMA,
    Accuracy,
    AxisName,
    Coefficients,
    EngineFacts,
    Errors,
    Intervals,
    Parallelism,
    Profile,
    Provenance,
    Range,
    Regime,
    save_profile,
)
from passtime.profiles.shapes import load_model


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def passtime(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """``passtime("simulate", "--engine", …)``: exit code, stdout, stderr."""

    def run(*argv: object) -> Ran:
        monkeypatch.setattr(cli, "COMMANDS", (str(argv[0]),))  # the others need not be importable
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as stopped:  # argparse: bad usage
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


MEASURED_UP_TO: dict[AxisName, float] = {
    "prompts": 4.0,
    "new_tokens": 4096.0,
    "prompt_context": 4096.0,
    "decodes": 8.0,
    "decode_context": 500.0,
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile file of a small imaginary GPU, fitted on mixed passes too."""
    box: dict[Regime, dict[AxisName, Range]] = {
        regime: {axis: Range(low=1.0, high=MEASURED_UP_TO[axis]) for axis in axes}
        for regime, axes in REGIME_AXES.items()
    }
    path = tmp_path / "small-gpu.json"
    document = Profile(
        schema=SCHEMA,
        name="small-gpu",
        device_kind="cuda",
        device=DeviceFacts(kind="cuda", name="imaginary", memory_bytes=2**34),
        model=load_model("tiny"),
        parallelism=Parallelism(tensor_parallel=1, pipeline_parallel=1),
        provenance=Provenance(made_by="a test", timed="nothing"),
        engine=EngineFacts(),
        model_class="step",
        coefficients=Coefficients(
            launch_ms=4.0,
            linear_flops_per_s=2e11,
            weight_bytes_per_s=4e9,
            linear_overlap=0.1,
            token_ms=0.001,
            tile_share=0.0,
            attention_flops_per_s=1e11,
            prefill_kv_bytes_per_s=1e10,
            attention_overlap=0.2,
            decode_kv_bytes_per_s=2e9,
            decode_ramp_ms=0.1,
            decode_ramp_tokens=1000.0,
            prefill_request_ms=0.05,
            decode_request_ms=0.2,
            row_ms_per_token=0.0,
            row_overlap=0.0,
            mixed_ms=1.0,
            mixed_request_ms=0.0,
            mixed_kv_ms=0.0,
            mixed_request_kv_ms=0.0,
        ),
        box=box,
        errors=Errors(
            in_sample=Accuracy(
                points=1,
                mape_percent=0.0,
                p90_percent=0.0,
                max_percent=0.0,
                bias_percent=0.0,
            )
        ),
        intervals=Intervals(
            level_percent=90.0,
            width={"prefill": 1.6, "decode": 1.6, "mixed": 1.6},
            floor=0.05,
            beyond=1.0,
        ),
        points=(),
    )
    save_profile(document, path)
    return path
