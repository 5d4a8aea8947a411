"""Names of tensors in the whole model, the same under every layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_IN_LOCAL_LAYERS = {
    r"self_attention\.linear_qkv\.layer_norm_": "input_layernorm.",
    r"self_attention\.linear_q_up_proj\.layer_norm_": "self_attention.q_layernorm.",
    r"self_attention\.linear_kv_up_proj\.layer_norm_": "self_attention.kv_layernorm.",
    r"mlp\.linear_fc1\.layer_norm_": "pre_mlp_layernorm.",
    r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$": r"experts.local_experts.\3.\1.\2",
}
"""Parameters that Transformer Engine's layers fuse, a norm with the matrix after it and the experts of a rank, by the
names that the parts have in Megatron's local layers."""


def as_in_local_layers(name: str) -> str:
    """A parameter's name in a chunk of Transformer Engine's layers, as a chunk of Megatron's local ones has it."""
    for fused, parts in _IN_LOCAL_LAYERS.items():
        name = re.sub(fused, parts, name)
    return name


def over_stages(chunk: torch.nn.Module, local_name: str) -> str:
    """A name in a chunk with its layer numbered over all stages, by the layer's `layer_number` (from 1), and nothing
    else changed. A chunk of a user's own whose layers have none may bring a `name_in_model` ("stages.3.") to begin
    with."""
    match = re.match(r"(|.*\.)layers\.(\d+)\.(.*)", local_name)
    layer = chunk.get_submodule(f"{match[1]}layers.{match[2]}") if match else None
    if match is None or not hasattr(layer, "layer_number"):
        return getattr(chunk, "name_in_model", "") + local_name
    return f"{match[1]}layers.{layer.layer_number - 1}.{match[3]}"  # type: ignore[union-attr, operator]
