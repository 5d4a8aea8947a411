"""Rows of published measurements, and the models they ran.

A table is a CSV file with the columns of `COLUMNS`; a row is one run. Shapes that a row leaves out come from the model
cards named here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaaccum.config import Config
from megaaccum.config.derive import derive
from megaaccum.config.schema import ModelConfig


class LeftOut(Exception):
    """A row that cannot be used, and why."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    values: dict[str, str]

    @property
    def name(self) -> str:
        return self.values["row_id"]

    @property
    def source(self) -> str:
        """The publication: the row's id without its number."""
        return self.values.get("source_set") or self.name.rsplit("-", 1)[0]

    def text(self, name: str) -> str:
        return (self.values.get(name) or "").strip()

    def number(self, name: str, default: float | None = None) -> float:
        """A column as a number; `default` where it is empty. LeftOut where there is no default."""
        text = self.text(name)
        if text:
            return float(text)
        if default is None:
            raise LeftOut(f"{name} not published")
        return default

    def whole(self, name: str, default: int | None = None) -> int:
        return round(self.number(name, default))


def read(path: Path) -> list[Row]:
    """The rows of a table. OSError where there is none."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(values) for values in csv.DictReader(file)]


_LLAMA: dict[str, Any] = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
_GPT: dict[str, Any] = dict(position_embedding_type="learned_absolute")
_NO_DROPOUT = dict(attention_dropout=0.0, hidden_dropout=0.0)


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int | None = None, vocab: int | None = None):
    return dict(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=vocab,
    )


_DEEPSEEK: dict[str, Any] = dict(
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    qk_layernorm=True,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq=[0] * 3 + [1] * 58,
)
_QWEN: dict[str, Any] = dict(kv_channels=128, qk_layernorm=True, num_experts=128, moe_router_topk=8)

MODELS: dict[str, dict[str, Any]] = {
    # NeMo 24.07's recipes of these names; vocabularies as published with the weights.
    "GPT3-5B": _GPT | _NO_DROPOUT | _shape(24, 4096, 16384, 32, vocab=50257),
    "GPT3-20B": _GPT | _NO_DROPOUT | _shape(44, 6144, 24576, 48, vocab=50257),
    "GPT3-175B": _GPT | _NO_DROPOUT | _shape(96, 12288, 49152, 96, vocab=50257),
    "LLAMA2-7B": _LLAMA | _shape(32, 4096, 11008, 32, vocab=32000),
    "LLAMA2-13B": _LLAMA | _shape(40, 5120, 13824, 40, vocab=32000),
    "LLAMA2-70B": _LLAMA | _shape(80, 8192, 28672, 64, 8, 32000),
    "Nemotron-8B": _LLAMA | dict(swiglu=False) | _shape(32, 4096, 16384, 32, vocab=256000),
    "Nemotron-22B": _LLAMA | dict(swiglu=False) | _shape(40, 6144, 24576, 48, vocab=256000),
    "Nemotron-340B": _LLAMA | dict(swiglu=False) | _shape(96, 18432, 73728, 96, 8, 256000),  # arXiv 2406.11704
    "DeepSeekV3": _LLAMA | _shape(61, 7168, 18432, 128, vocab=129280) | _DEEPSEEK,  # arXiv 2412.19437
    "DeepSeekV2": _LLAMA
    | _shape(60, 5120, 12288, 128, vocab=102400)
    | _DEEPSEEK
    | dict(num_experts=160, moe_router_topk=6, moe_ffn_hidden_size=1536, moe_shared_expert_intermediate_size=3072)
    | dict(moe_layer_freq=None),  # arXiv 2405.04434; the first layer is dense
    "Kimi-K2": _LLAMA
    | _shape(61, 7168, 18432, 64, vocab=163840)
    | _DEEPSEEK
    | dict(num_experts=384, moe_layer_freq=[0] + [1] * 60),  # arXiv 2507.20534
    "Moonlight": _LLAMA
    | _shape(27, 2048, 11264, 16, vocab=163840)
    | _DEEPSEEK
    | dict(q_lora_rank=None, num_experts=64, moe_router_topk=6, moe_ffn_hidden_size=1408)
    | dict(moe_shared_expert_intermediate_size=2816, moe_layer_freq=[0] + [1] * 26),  # arXiv 2502.16982
    "Qwen3_30B": _LLAMA | _shape(48, 2048, 6144, 32, 4, 151936) | _QWEN | dict(moe_ffn_hidden_size=768),
    "Qwen3_235B": _LLAMA | _shape(94, 4096, 12288, 64, 4, 151936) | _QWEN | dict(moe_ffn_hidden_size=1536),
    "GPT OSS 20B": _LLAMA
    | _shape(24, 2880, 2880, 64, 8, 201088)
    | dict(kv_channels=64, num_experts=32, moe_router_topk=4, moe_ffn_hidden_size=2880),
    "GPT OSS 120B": _LLAMA
    | _shape(36, 2880, 2880, 64, 8, 201088)
    | dict(kv_channels=64, num_experts=128, moe_router_topk=4, moe_ffn_hidden_size=2880),  # arXiv 2508.10925
}
"""By the beginning of a row's `model`; what the row itself says counts first."""

