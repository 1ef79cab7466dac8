"""The operators a pass is made of, twice: as they are timed, and in float64 as they are meant."""

from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from passtime.kernels import (
    argmax,
    decode_attention,
    fp8,
    gemm,
    grouped_gemm,
    prefill_attention,
    rmsnorm,
    rope,
    routing,
    silu_mul,
)
from passtime.kernels.inputs import PassInputs
from passtime.kernels.tiles import Tiles, tiles_for
from passtime.kernels.weights import LayerPages, LinearWeight, MoeFfn

EPS = 1e-5


class Operators(Protocol):
    """What :func:`passtime.kernels.layer.run_pass` calls; shapes as in the kernels' files.

    ``tiles`` and ``processors`` are what attention is planned for.
    """

    @property
    def tiles(self) -> Tiles:
        """The device's row of the tile table."""
        ...

    @property
    def processors(self) -> int:
        """Multiprocessors of the device."""
        ...

    @property
    def names(self) -> dict[str, str]:
        """What runs for each operator: part of a profile's provenance."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[rows] → [rows, hidden]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """RMSNorm; with ``residual``, of the sum, which ``residual`` then holds."""
        ...

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[rows, K] → [rows, N]."""
        ...

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotations: tuple[Tensor, ...],
        pages: LayerPages,
        inputs: PassInputs,
        qk_gains: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Rotate q in place, write k and v to their pages."""
        ...

    def attend(self, q: Tensor, pages: LayerPages, inputs: PassInputs) -> Tensor:
        """[rows, heads, head dim] → the same, contiguous; chunks and decodes in two launches."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 · size] → [rows, size]."""
        ...

    def experts(self, x: Tensor, weights: MoeFfn) -> Tensor:
        """[rows, hidden] → [rows, hidden] through each row's experts."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[requests, vocabulary] → [requests] int32."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimedOperators:
    """Triton kernels, and cuBLAS (``torch.mm``) for dense linear layers as serving engines do.

    ``processors`` are the device's multiprocessors; ``dense="triton"`` takes the GEMM of this
    package in place of cuBLAS.
    """

    tiles: Tiles
    processors: int
    dense: Literal["torch.mm", "triton"] = "torch.mm"

    @classmethod
    def on(
        cls, device: torch.device | str, *, dense: Literal["torch.mm", "triton"] = "torch.mm"
    ) -> Self:
        """For ``device``: its row of the tile table, or the interpreter's on a CPU."""
        if torch.device(device).type != "cuda":
            return cls(tiles=tiles_for(None), processors=1, dense=dense)
        properties = torch.cuda.get_device_properties(device)
        return cls(
            tiles=tiles_for(10 * properties.major + properties.minor),
            processors=properties.multi_processor_count,
            dense=dense,
        )

    @property
    def names(self) -> dict[str, str]:
        """As launched."""
        return {
            "linear": "torch.mm (cuBLAS)" if self.dense == "torch.mm" else "triton gemm",
            "linear_fp8": "triton gemm, scaled",
            "prefill_attention": "triton paged varlen",
            "decode_attention": "triton split-KV",
            "experts": "triton grouped gemm",
            "elementwise": "triton",
            "embedding": "torch.embedding",
        }

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``torch.embedding``."""
        return torch.nn.functional.embedding(token_ids, table)

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """The Triton kernel."""
        return rmsnorm.rmsnorm(x, weight, eps=EPS, residual=residual)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """cuBLAS, or the Triton GEMM where it was chosen or the weight is fp8."""
        if isinstance(weight, fp8.Fp8Weight):
            return fp8.fp8_linear(x, weight, tile=self.tiles.gemm_for(len(x), fp8=True))
        if self.dense == "torch.mm":
            return torch.mm(x, weight.t())
        return gemm.gemm(x, weight, tile=self.tiles.gemm_for(len(x)))

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotations: tuple[Tensor, ...],
        pages: LayerPages,
        inputs: PassInputs,
        qk_gains: tuple[Tensor, Tensor] | None,
    ) -> None:
        """The Triton kernel."""
        cos, sin = rotations
        rope.rope_kv_write(
            qkv,
            cos,
            sin,
            inputs.positions,
            inputs.slots,
            pages.k,
            pages.v,
            qk_gains=qk_gains,
            eps=EPS,
        )

    def attend(self, q: Tensor, pages: LayerPages, inputs: PassInputs) -> Tensor:
        """One launch for the chunks, one (and its reduction) for the decodes."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        chunks, decodes, padding = inputs.layout.parts
        if inputs.prefill is not None:
            prefill_attention.prefill_attention(
                q[chunks], pages.k, pages.v, out[chunks], inputs.prefill
            )
        if inputs.decode is not None:
            decode_attention.decode_attention(
                q[decodes], pages.k, pages.v, out[decodes], inputs.decode
            )
        if inputs.layout.padding:
            out[padding].zero_()
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """The Triton kernel."""
        return silu_mul.silu_mul(gate_up)

    def experts(self, x: Tensor, weights: MoeFfn) -> Tensor:
        """Route, sort by expert, two grouped products around SiLU, weighted sum."""
        experts, chosen = len(weights.router), weights.experts_per_token
        routed = len(x) * chosen
        choice, share = routing.top_experts(self.linear(x, weights.router), chosen)
        tile = self.tiles.gemm_for(-(-routed // experts))
        groups = routing.group_by_expert(choice, experts, tile=tile.m)
        hidden = grouped_gemm.grouped_gemm(x, weights.gate_up, groups, routed=routed, tile=tile)
        hidden = self.silu_mul(hidden)
        hidden = grouped_gemm.grouped_gemm(hidden, weights.down, groups, routed=routed, tile=tile)
        return grouped_gemm.combine(hidden, share)

    def argmax(self, logits: Tensor) -> Tensor:
        """The Triton kernel."""
        return argmax.argmax(logits)


class ReferenceOperators:
    """Every operator in float64 by plain torch, on any device: what the others are held to."""

    tiles = tiles_for(None)
    processors = 1

    @property
    def names(self) -> dict[str, str]:
        """Nothing of it is worth timing."""
        return {"all": "float64 reference"}

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of the table."""
        return table[token_ids.long()].double()

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """Float64 RMSNorm."""
        return rmsnorm.reference(x, weight, eps=EPS, residual=residual)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """Float64 product; an fp8 weight is dequantised, the activations are not quantised."""
        if isinstance(weight, fp8.Fp8Weight):
            return x @ (weight.values.double() * weight.scales.double()[:, None]).T
        return gemm.reference(x, weight)

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotations: tuple[Tensor, ...],
        pages: LayerPages,
        inputs: PassInputs,
        qk_gains: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Float64 rotation."""
        cos, sin = rotations
        rope.reference(
            qkv,
            cos,
            sin,
            inputs.positions,
            inputs.slots,
            pages.k,
            pages.v,
            qk_gains=qk_gains,
            eps=EPS,
        )

    def attend(self, q: Tensor, pages: LayerPages, inputs: PassInputs) -> Tensor:
        """Float64 attention, chunks and decodes."""
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        chunks, decodes, _ = inputs.layout.parts
        if inputs.prefill is not None:
            out[chunks] = prefill_attention.reference(q[chunks], pages.k, pages.v, inputs.prefill)
        if inputs.decode is not None:
            out[decodes] = decode_attention.reference(q[decodes], pages.k, pages.v, inputs.decode)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Float64 gated activation."""
        return silu_mul.reference(gate_up)

    def experts(self, x: Tensor, weights: MoeFfn) -> Tensor:
        """Every routed row with its own expert, one by one."""
        logits = self.linear(x, weights.router)
        choice, share = routing.reference_top_experts(logits, weights.experts_per_token)
        hidden = self.silu_mul(grouped_gemm.reference(x, weights.gate_up, choice))
        hidden = grouped_gemm.reference(hidden, weights.down, choice)
        return grouped_gemm.reference_combine(hidden, share)

    def argmax(self, logits: Tensor) -> Tensor:
        """First column of the largest logit."""
        return argmax.reference(logits)
