"""Replay a case and find the first place where it differs from what the reference recorded."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from cases import Case
from msgspec.structs import astuple

from passtime.errors import ConfigError, InputError, PasstimeError, RunError
from passtime.providers import live_timing
from passtime.sched.config import LaunchConfig, launch_config
from passtime.sched.replay.outcome import Outcome, Status
from passtime.sched.replay.report import summary
from passtime.sched.simulate import ReplayOptions, replay, replay_pools
from passtime.sched.timing import TimingModel
from passtime.sched.workload.formats import load_trace
from passtime.sched.workload.rows import Workload

CoreName = Literal["auto", "literal"]

SKETCHED = ("itl_ms", "output_token_throughput_per_user")
"""Metrics whose percentiles the reference takes from a sketch (R-52)."""

NOT_OURS = {"kv_eviction_policy", "power_w", "power_coverage", "processed_tokens"}
"""Summary keys of the reference that our report has no use for (R-60)."""


def first_difference(case: Case, *, core: CoreName = "auto") -> str | None:
    """What differs first, in words; None if the case matches."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            workload, outcome = run(case, Path(folder), core=core)
        except PasstimeError as error:
            return _error_difference(case, error)
    if case.expected["status"] != "ok":
        return f"expected the error {case.expected['error']['class']!r}, but it ran"
    return next(_differences(case, workload, outcome), None)


def outcome_class(case: Case, *, core: CoreName) -> str:
    """How our replay of a case ends, in a word: "finished", or the error's class."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(case, Path(folder), core=core)
        except PasstimeError as error:
            return type(error).__name__
    return "finished"


def run(case: Case, folder: Path, *, core: CoreName) -> tuple[Workload, Outcome]:
    """Load the case as a user would, and replay it."""
    options = dict(case.options)
    router = options.pop("router_mode", "round_robin")
    if router != "round_robin":
        raise ConfigError(f"router_mode must be round_robin, got {router!r}")
    launches = _launches(case, folder)
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in case.trace))
    workload = load_trace(
        trace, trace_format="mooncake", trace_block_size=options.pop("trace_block_size")
    ).workload
    replay_options = ReplayOptions(
        concurrency=options.pop("replay_concurrency", None),
        num_workers=options.pop("num_workers", 1),
        num_prefill_workers=options.pop("num_prefill_workers", 1),
        num_decode_workers=options.pop("num_decode_workers", 1),
        arrival_speedup_ratio=options.pop("arrival_speedup_ratio", 1.0),
        max_sim_time_ms=options.pop("max_sim_time_ms", None),
        capture_admissions=True,
        core=core,
    )
    assert not options, f"options of the case that nothing reads: {sorted(options)}"
    if len(launches) == 2:
        return workload, replay_pools(workload, launches[0], launches[1], replay_options)
    return workload, replay(workload, *launches[0], replay_options)


def _launches(case: Case, folder: Path) -> list[tuple[LaunchConfig, TimingModel]]:
    for name, profile in case.profiles.items():
        types = profile.get("dtypes", {})
        arrays: dict[str, Any] = {
            key: np.array(value, dtype=types.get(key, "<f8"))
            for key, value in profile["arrays"].items()
        }
        np.savez(folder / f"{name}.npz", **arrays)
    launches = []
    for engine in (case.engine, case.prefill_engine, case.decode_engine):
        if engine is not None:
            launch = launch_config(_with_paths(engine, folder), source=case.name)
            launches.append((launch, live_timing(launch.engine.timing_model, source=case.name)))
    return launches


def _with_paths(engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with a profile's name in the case replaced by the file written for it."""
    timing = engine.get("engine", {}).get("timing_model")
    config = timing.get("config") if isinstance(timing, dict) else None
    if not (isinstance(config, dict) and "profile" in config):
        return engine
    paths = {**{k: v for k, v in config.items() if k != "profile"}}
    paths["path"] = str(folder / f"{config['profile']}.npz")
    return {**engine, "engine": {**engine["engine"], "timing_model": {**timing, "config": paths}}}


def _error_difference(case: Case, error: PasstimeError) -> str | None:
    """Whether we failed as the reference did: at the same stage."""
    if case.expected["status"] != "error":
        return f"{type(error).__name__}: {error}"
    reference = case.expected["error"]
    stuck = "in-flight" in reference["text"]
    if stuck != isinstance(error, RunError):
        return f"expected {reference['text']!r}, found {type(error).__name__}: {error}"
    if reference["stage"] == "config" and not isinstance(error, InputError):
        return f"expected {reference['text']!r}, found {type(error).__name__}: {error}"
    return None


