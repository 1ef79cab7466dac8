"""From a GPU as NVML lists it to the same GPU as torch knows it."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from passtime.errors import DeviceError
from passtime.profiles.device import DeviceFacts

if TYPE_CHECKING:
    import torch


def find_device(facts: DeviceFacts) -> tuple[torch.device, str | None]:
    """Torch's device for ``facts``, and its UUID as NVML writes it. DeviceError if there is none.

    NVML and torch may number GPUs differently, so they are matched by UUID where it is known.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # read when CUDA initialises
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"torch {torch.__version__} finds no CUDA device")
    wanted = facts.details.get("uuid_hash")
    reported = facts.details.get("reported_name", facts.name)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None
        if wanted is not None and uuid is not None:
            found = hashlib.sha256(uuid.encode()).hexdigest()[:16] == wanted
        else:
            found = properties.name == reported
        if found:
            return torch.device("cuda", index), uuid
    raise DeviceError(f"torch does not see the GPU {facts.name}; is it hidden from CUDA?")
