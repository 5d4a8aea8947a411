"""The parameters of one transformer layer in closed form: shapes of its matrices, and counts of all its elements.

The shapes are those of megatron.core.models.gpt.GPTModel (megatron-core 0.19): a test builds it and counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megaaccum.config.schema import ModelConfig

Fused = tuple[tuple[int, int], ...]
"""The matrices of a parameter, as (rows, columns)."""


LayerMatrices = tuple[list[Fused], list[Fused], list[Fused]]
"""A layer's weights but norms and the router: those that tp cuts, those that every tp rank holds whole, and those of
routed experts, one expert's after the other's."""


class LayerElements(NamedTuple):
    """Elements of a layer's parameters: those that tp cuts, those that every tp rank holds whole, and those of routed
    experts, which ep and etp cut."""

    cut: int
    whole: int
    experts: int


def elements(params: Iterable[Fused]) -> int:
    """Elements of all matrices."""
    return sum(rows * columns for each in params for rows, columns in each)


def layer_matrices(model: ModelConfig, *, moe: bool) -> LayerMatrices:
    """The matrices of a layer with experts if `moe`, else of one with an MLP."""
    cut, whole = _attention(model)
    if not moe or model.num_experts is None:
        return [*cut, *_mlp(model, model.ffn_hidden_size or 0)], whole, []
    shared = model.moe_shared_expert_intermediate_size
    experts = _mlp(model, model.moe_ffn_hidden_size or model.ffn_hidden_size or 0) * model.num_experts
    return [*cut, *(_mlp(model, shared) if shared else ())], whole, experts


def _mlp(model: ModelConfig, width: int) -> list[Fused]:
    return [((width, model.hidden_size),) * (2 if model.swiglu else 1), ((model.hidden_size, width),)]


def _attention(model: ModelConfig) -> tuple[list[Fused], list[Fused]]:
    """(matrices that tp cuts, matrices that every tp rank holds whole: down-projections of latent attention)."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        queries, keys = heads * (model.kv_channels or 0), (model.num_query_groups or heads) * (model.kv_channels or 0)
        return [((queries, hidden), (keys, hidden), (keys, hidden)), ((hidden, queries),)], []
    latent, wide = model.q_lora_rank, heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    down: list[Fused] = [((model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden),)]
    down += [((latent, hidden),)] if latent else []
    up = [((heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank),), ((wide, latent or hidden),)]
    return [*up, ((hidden, heads * model.v_head_dim),)], down


def layer_elements(model: ModelConfig, *, moe: bool) -> LayerElements:
    """Elements of all parameters of a layer: matrices, biases, norms and the router."""
    hidden, num_experts = model.hidden_size, model.num_experts or 0
    cut, whole, experts = map(elements, layer_matrices(model, moe=moe))
    whole += 2 * norm_parameters(model, hidden)
    if model.multi_latent_attention:
        latents = model.kv_lora_rank + (model.q_lora_rank or 0)
        whole += norm_parameters(model, latents) * model.qk_layernorm
    else:
        channels = model.kv_channels or 0
        whole += 2 * norm_parameters(model, channels) * model.qk_layernorm
        qkv = (model.num_attention_heads + 2 * (model.num_query_groups or 0)) * channels
        cut += qkv * (model.add_bias_linear or model.add_qkv_bias)
    inner = 2 if model.swiglu else 1
    if moe:
        whole += (hidden + model.add_bias_linear) * num_experts + hidden * model.add_bias_linear
        experts += num_experts * (inner * (model.moe_ffn_hidden_size or 0) + hidden) * model.add_bias_linear
    else:
        cut += inner * (model.ffn_hidden_size or 0) * model.add_bias_linear
        whole += 2 * hidden * model.add_bias_linear
    return LayerElements(cut, whole, experts)


def prediction_elements(model: ModelConfig) -> LayerElements:
    """Elements of a multi-token-prediction layer: three norms, a 2h x h matrix that tp cuts, and a layer like the last
    one."""
    inner = layer_elements(model, moe=expert_layers(model)[-1])
    norms = 3 * norm_parameters(model, model.hidden_size)
    return inner._replace(cut=inner.cut + 2 * model.hidden_size**2, whole=inner.whole + norms)


def norm_parameters(model: ModelConfig, width: int) -> int:
    """Elements of a norm of `width` channels: LayerNorm has a bias too."""
    return width * (2 if model.normalization == "LayerNorm" else 1)


def expert_layers(model: ModelConfig) -> list[bool]:
    """For each layer whether it holds experts: every n-th from the first, or as moe_layer_freq lists."""
    if model.num_experts is None:
        return [False] * model.num_layers
    if isinstance(model.moe_layer_freq, int):
        return [layer % model.moe_layer_freq == 0 for layer in range(model.num_layers)]
    return [entry == 1 for entry in model.moe_layer_freq]
