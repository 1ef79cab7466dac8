"""The inputs of one pass on the device: token ids, positions, slots and the attention plans."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from passtime.kernels.decode_attention import DecodePlan, plan_decode
from passtime.kernels.layout import PassLayout
from passtime.kernels.prefill_attention import PrefillPlan, plan_prefill
from passtime.kernels.tiles import Tiles
from passtime.profiles.shapes import ModelShape


@dataclass(frozen=True)
class PassInputs:
    """A :class:`PassLayout` on the device; a plan is None where the pass has no such part."""

    layout: PassLayout
    token_ids: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int32."""
    slots: Tensor
    """[rows] int64."""
    logit_rows: Tensor
    """[requests] int64."""
    prefill: PrefillPlan | None
    decode: DecodePlan | None


def pass_inputs(
    layout: PassLayout,
    token_ids: npt.NDArray[np.int64],
    *,
    model: ModelShape,
    tiles: Tiles,
    processors: int,
    device: torch.device | str,
) -> PassInputs:
    """Put ``layout`` and ``token_ids`` [rows] on ``device`` and plan the attention for it."""
    chunks = len(layout.chunks)
    prefill = decode = None
    if layout.chunks:
        prefill = plan_prefill(
            layout.chunks,
            layout.block_tables[:chunks],
            group=model.heads // model.kv_heads,
            kv_heads=model.kv_heads,
            tiles=tiles.prefill,
            processors=processors,
            device=device,
        )
    if layout.decode_lengths:
        decode = plan_decode(
            layout.decode_lengths,
            layout.block_tables[chunks:],
            kv_heads=model.kv_heads,
            tile=tiles.decode,
            processors=processors,
            device=device,
        )
    return PassInputs(
        layout=layout,
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(layout.positions, device=device),
        slots=torch.tensor(layout.slots, device=device),
        logit_rows=torch.tensor(layout.logit_rows, device=device),
        prefill=prefill,
        decode=decode,
    )
