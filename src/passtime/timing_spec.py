"""The timing model on a command line: what people type, and the model it stands for.

==========================  ====================================================================
``config``                  what the engine file says
``polynomial``              the reference's default
``fixed:PREFILL,DECODE``    two constants, in ms
``fixed:from=SPEC``         the best two constants for another model on the workload at hand
``PROFILE[@calls|@pass]``   a shipped profile or a profile file (also NVIDIA's ``.npz``), asked by
                            two calls per pass (the default) or for the whole pass at once
==========================  ====================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from passtime.errors import InputError
from passtime.profiles.document import shipped_profiles
from passtime.providers import live_timing
from passtime.sched.config import (
    ExternalConfig,
    FixedConfig,
    LaunchConfig,
    PolynomialConfig,
    TimingModelConfig,
)
from passtime.sched.timing import TimingModel

Composition: TypeAlias = Literal["calls", "pass"]

FORMS = "config, polynomial, fixed:PREFILL_MS,DECODE_MS, fixed:from=SPEC, PROFILE[@calls|@pass]"


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """``config``: whatever the engine file selects."""

    text: str = "config"

    @property
    def title(self) -> str:
        """A name to head a column with."""
        return self.text

    def model(self, launch: LaunchConfig) -> TimingModel:
        """The live model."""
        role = launch.engine.worker_type
        pool = "engine" if role == "aggregated" else f"{role}_engine"
        return live_timing(launch.engine.timing_model, source=f"{pool}.timing_model")


@dataclass(frozen=True, slots=True)
class BuiltinTiming:
    """``polynomial`` or ``fixed:PREFILL,DECODE``."""

    text: str
    config: TimingModelConfig

    @property
    def title(self) -> str:
        """A name to head a column with."""
        return self.text

    def model(self, launch: LaunchConfig) -> TimingModel:
        """The live model."""
        return live_timing(self.config, source=f"timing {self.text}")


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """A profile by its name or path, and how it is asked."""

    profile: str
    composition: Composition = "calls"

    @property
    def text(self) -> str:
        """The shortest way to type it."""
        return self.profile if self.composition == "calls" else f"{self.profile}@pass"

    @property
    def title(self) -> str:
        """A name to head a column with: of a file, its name alone."""
        return self.text.replace(self.profile, Path(self.profile).name.removesuffix(".json"), 1)

    @property
    def is_table(self) -> bool:
        """Whether it is NVIDIA's table, which knows the two calls only."""
        return Path(self.profile).suffix == ".npz"

    def model(self, launch: LaunchConfig) -> TimingModel:
        """The live model. Raises DocumentError or ConfigError if there is none."""
        config: TimingModelConfig
        if self.is_table:
            config = ExternalConfig(provider="dynamo_profile", config={"path": self.profile})
        else:
            config = ExternalConfig(
                provider="passtime",
                config={"profile": self.profile, "composition": self.composition},
            )
        return live_timing(config, source=f"timing {self.text}")


AskedTiming: TypeAlias = EngineTiming | BuiltinTiming | ProfileSpec


@dataclass(frozen=True, slots=True)
class BestConstants:
    """``fixed:from=SPEC``: it takes a replay under SPEC, see :mod:`passtime.recording`."""

    source: AskedTiming

    @property
    def text(self) -> str:
        """The way to type it."""
        return f"fixed:from={self.source.text}"

    @property
    def title(self) -> str:
        """A name to head a column with."""
        return f"constants of {self.source.title}"


TimingSpec: TypeAlias = AskedTiming | BestConstants


def parse_timing(text: str) -> TimingSpec:
    """What ``text`` stands for. Raises InputError that lists what exists."""
    source = text.removeprefix("fixed:from=")
    if source == text:
        return _asked(text, text)
    asked = _asked(source, text)
    if isinstance(asked, ProfileSpec) and asked.composition == "pass":
        raise InputError(f"timing {text!r}: constants stand for the two calls, leave @pass out")
    return BestConstants(asked)


def _asked(name: str, text: str) -> AskedTiming:
    if name == "config":
        return EngineTiming()
    if name == "polynomial":
        return BuiltinTiming(name, PolynomialConfig())
    if name.startswith("fixed:"):
        return BuiltinTiming(name, _constants(name.removeprefix("fixed:"), text))
    return _profile(name, text)


def _constants(pair: str, text: str) -> FixedConfig:
    try:
        prefill_ms, decode_ms = (float(part) for part in pair.split(","))
    except ValueError:
        raise InputError(
            f"timing {text!r}: expected fixed:PREFILL_MS,DECODE_MS or fixed:from=SPEC"
        ) from None
    if not all(math.isfinite(time) and time >= 0 for time in (prefill_ms, decode_ms)):
        raise InputError(f"timing {text!r}: both constants must be finite and >= 0")
    return FixedConfig(prefill_ms=prefill_ms, decode_ms=decode_ms)


def _profile(name: str, text: str) -> ProfileSpec:
    """A profile that exists, as far as its name goes."""
    profile, composition = name, "calls"
    head, at, tail = name.rpartition("@")
    if at and tail in ("calls", "pass"):
        profile, composition = head, tail
    path = Path(profile)
    if profile not in shipped_profiles() and (path.is_dir() or not path.exists()):
        raise InputError(
            f"timing {text!r}: no shipped profile and no file is called {profile!r}; "
            f"shipped: {', '.join(shipped_profiles()) or 'none'}; known forms: {FORMS}"
        )
    spec = ProfileSpec(profile, "pass" if composition == "pass" else "calls")
    if spec.is_table and spec.composition == "pass":
        raise InputError(f"timing {text!r}: an .npz table knows the two calls only")
    return spec
