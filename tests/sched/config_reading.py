"""Reading configurations in tests: what is taken, and the words of what is not."""

from __future__ import annotations

from typing import Any

import pytest

from passtime.errors import ConfigError
from passtime.sched.config import EngineConfig, launch_config


def read(**engine: Any) -> EngineConfig:
    return launch_config({"engine": engine}, source="e.json").engine


def fault(document: Any, *, strict: bool = True) -> str:
    """The message that refuses ``document``; it names the file."""
    with pytest.raises(ConfigError) as caught:
        launch_config(document, source="e.json", strict=strict)
    message = str(caught.value)
    assert all(line.startswith("e.json: ") for line in message.splitlines())
    return message.removeprefix("e.json: ")


def engine_fault(**engine: Any) -> str:
    return fault({"engine": engine})
