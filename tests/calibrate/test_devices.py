"""Devices are found with NVML, with torch, or not at all; and a name has to name something."""

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

import pytest

from passtime.calibrate import devices
from passtime.calibrate.datasheet import GIB, peaks
from passtime.calibrate.devices import device, find_devices, is_generic, labelled, list_devices
from passtime.errors import DeviceError, InputError
from passtime.profiles.device import DeviceFacts


class NvmlError(Exception):
    pass


def nvml(*boards: Mapping[str, object], broken: str | None = None) -> ModuleType:
    """A stand-in for nvidia-ml-py, with the functions of NVML that are asked."""
    module = ModuleType("pynvml")

    def init() -> None:
        if broken:
            raise NvmlError(broken)

    def ask(key: str) -> object:
        def answer(index: int) -> object:
            if key not in boards[index]:
                raise NvmlError("Not Supported")
            return boards[index][key]

        return answer

    module.__dict__.update(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(boards),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlSystemGetDriverVersion=lambda: "580.12",
        nvmlDeviceGetName=ask("name"),
        nvmlDeviceGetMemoryInfo=ask("memory"),
        nvmlDeviceGetCudaComputeCapability=ask("capability"),
        nvmlDeviceGetUUID=ask("uuid"),
        nvmlDeviceGetEnforcedPowerLimit=ask("power"),
        nvmlDeviceGetPersistenceMode=ask("persistence"),
        nvmlDeviceGetEccMode=ask("ecc"),
        nvmlDeviceGetMigMode=ask("mig"),
    )
    return module


H200 = {
    "name": b"NVIDIA H200",
    "memory": SimpleNamespace(total=141 * GIB),
    "capability": (9, 0),
    "uuid": "GPU-1234",
    "power": 700000,
    "persistence": 1,
    "ecc": [1, 1],
}
BARE = {"name": "Graphics Device", "memory": SimpleNamespace(total=24 * GIB)}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", None)


def test_the_cpu_is_always_there(no_gpu: None) -> None:
    facts = list_devices()[0]
    assert facts.kind == "cpu"
    assert facts.name
    assert facts.memory_bytes > 2**28
    assert facts.processors is not None
    assert facts.processors >= 1


def test_a_machine_without_gpu_or_torch_says_why(no_gpu: None) -> None:
    found = find_devices()
    assert found.gpus == ()
    assert found.missing == "nvidia-ml-py is not installed; torch is not installed"


def test_nvml_tells_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(H200, BARE))
    first, second = find_devices().gpus
    assert (first.name, first.driver, first.compute_capability) == ("NVIDIA H200", "580.12", "9.0")
    assert first.peak_bytes_per_s == 4.8e12
    assert first.details["power_limit_w"] == 700
    assert first.details["ecc"] is True
    assert "mig" not in first.details
    assert "1234" not in str(first.details)
    assert second.peak_flops is None
    assert second.compute_capability is None


def test_a_driver_that_does_not_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(broken="Driver Not Loaded"))
    monkeypatch.setitem(sys.modules, "torch", None)
    missing = find_devices().missing
    assert missing is not None
    assert missing.startswith("NVML: Driver Not Loaded")


def test_torch_stands_in_for_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA L4",
        total_memory=22 * GIB,
        multi_processor_count=58,
        L2_cache_size=48 * 2**20,
        major=8,
        minor=9,
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    (facts,) = find_devices().gpus
    assert (facts.processors, facts.l2_bytes, facts.peak_bytes_per_s) == (58, 48 * 2**20, 3e11)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "cuda1"])
def test_a_device_that_cannot_be_meant_is_bad_usage(name: str) -> None:
    with pytest.raises(InputError, match="wanted cpu, cuda or cuda:INDEX"):
        device(name)


def test_asking_for_a_gpu_where_none_is_says_what_is_missing(no_gpu: None) -> None:
    with pytest.raises(DeviceError, match="torch is not installed") as caught:
        device("cuda")
    assert caught.value.exit_code == 3


