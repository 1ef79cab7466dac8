"""What the makers promise: dense peak rates of GPUs, each with the datasheet it is from.

Used to guess how long a plan takes, and to refuse results faster than the hardware can be. All
FLOP rates are bf16 (fp16 where the chip has no bf16) on the tensor cores with fp32 accumulation,
dense: datasheets that print the rate with sparsity are halved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak rates of one product, and the document that states them."""

    flops: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Peaks, and how the driver's name of the product is recognised.

    ``memory_gib`` tells products of one name apart: it is the nominal size, and the driver never
    reports more.
    """

    pattern: str
    tflops: float
    gb_per_s: float
    source: str
    memory_gib: int | None = None


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (nvidia-a100-datasheet)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (rates with sparsity, halved)"
_GEFORCE_30 = "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A"
_GEFORCE_40 = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_GEFORCE_50 = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"

# The first pattern that is found in the name decides, so the special come before the general.
_PRODUCTS = (
    _Product(pattern=r"GH200.*144G", tflops=989.4, gb_per_s=4900, source=_H100 + ", GH200 HBM3e"),
    _Product(
        pattern=r"GH200", tflops=989.4, gb_per_s=4000, memory_gib=96, source=_H100 + ", GH200 HBM3"
    ),
    _Product(pattern=r"GH200", tflops=989.4, gb_per_s=4900, source=_H100 + ", GH200 HBM3e"),
    _Product(
        pattern=r"GB200",
        tflops=2500,
        gb_per_s=8000,
        source="NVIDIA GB200 NVL72 datasheet (per GPU, rates with sparsity, halved)",
    ),
    _Product(
        pattern=r"B200",
        tflops=2250,
        gb_per_s=8000,
        source="NVIDIA DGX B200 datasheet (an eighth, rates with sparsity, halved)",
    ),
    _Product(
        pattern=r"H200 NVL",
        tflops=835.5,
        gb_per_s=4800,
        source="NVIDIA H200 Tensor Core GPU datasheet (rates with sparsity, halved)",
    ),
    _Product(
        pattern=r"H200",
        tflops=989.4,
        gb_per_s=4800,
        source="NVIDIA H200 Tensor Core GPU datasheet (rates with sparsity, halved)",
    ),
    _Product(pattern=r"H100 NVL", tflops=835.5, gb_per_s=3938, source=_H100),
    _Product(pattern=r"H100 PCIe", tflops=756.4, gb_per_s=2039, source=_H100),
    _Product(pattern=r"H100", tflops=989.4, gb_per_s=3352, source=_H100),
    _Product(pattern=r"A100.*PCIE", tflops=312, gb_per_s=1555, memory_gib=40, source=_A100),
    _Product(pattern=r"A100.*PCIE", tflops=312, gb_per_s=1935, source=_A100),
    _Product(pattern=r"A100", tflops=312, gb_per_s=1555, memory_gib=40, source=_A100),
    _Product(pattern=r"A100", tflops=312, gb_per_s=2039, source=_A100),
    _Product(
        pattern=r"L40S",
        tflops=362.05,
        gb_per_s=864,
        source="NVIDIA L40S datasheet (rates without sparsity)",
    ),
    _Product(pattern=r"L40", tflops=181.05, gb_per_s=864, source="NVIDIA L40 datasheet"),
    _Product(
        pattern=r"L4",
        tflops=121,
        gb_per_s=300,
        source="NVIDIA L4 datasheet (rates with sparsity, halved)",
    ),
    _Product(pattern=r"A10G", tflops=70, gb_per_s=600, source="NVIDIA A10G datasheet"),
    _Product(pattern=r"A10", tflops=125, gb_per_s=600, source="NVIDIA A10 datasheet"),
    _Product(pattern=r"A30", tflops=165, gb_per_s=933, source="NVIDIA A30 datasheet"),
    _Product(
        pattern=r"RTX A6000",
        tflops=154.8,
        gb_per_s=768,
        source="NVIDIA RTX A6000 datasheet (rates with sparsity, halved)",
    ),
    _Product(pattern=r"A40", tflops=149.7, gb_per_s=696, source="NVIDIA A40 datasheet"),
    _Product(
        pattern=r"RTX 6000 Ada",
        tflops=364.2,
        gb_per_s=960,
        source="NVIDIA RTX 6000 Ada datasheet (fp8 rate with sparsity, a quarter)",
    ),
    _Product(
        pattern=r"RTX PRO 6000.*Max-Q",
        tflops=438.9,
        gb_per_s=1792,
        source="NVIDIA RTX PRO Blackwell GPU architecture whitepaper",
    ),
    _Product(
        pattern=r"RTX PRO 6000",
        tflops=503.8,
        gb_per_s=1792,
        source="NVIDIA RTX PRO Blackwell GPU architecture whitepaper",
    ),
    _Product(pattern=r"RTX 5090", tflops=209.5, gb_per_s=1792, source=_GEFORCE_50),
    _Product(pattern=r"RTX 4090", tflops=165.2, gb_per_s=1008, source=_GEFORCE_40),
    _Product(pattern=r"RTX 3090 Ti", tflops=80, gb_per_s=1008, source=_GEFORCE_30),
    _Product(pattern=r"RTX 3090", tflops=71, gb_per_s=936, source=_GEFORCE_30),
    _Product(pattern=r"V100S", tflops=130, gb_per_s=1134, source="NVIDIA V100S datasheet"),
    _Product(
        pattern=r"V100.*(?:SXM\d?|DGXS)", tflops=125, gb_per_s=900, source="NVIDIA V100 datasheet"
    ),
    _Product(pattern=r"V100", tflops=112, gb_per_s=900, source="NVIDIA V100 datasheet"),
    _Product(pattern=r"T4", tflops=65, gb_per_s=320, source="NVIDIA T4 datasheet"),
)


def peaks(name: str, memory_bytes: int) -> Peaks | None:
    """The datasheet's rates of the GPU that the driver calls ``name``; None if not listed."""
    for product in _PRODUCTS:
        if not re.search(rf"\b(?:{product.pattern})\b", name, re.IGNORECASE):
            continue
        if product.memory_gib is not None and memory_bytes > product.memory_gib * GIB:
            continue
        return Peaks(
            flops=product.tflops * 1e12,
            bytes_per_s=product.gb_per_s * 1e9,
            source=product.source,
        )
    return None
