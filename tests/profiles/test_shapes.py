"""Model shapes out of Hugging Face configurations, and what cannot be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from passtime.errors import DocumentError
from passtime.profiles.shapes import ModelShape, MoeShape, load_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
ABSENT = object()


def load(folder: Path, **changes: Any) -> ModelShape:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ABSENT}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


@pytest.mark.parametrize("architectures", [ABSENT, ["LlamaForCausalLM"]])
def test_a_hugging_face_config_is_a_shape(tmp_path: Path, architectures: Any) -> None:
    shape = load(tmp_path, architectures=architectures)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 32)
    assert shape.moe is None


def test_experts_are_read(tmp_path: Path) -> None:
    shape = load(tmp_path, num_local_experts=8, num_experts_per_tok=2)
    assert shape.moe == MoeShape(experts=8, experts_per_token=2, expert_ffn_size=256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": ABSENT}, "vocab_size is missing"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_attention_heads": 0}, "wanted integers > 0, found 128 and 0"),
        ({"hidden_size": "a"}, "wanted integers > 0, found 'a' and 4"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_what_is_no_shape_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message) as refused:
        load(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(refused.value)
