"""What runs a batch on a device: the interface, and one module per kind of device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from passtime.calibrate.clock import ClockedDevice
from passtime.calibrate.log import Batch
from passtime.errors import DeviceError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape


class OutOfDeviceMemory(DeviceError):
    """The batch does not fit; the runner is as usable as before."""


class RunnerFailed(DeviceError):
    """The runner broke while it ran a batch: it must be closed and opened anew."""


class Runner(ClockedDevice, Protocol):
    """A device that holds one model and runs passes of it (and is the clock's device)."""

    @property
    def facts(self) -> DeviceFacts:
        """The device, completed by what only its runner knows."""
        ...

    @property
    def model(self) -> ModelShape:
        """The shape as it is computed: with the dtypes that are really used."""
        ...

    @property
    def software(self) -> Mapping[str, Any]:
        """Versions of everything that the times depend on."""
        ...

    @property
    def policy(self) -> Mapping[str, Any]:
        """At least ``runner``, ``attention`` ("causal" or "rectangle"), ``clock``, ``dtype``."""
        ...

    @property
    def kernel_hash(self) -> str | None:
        """The identity of the kernels' source; None where they are a library's."""
        ...

    def memory_bytes(self, batch: Batch) -> int:
        """Device memory needed to run ``batch``, weights included."""
        ...

    def prepare(self, batch: Batch) -> Any:
        """The work of replaying ``batch``: inputs, KV slots, graphs; nothing of it is timed.

        Works live side by side until they are released. Raises OutOfDeviceMemory (as ``replay``
        may) or RunnerFailed (as every method may).
        """
        ...

    def release(self, work: Any) -> None:
        """Free what ``prepare`` took."""
        ...

    def facts_of(self, work: Any) -> Mapping[str, Any]:
        """What is to be logged with every visit of a work, beside clocks; often nothing."""
        ...

    def checks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measurements beside the points, each for a note of that topic; often none.

        Asked for once per log, on the warm device, before the first visit.
        """
        ...

    def empty(self) -> Any | None:
        """The work of a pass that computes nothing, to time its launch; None without a launch."""
        ...

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        ...
