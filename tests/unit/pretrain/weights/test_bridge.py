"""An export by Megatron-Bridge's mapping, with a small stand-in for its public interface: `get_model_bridge`, a
registry's `megatron_to_hf_lookup`, a mapping's `megatron_to_hf` and `is_grouped_export` (NVIDIA-NeMo/Megatron-Bridge
067f987d)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.pretrain.weights import config_json
from megaaccum.pretrain.weights.bridge import Bridge
from megaaccum.pretrain.weights.rows import rows_of
from megaaccum.pretrain.weights.weights_out import to_theirs
from tests.support import huggingface as hf

Split = Callable[[torch.Tensor, Any], Any]


class Mapping:
    """One name of Megatron's, and what becomes of it."""

    def __init__(self, names: list[str], split: Split):
        self.names, self.split = names, split

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.split(weights, module.config), strict=True))


class Grouped(Mapping):
    is_grouped_export = True


def same(weights: torch.Tensor, config: Any) -> list[torch.Tensor]:
    return [weights]


def halves(weights: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    return weights.chunk(2)


def by_group(weights: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """Queries, keys and values of rows that lie group by group."""
    per = config.num_attention_heads // config.num_query_groups
    heads = weights.view(config.num_query_groups, per + 2, config.kv_channels, *weights.shape[1:])
    return [each.reshape(-1, *weights.shape[1:]) for each in heads.split([per, 1, 1], dim=1)]


LAYER, THEIRS = r"decoder\.layers\.(\d+)\.", "model.layers.{}."
TABLE: dict[str, tuple[list[str], Split]] = {
    r"embedding\.word_embeddings\.weight": (["model.embed_tokens.weight"], same),
    r"decoder\.final_layernorm\.weight": (["model.norm.weight"], same),
    # The norm before a matrix as Transformer Engine has it, and experts by a number at the end of the name.
    LAYER + r"self_attention\.linear_qkv\.layer_norm_weight": ([THEIRS + "input_layernorm.weight"], same),
    LAYER + r"self_attention\.linear_qkv\.weight": ([THEIRS + f"self_attn.{k}_proj.weight" for k in "qkv"], by_group),
    LAYER + r"self_attention\.([qk])_layernorm\.weight": ([THEIRS + "self_attn.{}_norm.weight"], same),
    LAYER + r"mlp\.linear_fc1\.weight": ([THEIRS + f"mlp.{kind}_proj.weight" for kind in ("gate", "up")], halves),
    LAYER + r"mlp\.router\.weight": ([THEIRS + "mlp.gate.weight"], same),
    LAYER + r"mlp\.experts\.linear_fc1\.weight(\d+)": (
        [THEIRS + f"mlp.experts.{{}}.{kind}_proj.weight" for kind in ("gate", "up")], halves,
    ),
    LAYER + r"mlp\.experts\.linear_fc2\.weight(\d+)": ([THEIRS + "mlp.experts.{}.down_proj.weight"], same),
}  # fmt: skip


class Registry:
    def megatron_to_hf_lookup(self, name: str) -> Mapping | None:
        for pattern, (names, split) in TABLE.items():
            if match := re.fullmatch(pattern, name):
                return Mapping([each.format(*match.groups()) for each in names], split)
        return Grouped([], same) if "stacked" in name else None


def get_model_bridge(architecture: Any, hf_config: object = None) -> SimpleNamespace:
    if getattr(architecture, "__name__", architecture) != "Qwen3MoeForCausalLM":
        raise NotImplementedError(architecture)
    return SimpleNamespace(mapping_registry=Registry)


@pytest.fixture
def installed(monkeypatch):
    """Bridge's modules, as far as they are asked for."""
    path = "megatron.bridge.models.conversion.model_bridge".split(".")
    for count in range(2, len(path) + 1):
        name = ".".join(path[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[".".join(path)])["get_model_bridge"] = get_model_bridge


@pytest.fixture
def folder(tmp_path) -> Path:
    return written(tmp_path / "model", "qwen3_moe")


def written(folder: Path, family: str) -> Path:
    import transformers

    kind, arguments = hf.MODELS[family]
    folder.mkdir()
    content = json.loads(getattr(transformers, f"{kind}Config")(**arguments).to_json_string())
    (folder / "config.json").write_text(json.dumps(content | {"architectures": [f"{kind}ForCausalLM"]}))
    return folder


def bridge_of(folder: Path | None, model: Path) -> Bridge:
    config = hf.plan_of(model, 1).config
    return Bridge(folder, config_json.model_keys(config, hf.VOCAB - 3))


SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (hf.VOCAB, 32),
    "decoder.final_layernorm.weight": (32,),
    "decoder.layers.0.input_layernorm.weight": (32,),
    "decoder.layers.2.self_attention.linear_qkv.weight": (8 * 16, 32),
    "decoder.layers.2.self_attention.q_layernorm.weight": (16,),
    "decoder.layers.1.mlp.linear_fc1.weight": (96, 32),
    "decoder.layers.2.mlp.router.weight": (4, 32),
    "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight": (32, 32),
    "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight": (32, 16),
}


def test_every_parameter_is_what_our_own_table_makes(folder, installed):
    bridge, config = bridge_of(folder, folder), hf.plan_of(folder, 1).config
    for name, shape in SHAPES.items():
        whole = torch.randn(shape)
        rows = rows_of("qwen3_moe", name, shape[0], config_json.model_keys(config, hf.VOCAB - 3))
        assert rows is not None
        expected, found = dict(to_theirs(rows, whole)), dict(bridge.to_theirs(name, whole))
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[each], expected[each]) for each in found), name
        without = {each: part.shape for each, part in bridge.to_theirs(name, whole.to("meta"))}
        assert without == {each: part.shape for each, part in found.items()}, name


def test_what_it_does_not_map_is_named(folder, installed):
    bridge = bridge_of(folder, folder)
    with pytest.raises(CheckpointError, match=r"no decoder\.x"):
        list(bridge.to_theirs("decoder.x", torch.ones(2)))
    with pytest.raises(CheckpointError, match="stacks the experts"):
        list(bridge.to_theirs("stacked", torch.ones(2)))


def test_a_model_that_it_does_not_know_is_named(folder, installed):
    with pytest.raises(ConfigError, match="does not know LlamaForCausalLM"):
        bridge_of(written(folder.parent / "other", "llama"), folder)
    with pytest.raises(ConfigError, match="--like DIR"):
        bridge_of(None, folder)


def test_without_it_the_message_says_what_to_install(folder):
    with pytest.raises(ConfigError, match="--via bridge needs Megatron-Bridge"):
        bridge_of(folder, folder)
