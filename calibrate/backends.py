"""Which runner a kind of device has, and how passes of it are sampled."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from passtime.calibrate.clock import ClockPolicy
from passtime.calibrate.log import Batch
from passtime.calibrate.plan import Plan
from passtime.calibrate.runners import Runner
from passtime.errors import DeviceError
from passtime.profiles.device import DeviceFacts, DeviceKind
from passtime.profiles.shapes import ModelShape


class Backend(Protocol):
    """A module of :mod:`passtime.calibrate.runners`: what can be known before a runner is open.

    ``POLICY`` goes into the log's header.
    """

    POLICY: Mapping[str, Any]
    CLOCK: ClockPolicy
    DEFAULT_MODEL: str
    DEFAULT_BUDGET_S: float

    def computed_model(self, model: ModelShape) -> ModelShape:
        """The shape with the dtypes that are really used."""
        ...

    def visit_s(self, model: ModelShape, pass_s: float) -> float:
        """Seconds that a visit of a pass is guessed to take, making ready included."""
        ...

    def memory_bytes(self, model: ModelShape, batch: Batch) -> int:
        """Device memory needed to run ``batch``, weights included."""
        ...

    def open_runner(
        self, *, facts: DeviceFacts, model: ModelShape, plan: Plan, seed: int
    ) -> Runner:
        """A runner that can hold every batch of the plan. Raises DeviceError."""
        ...


def backend(kind: DeviceKind) -> Backend:
    """The runner module of a kind of device; DeviceError if what it needs is not installed."""
    name = {"cpu": "cpu", "cuda": "gpu"}[kind]
    try:
        return cast(Backend, importlib.import_module(f"passtime.calibrate.runners.{name}"))
    except ImportError as error:
        raise DeviceError(
            f"measuring on this device needs {error.name}, which is not installed: "
            "pip install 'passtime[gpu]'"
        ) from None
