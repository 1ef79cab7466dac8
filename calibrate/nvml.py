"""What a GPU says about itself while it is measured: a thread that asks NVML all the time.

A throttle may last a few milliseconds between two questions, so besides the reasons of the moment
the counters of time spent throttled are read, and any that moved counts as a reason. A machine
without NVML is measured all the same; every visit then carries the flag ``no_nvml``, and a GPU on
which others compute too gives visits the flag ``shared``.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from passtime.calibrate.clock import (
    HW_POWER_BRAKE,
    HW_THERMAL,
    SW_POWER_CAP,
    SW_THERMAL,
    Telemetry,
)

INTERVAL_S = 0.05
UNKNOWN = Telemetry(flags=("no_nvml",))

POWER_INSTANT = 186
COUNTERS = {74: SW_POWER_CAP, 269: SW_THERMAL, 270: HW_THERMAL, 271: HW_POWER_BRAKE}
"""Field ids of nvml.h: nanoseconds spent under each reason, since the driver was loaded."""

VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of a field's value, by nvmlValueType_t."""


class Watch:
    """Telemetry of one GPU, refreshed every ``INTERVAL_S`` until it is closed."""

    def __init__(self, uuid: str | None, *, interval_s: float = INTERVAL_S) -> None:
        """``uuid`` as NVML writes it (``GPU-…``); None, or no NVML, for a watch that knows nothing.

        ``missing`` says why it knows nothing; None where it does.
        """
        self.missing: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        self._latest = UNKNOWN
        self._reasons = 0
        self._counted: dict[int, int] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="nvml", daemon=True
        )
        try:
            self._open(uuid)
        except ImportError:
            self.missing = "nvidia-ml-py is not installed"
        except LookupError as error:
            self.missing = str(error)
        else:
            self._refresh()
            self._thread.start()

    def telemetry(self) -> Telemetry:
        """The latest readings, and every reason seen since the last call."""
        with self._lock:
            now, self._reasons = self._reasons, 0
            return msgspec.structs.replace(self._latest, reasons=self._latest.reasons | now)

    def close(self) -> None:
        """Stop asking; a second call does nothing."""
        if self.missing is not None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._nvml.nvmlShutdown()

    def _open(self, uuid: str | None) -> None:
        import pynvml

        if uuid is None:
            raise LookupError("the device has no UUID to ask NVML about")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML: {error}") from None
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise LookupError(f"NVML: {error}") from None
        self._nvml = pynvml

    def _run(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            self._refresh()

    def _refresh(self) -> None:
        nvml, handle = self._nvml, self._handle
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
        milliwatts = self._fields([POWER_INSTANT]).get(POWER_INSTANT)
        counted = self._fields(list(COUNTERS))
        moved = 0
        for field, reason in COUNTERS.items():
            if counted.get(field, 0) > self._counted.get(field, counted.get(field, 0)):
                moved |= reason
        latest = Telemetry(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            reasons=reasons,
            flags=("shared",) if self._others() else (),
        )
        with self._lock:
            self._latest = latest
            self._reasons |= reasons | moved
            self._counted = counted

    def _others(self) -> bool:
        """Whether more processes compute there than this one.

        They are counted, not compared: in a container NVML's process ids are not ours.
        """
        return len(self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle) or ()) > 1

    def _ask(self, question: str, *arguments: Any) -> Any:
        """NVML's answer; None where this board or driver does not know."""
        try:
            return getattr(self._nvml, question)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def _fields(self, ids: list[int]) -> dict[int, int]:
        """Values of those fields that the board has."""
        answer = self._ask("nvmlDeviceGetFieldValues", self._handle, ids) or ()
        return {
            value.fieldId: self._number(value)
            for value in answer
            if value.nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _number(self, field: Any) -> int:
        """A field's value; the union's member depends on its declared type."""
        return int(getattr(field.value, VALUE_MEMBERS[field.valueType]))
