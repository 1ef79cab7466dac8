"""From a configured timing model to a live one: the place where measured models enter.

``sched`` knows only the protocol; here the providers that ship (``passtime``, ``dynamo_profile``)
and those of other packages (entry-point group ``passtime.timing_models``) are looked up.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, Protocol

from passtime.errors import ConfigError
from passtime.sched.config import ExternalConfig, TimingModelConfig, builtin_timing
from passtime.sched.timing import TimingModel

GROUP = "passtime.timing_models"

BUILT_IN = {
    "passtime": "passtime.profiles.provider:from_config",
    "dynamo_profile": "passtime.profiles.dynamo:from_config",
}


class Provider(Protocol):
    """What a provider's name stands for."""

    def __call__(self, config: Any, *, source: str) -> TimingModel:
        """The model that ``config`` describes; ``source`` is named in InputErrors."""
        ...


def live_timing(config: TimingModelConfig, *, source: str) -> TimingModel:
    """The model an engine configuration selects (C-44). ConfigError for an unknown provider."""
    if not isinstance(config, ExternalConfig):
        return builtin_timing(config)
    return _provider(config.provider, source)(config.config, source=source)


def _provider(name: str, source: str) -> Provider:
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        provider: Provider = getattr(importlib.import_module(module), attribute)
        return provider
    if name in added:
        loaded: Provider = added[name].load()
        return loaded
    known = ", ".join([*BUILT_IN, *sorted(added)])
    raise ConfigError(f"{source}: unknown timing provider {name!r}; known: {known}")