VOCABULARIES = {"zero_bubble": 50304, "vtrain": 51200, "bigscience": 250880}
"""Padded vocabularies of sources whose rows leave them out: GPT-2's, Megatron's, BLOOM's."""


def model_of(row: Row) -> tuple[ModelConfig, int]:
    """The model of a row, resolved, and its vocabulary. LeftOut where the publication does not tell its shape."""
    if row.text("left_out"):
        raise LeftOut(row.text("left_out"))
    keys = dict(next((shape for name, shape in MODELS.items() if row.text("model").startswith(name)), {}))
    if not keys:
        keys = dict(_LLAMA if "llama" in row.text("model").lower() else _GPT)
    if row.text("model").startswith("MPT"):
        keys |= _NO_DROPOUT | dict(add_bias_linear=False, position_embedding_type="none")
    for column, name in (
        ("hidden", "hidden_size"), ("ffn", "ffn_hidden_size"), ("heads", "num_attention_heads"),
        ("kv_heads", "num_query_groups"), ("vocab", "vocab_size"), ("layers", "num_layers"),
    ):  # fmt: skip
        if row.text(column) and not (name == "num_query_groups" and row.text(column) == row.text("heads")):
            keys[name] = row.whole(column)
    keys["seq_length"] = row.whole("seq_len")
    keys["vocab_size"] = keys.get("vocab_size") or _vocabulary(row)
    if "w/ MTP" in row.text("model"):
        keys["mtp_num_layers"] = 1
    if "num_experts" in keys and row.text("layers") and (freq := keys.get("moe_layer_freq", 0)) != 0:
        dense = freq.index(1) if freq else 1  # a model cut to some layers keeps its dense ones first
        keys["moe_layer_freq"] = [0] * dense + [1] * (keys["num_layers"] - dense)
    if "hidden_size" not in keys:
        raise LeftOut("shape not published")
    keys.setdefault("num_attention_heads", _heads(keys["hidden_size"]))
    if "num_layers" not in keys:
        keys["num_layers"] = _layers_from_parameters(row, keys)
    return _settled(keys, 1 if row.source == "vtrain-single" else 128), keys["vocab_size"]


def _vocabulary(row: Row) -> int:
    if row.source == "vtrain-single":  # cut without padding, as in VIA-Research/vTrain, src/model/gpt_modeling.py
        return 50257 // row.whole("tp") * row.whole("tp")
    for prefix, size in VOCABULARIES.items():
        if row.source.startswith(prefix):
            return size
    raise LeftOut("vocabulary not published")


def _heads(hidden: int) -> int:
    """A number of heads if none is published: the power of two that makes heads of 128 to 255 channels."""
    heads = 1
    while hidden / (2 * heads) >= 128 and hidden % (2 * heads) == 0:
        heads *= 2
    return heads


def _layers_from_parameters(row: Row, keys: dict[str, Any]) -> int:
    """Layers of a GPT whose number of parameters is given: 12 h^2 each beside the word table."""
    hidden = keys["hidden_size"]
    return round((row.number("params_b") * 1e9 - keys["vocab_size"] * hidden) / (12 * hidden**2))


def _settled(keys: dict[str, Any], rows: int) -> ModelConfig:
    config = Config()
    for name, value in keys.items():
        setattr(config.model, name, value)
    config.model.make_vocab_size_divisible_by = rows
    derive(config, [])
    return config.model


def precision(row: Row) -> str:
    """'fp4', 'fp8' or '16 bit'."""
    text = (row.text("precision") + " " + row.text("framework")).lower()
    if "fp4" in text:
        return "fp4"
    return "fp8" if re.search(r"(fp8|float8|mxfp8)", text) else "16 bit"


Reader = Callable[[Row], Any]