def test_asking_for_one_gpu_too_many_lists_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(H200))
    assert device("cuda").name == device("cuda:0").name == "NVIDIA H200"
    with pytest.raises(DeviceError, match="found: cpu, cuda:0"):
        device("cuda:1")


@pytest.mark.parametrize("name", ["", " ", "NVIDIA Graphics Device", "Graphics Device"])
def test_names_that_name_nothing_need_a_label(name: str) -> None:
    """P32."""
    facts = DeviceFacts(kind="cuda", name=name, memory_bytes=141 * GIB)
    assert is_generic(name)
    with pytest.raises(InputError, match="--label"):
        labelled(facts, None)
    named = labelled(facts, "NVIDIA H200")
    assert named.name == "NVIDIA H200"
    assert named.details["reported_name"] == name
    assert named.peak_flops == 989.4e12, "a label that names a product brings its datasheet"


def test_a_label_replaces_any_name_but_is_not_empty() -> None:
    facts = DeviceFacts(kind="cuda", name="NVIDIA L4", memory_bytes=22 * GIB)
    assert labelled(facts, None) is facts
    assert labelled(facts, "left board").name == "left board"
    with pytest.raises(InputError, match="empty"):
        labelled(facts, "  ")


def test_the_cpu_has_no_datasheet_whatever_its_label() -> None:
    assert labelled(devices.cpu_facts(), "H200").peak_flops is None


@pytest.mark.parametrize(
    ("name", "gib", "tflops", "gb_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, 312, 2039),
        ("NVIDIA A100-SXM4-40GB", 39.4, 312, 1555),
        ("NVIDIA A100-PCIE-40GB", 39.4, 312, 1555),
        ("NVIDIA A100 80GB PCIe", 79.3, 312, 1935),
        ("NVIDIA H100 80GB HBM3", 79.6, 989.4, 3352),
        ("NVIDIA H100 PCIe", 79.6, 756.4, 2039),
        ("NVIDIA H100 NVL", 93.6, 835.5, 3938),
        ("NVIDIA H200", 140.4, 989.4, 4800),
        ("NVIDIA H200 NVL", 140.4, 835.5, 4800),
        ("NVIDIA B200", 178.4, 2250, 8000),
        ("NVIDIA GB200", 184.0, 2500, 8000),
        ("NVIDIA GH200 480GB", 95.6, 989.4, 4000),
        ("NVIDIA GH200 144G HBM3e", 140.0, 989.4, 4900),
        ("NVIDIA L40S", 44.5, 362.05, 864),
        ("NVIDIA L4", 22.5, 121, 300),
        ("NVIDIA A10", 22.5, 125, 600),
        ("NVIDIA A10G", 22.5, 70, 600),
        ("NVIDIA A30", 23.6, 165, 933),
        ("NVIDIA A40", 44.4, 149.7, 696),
        ("NVIDIA RTX A6000", 47.5, 154.8, 768),
        ("Tesla T4", 14.6, 65, 320),
        ("Tesla V100-SXM2-32GB", 31.7, 125, 900),
        ("Tesla V100-PCIE-16GB", 15.8, 112, 900),
        ("Tesla V100S-PCIE-32GB", 31.7, 130, 1134),
        ("NVIDIA GeForce RTX 3090", 23.7, 71, 936),
        ("NVIDIA GeForce RTX 4090", 23.5, 165.2, 1008),
        ("NVIDIA GeForce RTX 5090", 31.4, 209.5, 1792),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, 503.8, 1792),
    ],
)
def test_driver_names_find_their_datasheet(
    name: str, gib: float, tflops: float, gb_per_s: float
) -> None:
    found = peaks(name, int(gib * GIB))
    assert found is not None
    assert (found.flops, found.bytes_per_s) == (tflops * 1e12, gb_per_s * 1e9)
    assert found.source


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce GTX 1080", "AMD Instinct MI300X", "A1000"])
def test_other_names_find_none(name: str) -> None:
    assert peaks(name, 24 * GIB) is None
