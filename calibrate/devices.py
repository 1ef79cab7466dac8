"""Which devices this machine has, and what is known about each.

NVIDIA GPUs are found through NVML (package nvidia-ml-py), else through torch, else not at all and
the reason is said. Nothing here needs either.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from passtime.calibrate.datasheet import peaks
from passtime.errors import DeviceError, InputError
from passtime.profiles.device import DeviceFacts

GENERIC_NAMES = frozenset({"", "graphics device", "nvidia graphics device", "nvidia device"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What was found. ``missing`` says why no GPU is listed; None where one is."""

    cpu: DeviceFacts
    gpus: tuple[DeviceFacts, ...]
    missing: str | None

    def __iter__(self) -> Iterator[tuple[str, DeviceFacts]]:
        """Each device with the name that ``--device`` takes."""
        yield "cpu", self.cpu
        for index, facts in enumerate(self.gpus):
            yield f"cuda:{index}", facts


def find_devices() -> Devices:
    """Look at this machine: its CPU, and its NVIDIA GPUs in NVML's order (by PCI bus)."""
    reasons = []
    for look in (_gpus_by_nvml, _gpus_by_torch):
        try:
            return Devices(cpu=cpu_facts(), gpus=look(), missing=None)
        except DeviceError as error:
            reasons.append(str(error))
    return Devices(cpu=cpu_facts(), gpus=(), missing="; ".join(reasons))


def list_devices() -> list[DeviceFacts]:
    """The CPU, then the GPUs."""
    return [facts for _, facts in find_devices()]


def device(name: str, *, label: str | None = None) -> DeviceFacts:
    """The device that ``--device`` names: ``cpu``, ``cuda`` or ``cuda:I``.

    ``label`` takes the place of the name that the driver reports; a driver that reports none, or
    one that every GPU could bear, makes it necessary. InputError for a bad name or a missing
    label, DeviceError for a device that is not there.
    """
    if name == "cpu":
        return labelled(cpu_facts(), label)
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise InputError(f"--device {name}: wanted cpu, cuda or cuda:INDEX")
    found = find_devices()
    if not found.gpus:
        raise DeviceError(f"--device {name}: no NVIDIA GPU can be used here: {found.missing}")
    number = int(index or 0)
    if number >= len(found.gpus):
        there = ", ".join(key for key, _ in found)
        raise DeviceError(f"--device {name}: there is no such GPU; found: {there}")
    return labelled(found.gpus[number], label)


def labelled(facts: DeviceFacts, label: str | None) -> DeviceFacts:
    """The facts under the name that profiles will carry; InputError if there is no usable one."""
    if label is not None and not label.strip():
        raise InputError("--label: it is empty; wanted the device's name")
    if label is not None:
        details = {**facts.details, "reported_name": facts.name}
        named = msgspec.structs.replace(facts, name=label.strip(), details=details)
        return _with_peaks(named) if facts.peak_flops is None else named
    if is_generic(facts.name):
        raise InputError(
            f"the driver calls this device {facts.name!r}, which names no product, and its profile "
            "could be taken for another's: say which it is by --label NAME"
        )
    return facts


def is_generic(name: str) -> bool:
    """Whether a reported name says nothing about the product (pre-release and masked boards)."""
    return name.strip().lower() in GENERIC_NAMES


# --- CPU ------------------------------------------------------------------------------------------


def cpu_facts() -> DeviceFacts:
    """The CPU that this process may use: its name, the processors and the memory allotted to it."""
    return DeviceFacts(
        kind="cpu",
        name=_cpu_name(),
        memory_bytes=_memory_bytes(),
        processors=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        details={"machine": platform.machine(), "system": platform.system()},
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return physical
    return min(physical, limit)


# --- NVIDIA GPUs ----------------------------------------------------------------------------------


def _gpus_by_nvml() -> tuple[DeviceFacts, ...]:
    try:
        import pynvml
    except ImportError:
        raise DeviceError("nvidia-ml-py is not installed") from None
    with _nvml(pynvml):
        count = pynvml.nvmlDeviceGetCount()
        if not count:
            raise DeviceError("NVML lists no GPU")
        return tuple(_nvml_facts(pynvml, index) for index in range(count))


@contextmanager
def _nvml(pynvml: Any) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML: {error}") from None
    try:
        yield
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _nvml_facts(pynvml: Any, index: int) -> DeviceFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str, *arguments: Any) -> Any:
        """NVML's answer; None where this board or driver does not know."""
        try:
            return getattr(pynvml, question)(*arguments)
        except (AttributeError, pynvml.NVMLError):
            return None

    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    details = {
        "uuid_hash": _hashed(ask("nvmlDeviceGetUUID", handle)),
        "power_limit_w": None if limit is None else limit / 1000,
        "persistence": _flag(ask("nvmlDeviceGetPersistenceMode", handle)),
        "ecc": _flag(ask("nvmlDeviceGetEccMode", handle)),
        "mig": _flag(ask("nvmlDeviceGetMigMode", handle)),
    }
    return _with_peaks(
        DeviceFacts(
            kind="cuda",
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            compute_capability=None if capability is None else "{}.{}".format(*capability),
            driver=_text(ask("nvmlSystemGetDriverVersion") or "") or None,
            details={key: value for key, value in details.items() if value is not None},
        )
    )


def _gpus_by_torch() -> tuple[DeviceFacts, ...]:
    try:
        import torch
    except ImportError:
        raise DeviceError("torch is not installed") from None
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise DeviceError(f"torch {torch.__version__} (built {built}) finds no GPU")
    return tuple(_torch_facts(torch, index) for index in range(torch.cuda.device_count()))


def _torch_facts(torch: Any, index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    return _with_peaks(
        DeviceFacts(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            processors=properties.multi_processor_count,
            l2_bytes=getattr(properties, "L2_cache_size", None),
            compute_capability=f"{properties.major}.{properties.minor}",
        )
    )


def _with_peaks(facts: DeviceFacts) -> DeviceFacts:
    promised = peaks(facts.name, facts.memory_bytes) if facts.kind == "cuda" else None
    if promised is None:
        return facts
    return msgspec.structs.replace(
        facts,
        peak_flops=promised.flops,
        peak_bytes_per_s=promised.bytes_per_s,
        details={**facts.details, "datasheet": promised.source},
    )


def _text(value: str | bytes) -> str:
    return (value.decode(errors="replace") if isinstance(value, bytes) else value).strip()


def _hashed(uuid: str | bytes | None) -> str | None:
    if uuid is None:
        return None
    return hashlib.sha256(_text(uuid).encode()).hexdigest()[:16]


def _flag(mode: int | list[int] | tuple[int, ...] | None) -> bool | None:
    """NVML modes are 0 or 1; ECC and MIG answer (current, pending)."""
    if isinstance(mode, list | tuple):
        mode = mode[0]
    return None if mode is None else bool(mode)
