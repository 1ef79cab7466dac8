"""The demonstration: measure this CPU, fit, and see what two constants would have hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from passtime import __version__
from passtime.calibrate.calibration import Calibration, Preparation, Wish, calibrate, prepare
from passtime.calibrate.log import OtherRunError
from passtime.calibrate.measure import Progress
from passtime.comparison import Comparison, ComparisonDocument, compare
from passtime.errors import InputError
from passtime.profiles.document import MeasuredPoint, Profile
from passtime.profiles.reading import write_atomically
from passtime.sched.config import EngineConfig, LaunchConfig
from passtime.sched.timing import TimingModel
from passtime.sched.workload.rows import Workload
from passtime.sched.workload.synthetic import SyntheticLoad, synthetic
from passtime.timing_spec import ProfileSpec

PROMPTS = 400
UTILISATION = 0.75  # of what the device can serve at ``TYPICAL_BATCH`` decodes per pass
TYPICAL_BATCH = 16

# The plan of the CPU reaches 2,048 new tokens, 64 decodes, 8,192 tokens of one request and 131,072
# of all: an engine with these limits asks for little else.
LAUNCH = LaunchConfig(
    engine=EngineConfig(
        backend="vllm",
        block_size=64,
        num_gpu_blocks=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=8192,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Two constants as they are often chosen: one prefill and one decode step, measured alone."""

    prefill: MeasuredPoint
    decode: MeasuredPoint

    @property
    def spec(self) -> str:
        """As a timing model is typed."""
        return f"fixed:{self.prefill.latency_ms:.4g},{self.decode.latency_ms:.4g}"

    @property
    def sentence(self) -> str:
        """Where the two numbers are from."""
        return (
            f"{self.spec}: one prefill of {self.prefill.prefill_new_tokens} tokens, and one decode "
            f"step of {self.decode.decode_requests} requests with "
            f"{self.decode.decode_kv_tokens // self.decode.decode_requests} tokens each, on average"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demonstration found, and the files it wrote."""

    calibration: Calibration
    guess: Guess
    workload: Workload
    request_rate: float
    comparison: Comparison
    document: ComparisonDocument
    files: tuple[Path, ...]


def prepare_demo(*, budget_s: float, seed: int) -> Preparation:
    """The plan for this CPU. InputError for a bad budget or seed."""
    return prepare(Wish(device="cpu", budget_s=budget_s, seed=seed))


def run_demo(
    preparation: Preparation,
    folder: Path,
    *,
    progress: Progress,
    say: Callable[[str], None],
) -> Demo:
    """Measure, fit, replay a conversation workload, and write everything into ``folder``.

    A folder that holds an unfinished run of the same settings is gone on with; one of other
    settings is done anew.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}") from None
    profile_path = folder / "profile.json"
    calibration = _calibrate(preparation, folder, profile_path, progress, say)
    model = ProfileSpec(str(profile_path)).model(LAUNCH)
    workload, request_rate = conversation(model, seed=preparation.seed)
    guess = constants_of(calibration.profile, workload)
    specs = [str(profile_path), guess.spec]
    comparison = compare(workload, LAUNCH, specs)
    document = comparison.document(
        {
            "passtime": __version__,
            "workload": {
                "kind": "conversation",
                "num_prompts": PROMPTS,
                "request_rate": request_rate,
                "seed": preparation.seed,
            },
            "engine": msgspec.to_builtins(LAUNCH),
            "timing": specs,
            "calibration": msgspec.to_builtins(calibration.profile.errors),
        }
    )
    files = [profile_path, calibration.log, folder / "report.json"]
    write_atomically(files[-1], document.to_json())
    if find_spec("matplotlib") is not None:
        from passtime.comparison_page import page

        files.append(folder / "report.html")
        write_atomically(files[-1], page(comparison).encode())
    return Demo(
        calibration=calibration,
        guess=guess,
        workload=workload,
        request_rate=request_rate,
        comparison=comparison,
        document=document,
        files=tuple(files),
    )


def conversation(model: TimingModel, *, seed: int) -> tuple[Workload, float]:
    """Conversations, arriving as fast as keeps the device ``UTILISATION`` busy; and that rate."""
    lengths = synthetic(SyntheticLoad(kind="conversation", num_prompts=PROMPTS, seed=seed))
    isl = _mean(lengths.input_tokens)
    osl = _mean(lengths.output_tokens)
    context = isl + osl // 2
    prefill_ms = model.predict_prefill_ms(1, isl, 0)
    step_ms = model.predict_decode_ms(
        TYPICAL_BATCH, TYPICAL_BATCH * context, context, TYPICAL_BATCH * context
    )
    service_ms = prefill_ms + osl * step_ms / TYPICAL_BATCH
    request_rate = float(f"{UTILISATION * 1000 / service_ms:.2g}")
    load = SyntheticLoad(
        kind="conversation", num_prompts=PROMPTS, request_rate=request_rate, seed=seed
    )
    return synthetic(load), request_rate


def constants_of(profile: Profile, workload: Workload) -> Guess:
    """The measured prefill and decode that come nearest to the workload's typical ones.

    InputError if the profile has no such points.
    """
    isl = _mean(workload.input_tokens)
    context = isl + _mean(workload.output_tokens) // 2

    def prefill_distance(point: MeasuredPoint) -> float:
        return abs(math.log(point.prefill_new_tokens / isl))

    def decode_distance(point: MeasuredPoint) -> float:
        mean = point.decode_kv_tokens / point.decode_requests
        return math.hypot(math.log(point.decode_requests / TYPICAL_BATCH), math.log(mean / context))

    prefills = [
        p
        for p in profile.points
        if p.regime == "prefill" and p.prefill_requests == 1 and not p.prefill_prefix_tokens
    ]
    decodes = [p for p in profile.points if p.regime == "decode"]
    if not (prefills and decodes):
        raise InputError("--budget: too little was measured in it for a comparison")
    return Guess(
        prefill=min(prefills, key=prefill_distance), decode=min(decodes, key=decode_distance)
    )


def _calibrate(
    preparation: Preparation,
    folder: Path,
    profile_path: Path,
    progress: Progress,
    say: Callable[[str], None],
) -> Calibration:
    log = folder / "profile.log.jsonl"
    try:
        return calibrate(preparation, output=profile_path, log=log, progress=progress, say=say)
    except OtherRunError:
        say(f"{log} is of other settings: measuring anew")
    for stale in (log, profile_path):
        stale.unlink(missing_ok=True)
    return calibrate(preparation, output=profile_path, log=log, progress=progress, say=say)


def _mean(tokens: Sequence[int]) -> int:
    return round(sum(tokens) / len(tokens))
