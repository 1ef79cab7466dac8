"""One pass: embedding, a stack of layers, LM head, launched in an engine's order."""

from typing import NamedTuple

from torch import Tensor

from passtime.kernels.inputs import PassInputs
from passtime.kernels.operators import Operators
from passtime.kernels.weights import LayerPages, LayerWeights, MoeFfn, Weights
from passtime.profiles.shapes import ModelShape


class PassOutput(NamedTuple):
    """``logits`` [requests, vocabulary] of each request's last row, ``tokens`` [requests] int32."""

    logits: Tensor
    tokens: Tensor


def run_layer(
    x: Tensor,
    residual: Tensor | None,
    model: ModelShape,
    weights: LayerWeights,
    rotations: tuple[Tensor, ...],
    pages: LayerPages,
    inputs: PassInputs,
    operators: Operators,
) -> tuple[Tensor, Tensor]:
    """One decoder layer on ``x`` [rows, hidden]: its output, still to be added to the residual.

    The addition is left to the next norm, which has to read both anyway. ``residual`` is None in
    the first layer, where ``x`` itself becomes the residual.
    """
    normed = operators.norm(x, weights.attention_norm, residual)
    residual = x if residual is None else residual
    qkv = operators.linear(normed, weights.qkv)
    qkv = qkv.view(len(qkv), model.heads + 2 * model.kv_heads, model.head_dim)
    operators.rope_kv_write(qkv, rotations, pages, inputs, weights.qk_gains)
    attended = operators.attend(qkv[:, : model.heads], pages, inputs)
    x = operators.linear(attended.view(len(x), model.query_size), weights.output)
    normed = operators.norm(x, weights.ffn_norm, residual)
    if isinstance(weights.ffn, MoeFfn):
        return operators.experts(normed, weights.ffn), residual
    hidden = operators.silu_mul(operators.linear(normed, weights.ffn.gate_up))
    return operators.linear(hidden, weights.ffn.down), residual


def run_pass(
    model: ModelShape,
    weights: Weights,
    pages: tuple[LayerPages, ...],
    inputs: PassInputs,
    operators: Operators,
) -> PassOutput:
    """Run ``inputs`` through every layer of ``weights`` (as many as ``pages``) and both ends.

    Keys and values of the new tokens are in ``pages`` afterwards. No layer at all is allowed: that
    is how the ends are measured alone.
    """
    x, residual = operators.embed(inputs.token_ids, weights.embedding), None
    for layer, layer_pages in zip(weights.layers, pages, strict=True):
        x, residual = run_layer(
            x, residual, model, layer, weights.rotations, layer_pages, inputs, operators
        )
    x = operators.norm(x, weights.final_norm, residual)
    logits = operators.linear(x.index_select(0, inputs.logit_rows), weights.lm_head)
    return PassOutput(logits, operators.argmax(logits))
