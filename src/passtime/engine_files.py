"""Engine files on the command line: one pool of workers, or a prefill and a decode pool."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from passtime.deployment import Deployment, Pools
from passtime.errors import ConfigError, InputError
from passtime.replay_flags import ONE_POOL_FLAGS, TWO_POOL_FLAGS, refuse_idle
from passtime.sched.config import LaunchConfig, WorkerType, launch_config, unknown_timing_keys


def read_deployment(args: argparse.Namespace) -> tuple[Deployment, list[str]]:
    """One pool or two, as the flags say, and notes. Raises InputError for half of a form."""
    pools = {"--prefill-engine": args.prefill_engine, "--decode-engine": args.decode_engine}
    given = [flag for flag, path in pools.items() if path is not None]
    missing = [flag for flag in pools if flag not in given]
    if args.engine is not None:
        if given:
            raise InputError(
                f"--engine is one pool that does all, {given[0]} is of two: give one of the forms"
            )
        refuse_idle(args, TWO_POOL_FLAGS, "--prefill-engine and --decode-engine")
        return _read_pool(args.engine, "--engine", "aggregated")
    if not given:
        raise InputError(
            "nothing serves: give --engine E.json for one pool of workers, or "
            "--prefill-engine P.json and --decode-engine D.json for two"
        )
    if missing:
        raise InputError(f"{given[0]} is half of a deployment: give {missing[0]} too")
    refuse_idle(args, ONE_POOL_FLAGS, "--engine")
    prefill, notes = _read_pool(args.prefill_engine, "--prefill-engine", "prefill")
    decode, more_notes = _read_pool(args.decode_engine, "--decode-engine", "decode")
    if prefill.engine.backend != decode.engine.backend:
        raise ConfigError(
            f"both pools need one backend: {args.prefill_engine} says {prefill.engine.backend}, "
            f"{args.decode_engine} says {decode.engine.backend}"
        )
    return Pools(prefill=prefill, decode=decode), [*notes, *more_notes]


def _read_pool(path: str, flag: str, wanted: WorkerType) -> tuple[LaunchConfig, list[str]]:
    """A configuration whose ``worker_type`` is what ``flag`` stands for (R-24, R-40)."""
    launch, notes = read_launch(path)
    found = launch.engine.worker_type
    if found != wanted:
        meant = "--engine" if found == "aggregated" else f"--{found}-engine"
        raise ConfigError(
            f"{path}: worker_type: {flag} takes {wanted!r}, found {found!r}, which is for {meant}"
        )
    return launch, notes


def echo_deployment(deployment: Deployment) -> dict[str, Any]:
    """Every setting of every pool, defaults included."""
    if isinstance(deployment, Pools):
        return {
            "prefill_engine": msgspec.to_builtins(deployment.prefill),
            "decode_engine": msgspec.to_builtins(deployment.decode),
        }
    return {"engine": msgspec.to_builtins(deployment)}


def read_launch(path: str) -> tuple[LaunchConfig, list[str]]:
    """The launch configuration, or bare engine record, in a JSON file; and notes (C-5, C-44)."""
    try:
        document = json.loads(Path(path).read_bytes(), object_pairs_hook=_object)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    launch = launch_config(document, source=path, strict=False)
    ignored = unknown_timing_keys(document) if isinstance(document, Mapping) else []
    return launch, [f"{path}: timing_model.{key} is ignored: nothing reads it" for key in ignored]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, every key once: the last of two would win without a word."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"key {key!r} is given twice")
        found[key] = value
    return found
