"""The NVML watch, against a module that answers as NVML does."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from passtime.calibrate.clock import DISTURBED, HW_THERMAL, SW_POWER_CAP
from passtime.calibrate.nvml import POWER_INSTANT, Watch


class FakeNvmlError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """The part of pynvml that the watch asks; ``unknown`` questions are refused."""

    NVMLError = FakeNvmlError
    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2, 0

    def __init__(self) -> None:
        super().__init__(
            reasons=0,
            fields={POWER_INSTANT: 350_500, 74: 10, 270: 7},
            unknown=set(),
            processes=["ours"],
            started=0,
            refreshed=threading.Event(),
        )

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise FakeNvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return int(self.reasons)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        if "temperature" in self.unknown:
            raise FakeNvmlError("Not Supported")
        return 55

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[str]:
        return list(self.processes)

    def nvmlDeviceGetFieldValues(self, handle: str, ids: list[int]) -> list[Any]:
        self.refreshed.set()
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=0 if field in self.fields else 3,
                valueType=3 if field != POWER_INSTANT else 1,
                value=SimpleNamespace(
                    uiVal=self.fields.get(field, 0), ullVal=self.fields.get(field, 0)
                ),
            )
            for field in ids
        ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def refresh(nvml: FakeNvml) -> None:
    """Wait until the watch has asked twice: the second answer is wholly after this call."""
    for _ in range(2):
        nvml.refreshed.clear()
        assert nvml.refreshed.wait(5)
    time.sleep(0.02)


def test_readings_are_there_at_once(nvml: FakeNvml) -> None:
    watch = Watch("GPU-1", interval_s=10)
    seen = watch.telemetry()
    watch.close()
    assert watch.missing is None
    assert (seen.sm_mhz, seen.memory_mhz, seen.temperature_c) == (1980, 3201, 55)
    assert seen.power_w == 350.5
    assert seen.reasons == 0
    assert seen.flags == ()


def test_a_throttle_between_two_questions_is_remembered_once(nvml: FakeNvml) -> None:
    watch = Watch("GPU-1", interval_s=0.005)
    nvml.reasons = HW_THERMAL
    refresh(nvml)
    nvml.reasons = 0
    refresh(nvml)
    assert watch.telemetry().reasons & HW_THERMAL
    assert not watch.telemetry().reasons
    watch.close()


def test_a_counter_that_moved_is_a_reason(nvml: FakeNvml) -> None:
    watch = Watch("GPU-1", interval_s=0.005)
    refresh(nvml)
    assert watch.telemetry().reasons == 0, "counters that stand still are none"
    nvml.fields = nvml.fields | {74: 11}
    refresh(nvml)
    assert watch.telemetry().reasons == SW_POWER_CAP
    nvml.fields = nvml.fields | {270: 8}
    refresh(nvml)
    assert watch.telemetry().reasons & DISTURBED == HW_THERMAL
    watch.close()


def test_another_process_on_the_gpu_is_flagged(nvml: FakeNvml) -> None:
    nvml.processes = ["ours", "another's"]
    watch = Watch("GPU-1", interval_s=10)
    assert watch.telemetry().flags == ("shared",)
    watch.close()


def test_what_the_board_does_not_know_is_left_out(nvml: FakeNvml) -> None:
    nvml.unknown = {"temperature"}
    nvml.fields = {}
    watch = Watch("GPU-1", interval_s=10)
    seen = watch.telemetry()
    watch.close()
    assert seen.temperature_c is None
    assert seen.power_w is None
    assert seen.sm_mhz == 1980


def test_closing_ends_the_thread_and_twice_is_once(nvml: FakeNvml) -> None:
    watch = Watch("GPU-1", interval_s=0.005)
    assert nvml.started == 1
    watch.close()
    watch.close()
    assert nvml.started == 0
    assert "nvml" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("uuid", "reason"), [("GPU-2", "NVML: Not Found"), (None, "the device has no UUID")]
)
def test_a_device_that_nvml_does_not_know_is_flagged_not_refused(
    nvml: FakeNvml, uuid: str | None, reason: str
) -> None:
    watch = Watch(uuid)
    assert watch.missing is not None
    assert watch.missing.startswith(reason)
    assert watch.telemetry().flags == ("no_nvml",)
    watch.close()
    assert nvml.started == 0


def test_without_the_package_everything_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = Watch("GPU-1")
    assert watch.missing == "nvidia-ml-py is not installed"
    assert watch.telemetry().sm_mhz is None
    watch.close()
