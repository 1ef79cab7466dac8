"""From a configured timing model to a live one: the place where measured models enter.

``sched`` knows only the protocol; here the providers that ship (``passtime``, ``dynamo_profile``)
and those of other packages (entry-point group ``passtime.timing_models``) are looked up.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, Protocol

from passtime.errors import ConfigError, PasstimeError
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
    """The model an engine configuration selects (C-44).

    ConfigError for a provider that is unknown, cannot be loaded, or makes no model of its config.
    """
    if not isinstance(config, ExternalConfig):
        return builtin_timing(config)
    name = config.provider
    provider = _provider(name, source)
    try:
        model = provider(config.config, source=source)
    except PasstimeError:
        raise
    except Exception as error:  # somebody else's code
        raise ConfigError(
            f"{source}: timing provider {name!r} failed: {type(error).__name__}: {error}"
        ) from error
    for question in ("predict_prefill_ms", "predict_decode_ms"):
        if not callable(getattr(model, question, None)):
            raise ConfigError(
                f"{source}: timing provider {name!r} made a {type(model).__name__}, "
                f"which has no {question}"
            )
    return model


def _provider(name: str, source: str) -> Provider:
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        provider: Provider = getattr(importlib.import_module(module), attribute)
        return provider
    if name in added:
        try:
            loaded: Provider = added[name].load()
        except Exception as error:  # somebody else's code
            raise ConfigError(
                f"{source}: timing provider {name!r} ({added[name].value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        return loaded
    known = ", ".join([*BUILT_IN, *sorted(added)])
    raise ConfigError(f"{source}: unknown timing provider {name!r}; known: {known}")