def _differences(case: Case, workload: Workload, outcome: Outcome) -> Iterator[str]:
    expected = case.expected
    columns = expected["columns"]
    # Between pools a request has two places, which stand in columns of their own.
    labels = {"index"} if case.engine is not None else {"index", "worker", "dp_rank"}
    for row in expected["requests"]:
        index = (
            row[columns.index("index")] if "index" in columns else expected["requests"].index(row)
        )
        found = request_columns(case, outcome, index)
        for column, value in zip(columns, row, strict=True):
            if column not in labels and found[column] != value:
                yield f"request {index}: {column}: expected {value!r}, found {found[column]!r}"
    if "summary" in expected:
        yield from _summary_differences(expected["summary"], workload, outcome)


def request_columns(case: Case, outcome: Outcome, index: int) -> dict[str, Any]:
    """One request's row as the reference reports it."""

    def time(column: np.ndarray[Any, Any]) -> float | None:
        value = float(column[index])
        return None if math.isnan(value) else value

    def placed(column: np.ndarray[Any, Any]) -> int | None:
        return int(column[index]) if column[index] >= 0 else None

    status = Status(int(outcome.status[index]))
    arrival, first = time(outcome.arrival_ms), time(outcome.first_token_ms)
    second, last = time(outcome.second_token_ms), time(outcome.last_token_ms)
    tokens = int(outcome.output_tokens[index])
    dp_size = (case.engine or {}).get("dp_size") or 1
    scheduler = int(outcome.scheduler[index])
    admissions = outcome.admissions[index] if outcome.admissions is not None else []
    no_record = status is Status.INCOMPLETE
    row: dict[str, Any] = {
        "arrival_ms": arrival,
        "first_admit_ms": time(outcome.first_admit_ms),
        "first_token_ms": first,
        "last_token_ms": last,
        "terminal_ms": time(outcome.terminal_ms),
        "ttft_ms": None if first is None or arrival is None else first - arrival,
        "ttst_ms": None if second is None or first is None else second - first,
        "e2e_ms": None if last is None or arrival is None else last - arrival,
        "itl_mean_ms": (
            None if tokens < 2 or last is None or first is None else (last - first) / (tokens - 1)
        ),
        "output_length": tokens,
        "reused_input_tokens": int(outcome.reused_tokens[index]),
        "admission_count": int(outcome.admission_count[index]),
        "terminal_status": status.name.lower(),
        "dp_rank": scheduler % dp_size,
        "worker": scheduler // dp_size,
        "admissions": [
            [value for value in astuple(entry) if value is not None] for entry in admissions
        ],
    }
    if outcome.pools is not None:
        pools = outcome.pools
        row |= {
            "reused_input_tokens": int(pools.prefill_reused_tokens[index]),
            "prefill_worker": placed(pools.prefill_scheduler),
            "decode_worker": placed(outcome.scheduler),
            "prefill_admit_ms": time(pools.prefill_admit_ms),
            "source_held_ms": time(pools.source_held_ms),
            "destination_reserved_ms": time(pools.destination_reserved_ms),
            "destination_activated_ms": time(pools.destination_activated_ms),
            "decode_admit_ms": time(pools.decode_admit_ms),
            "source_released_ms": time(pools.source_released_ms),
            "decode_reused_input_tokens": (
                None
                if time(pools.decode_admit_ms) is None
                else int(pools.decode_reused_tokens[index])
            ),
        }
    if no_record:
        row = dict.fromkeys(row, None) | {"terminal_status": "no_record"}
    return row


def _summary_differences(
    expected: dict[str, Any], workload: Workload, outcome: Outcome
) -> Iterator[str]:
    found = summary(outcome, workload)
    for key, value in expected.items():
        if key in NOT_OURS:
            continue
        if key not in found:
            yield f"summary: {key} is missing"
            continue
        ours = found[key]
        if ours is None:
            ours = 0  # the reference's empty distributions are zeros
        sketched = key.endswith(SKETCHED) and not key.startswith(("mean_", "min_", "max_", "std_"))
        tolerance = 0.01 if sketched else 1e-9
        same = (
            math.isclose(ours, value, rel_tol=tolerance, abs_tol=1e-9)
            if isinstance(value, int | float) and isinstance(ours, int | float)
            else ours == value
        )
        if not same:
            yield f"summary: {key}: expected {value!r}, found {ours!r}"
