"""What a file's place says: published tables are kept as HARDWARE/MODEL/…, in many spellings."""

from __future__ import annotations

import re
from pathlib import Path

from passtime.calibrate.datasheet import peaks
from passtime.errors import DocumentError
from passtime.profiles.device import DeviceFacts
from passtime.profiles.shapes import ModelShape, load_model, shipped_models

# Memory, SMs and L2 of the cards that published tables are from (makers' datasheets).
_CARDS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80, 108, 40),
    "h100": ("NVIDIA H100 80GB HBM3", 80, 132, 50),
    "h200": ("NVIDIA H200", 141, 132, 50),
    "b200": ("NVIDIA B200", 180, 148, 126),
    "l40s": ("NVIDIA L40S", 48, 142, 96),
    "a30": ("NVIDIA A30", 24, 56, 24),
    "a40": ("NVIDIA A40", 48, 84, 6),
    "a6000": ("NVIDIA RTX A6000", 48, 84, 6),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24, 82, 6),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24, 128, 72),
    "rtxpro6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188, 128),
}


def device_named(name: str) -> DeviceFacts | None:
    """The card that ``name`` (h100, H100_SXM, RTX 4090 …) spells, with its datasheet peaks."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    plain = re.sub(r"(sxm\d?|pcie|dgx|pairwise|nvlink)+$", "", plain)
    if plain not in _CARDS:
        return None
    full, memory_gib, processors, l2_mib = _CARDS[plain]
    rates = peaks(full, memory_gib * 2**30)
    return DeviceFacts(
        kind="cuda",
        name=full,
        memory_bytes=memory_gib * 2**30,
        peak_flops=None if rates is None else rates.flops,
        peak_bytes_per_s=None if rates is None else rates.bytes_per_s,
        processors=processors,
        l2_bytes=l2_mib * 2**20,
    )


def fastest_card() -> DeviceFacts:
    """A card with the best of every listed peak: what no table may exceed, whatever it is from."""
    cards = [card for name in _CARDS if (card := device_named(name)) is not None]
    return DeviceFacts(
        kind="cuda",
        name="fastest card known",
        memory_bytes=max(card.memory_bytes for card in cards),
        peak_flops=max(card.peak_flops or 0.0 for card in cards),
        peak_bytes_per_s=max(card.peak_bytes_per_s or 0.0 for card in cards),
        l2_bytes=max(card.l2_bytes or 0 for card in cards),
    )


def device_in(path: Path) -> DeviceFacts | None:
    """The card that a folder of ``path`` is named after, the nearest one first."""
    for part in reversed(path.resolve().parts[:-1]):
        if device := device_named(part):
            return device
    return None


def model_named(name: str) -> ModelShape | None:
    """The shipped shape that ``name`` spells (Llama-3.1-8B, meta-llama/Llama-3.1-8B-Instruct …)."""
    plain = name.lower().rpartition("/")[2]
    for known in sorted(shipped_models(), key=len, reverse=True):
        if plain == known or plain.startswith(f"{known}-"):
            return load_model(known)
    return None


def model_in(path: Path) -> ModelShape | None:
    """The shape that a folder of ``path`` is named after, divided as a folder ``tpN`` says."""
    ranks = 1
    for part in reversed(path.resolve().parts[:-1]):
        if found := re.fullmatch(r"tp(\d+)", part, re.IGNORECASE):
            ranks = int(found[1])
        elif model := model_named(part):
            return model.with_tensor_parallel(ranks) if ranks > 1 else model
    return None


def required_model(path: Path) -> ModelShape:
    """:func:`model_in`, or DocumentError."""
    model = model_in(path)
    if model is None:
        raise DocumentError(
            f"{path}: no folder above it names a known model; known: {', '.join(shipped_models())}"
        )
    return model
