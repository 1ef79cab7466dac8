"""Model shapes: the sizes that decide what a pass computes, moves and keeps."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from passtime.errors import DocumentError

Size: TypeAlias = Annotated[int, Meta(gt=0)]
DType: TypeAlias = Literal["float32", "bfloat16", "float16", "float8_e4m3"]

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


class MoeShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mixture of experts in place of the dense FFN."""

    experts: Size
    experts_per_token: Size
    expert_ffn_size: Size


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder-only transformer with grouped-query attention and a gated FFN.

    Sizes are those of one tensor-parallel rank's share where ``tensor_parallel`` > 1 divides them
    (heads, kv_heads, ffn_size, vocab_size); hidden_size is never divided.
    """

    name: str
    layers: Size
    hidden_size: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn_size: Size
    vocab_size: Size
    dtype: DType = "bfloat16"
    linear_dtype: DType | None = None
    kv_dtype: DType | None = None
    tensor_parallel: Size = 1
    tied_embeddings: bool = False
    qk_norm: bool = False
    moe: MoeShape | None = None

    def __post_init__(self) -> None:
        """Query heads must divide among the KV heads."""
        if self.heads % self.kv_heads:
            raise DocumentError(
                f"model {self.name}: heads {self.heads} is no multiple of kv_heads {self.kv_heads}"
            )

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of all KV heads."""
        return self.kv_heads * self.head_dim

    @property
    def weight_bytes_per_element(self) -> int:
        """Bytes of one weight of a linear layer."""
        return BYTES[self.linear_dtype or self.dtype]

    @property
    def ffn_parameters_per_layer(self) -> int:
        """Gate, up and down weights of one layer, all experts included."""
        if self.moe is None:
            return 3 * self.hidden_size * self.ffn_size
        routed = self.moe.experts * 3 * self.hidden_size * self.moe.expert_ffn_size
        return routed + self.hidden_size * self.moe.experts

    @property
    def active_ffn_parameters_per_layer(self) -> int:
        """Gate, up and down weights that one token uses in one layer."""
        if self.moe is None:
            return 3 * self.hidden_size * self.ffn_size
        routed = self.moe.experts_per_token * 3 * self.hidden_size * self.moe.expert_ffn_size
        return routed + self.hidden_size * self.moe.experts

    @property
    def attention_parameters_per_layer(self) -> int:
        """Q, K, V and output projections of one layer."""
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size)

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers and of the LM head: what a pass multiplies by."""
        per_layer = self.attention_parameters_per_layer + self.ffn_parameters_per_layer
        return self.layers * per_layer + self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights kept on the device, embedding included."""
        per_layer = self.attention_parameters_per_layer + self.ffn_parameters_per_layer
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        linear = self.layers * per_layer * self.weight_bytes_per_element
        return linear + embeddings * BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps."""
        return 2 * self.layers * self.kv_size * BYTES[self.kv_dtype or self.dtype]

    def with_tensor_parallel(self, ranks: int) -> ModelShape:
        """The shape of one of ``ranks`` ranks. Raises DocumentError if it does not divide."""
        fields = ("heads", "kv_heads", "ffn_size", "vocab_size")
        for name in fields:
            if getattr(self, name) % ranks:
                raise DocumentError(
                    f"model {self.name}: {name} {getattr(self, name)} is no multiple of "
                    f"tensor_parallel {ranks}"
                )
        divided = {name: getattr(self, name) // ranks for name in fields}
        return msgspec.structs.replace(self, tensor_parallel=ranks, **divided)


def shipped_models() -> list[str]:
    """Names that :func:`load_model` knows without a file."""
    folder = files("passtime.profiles") / "models"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_model(name_or_path: str) -> ModelShape:
    """A shipped shape by name, or a shape file, or a Hugging Face ``config.json``."""
    if name_or_path in shipped_models():
        text = (files("passtime.profiles") / "models" / f"{name_or_path}.json").read_bytes()
        return _decode(json.loads(text), name_or_path)
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        raise DocumentError(
            f"model {name_or_path!r}: no shipped shape of that name and no such file; "
            f"shipped: {', '.join(shipped_models())}"
        )
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DocumentError(f"{path}: not JSON: {error}") from None
    if isinstance(document, dict) and not {"num_hidden_layers", "architectures"}.isdisjoint(
        document
    ):
        document = from_hugging_face(document, name=path.parent.name or path.stem, source=str(path))
    return _decode(document, str(path))


def from_hugging_face(config: dict[str, Any], *, name: str, source: str) -> dict[str, Any]:
    """The shape document of a Hugging Face ``config.json`` (Llama, Mistral, Qwen3, Qwen3-MoE).

    DocumentError for a key that is missing, no number, or of an attention that keeps other KV.
    """
    if config.get("kv_lora_rank"):
        raise DocumentError(f"{source}: kv_lora_rank: latent attention (MLA) has no shape here")
    try:
        heads = config["num_attention_heads"]
        shape: dict[str, Any] = {
            "name": config.get("_name_or_path") or name,
            "layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "ffn_size": config["intermediate_size"],
            "vocab_size": config["vocab_size"],
            "dtype": config.get("torch_dtype") or config.get("dtype") or "bfloat16",
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qk_norm": str(config.get("model_type", "")).startswith("qwen3"),
        }
        experts = config.get("num_experts") or config.get("num_local_experts")
        if experts:
            shape["moe"] = {
                "experts": experts,
                "experts_per_token": config["num_experts_per_tok"],
                "expert_ffn_size": config.get("moe_intermediate_size")
                or config["intermediate_size"],
            }
    except KeyError as error:
        raise DocumentError(f"{source}: {error.args[0]} is missing from the model config") from None
    except (TypeError, ZeroDivisionError):
        raise DocumentError(
            f"{source}: hidden_size and num_attention_heads: wanted integers > 0, found "
            f"{config['hidden_size']!r} and {heads!r}"
        ) from None
    return shape


def _decode(document: object, source: str) -> ModelShape:
    try:
        return msgspec.convert(document, ModelShape)
    except msgspec.ValidationError as error:
        raise DocumentError(f"{source}: {error}") from None
