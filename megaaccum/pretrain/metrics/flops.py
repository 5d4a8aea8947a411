"""Floating-point operations of a step on paper, and the peak of a device per second.

Model FLOPs are those of the mathematics alone: recomputed activations do not count, so the utilisation that follows is
MFU and not HFU (PaLM, arXiv 2204.02311, appendix B). Every matrix multiplication of an m x n by an n x k matrix counts
2mnk in the forward pass and twice that in the backward pass (Megatron-LM, arXiv 2104.04473, appendix).
"""

from __future__ import annotations

import re
from typing import Protocol

from megaaccum.config.schema import Config, ModelConfig
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.texts import packaged_yaml

FLOPS_PER_MAC = 2
"""A multiplication and an addition."""

PASSES = 3
"""Forward, gradient of the input, gradient of the weight."""

PEAKS: list[tuple[frozenset[str], float]] = [
    (frozenset(each["words"].split()), each["tflops"] * 1e12)
    for each in packaged_yaml("megaaccum.pretrain.metrics", "peaks.yaml")
]
"""Words that a device's name must hold, and its peak. The first match counts."""


class Batch(Protocol):
    """Fields of a BatchPlan that are used here."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def seq_length(self) -> int: ...


def step_flops(config: Config, batch: Batch, *, vocab_size: int) -> float:
    """Model FLOPs of one optimizer step over all ranks: forward and backward of `global_batch_size` sequences.

    `config` is a resolved one, `vocab_size` the tokens of the vocabulary before padding. The attention mask is causal,
    so half of the score matrix counts; an MoE layer counts the experts that a token visits (`moe_router_topk`) and the
    shared ones. Masked tokens count like any other: they are computed. Equal to `num_floating_point_operations` of
    megatron.training 0.19; without GQA, SwiGLU and MoE it is 72 B s l h^2 (1 + s / 12h + V / 12lh), which is formula
    (3) of arXiv 2104.04473 less the recomputed forward pass and the masked half of the scores.
    """
    model = config.model
    assert model.kv_channels is not None and model.num_query_groups is not None, "the config is not resolved"
    projections, scores_per_key = attention_weights(model), _score_macs(model)
    if model.multi_latent_attention:  # Megatron counts a multiply-add for each element of a normed latent
        projections += model.kv_lora_rank + (model.q_lora_rank or 0)
    num_extra = model.mtp_num_layers or 0
    num_layers = model.num_layers + num_extra
    per_token = (
        projections * num_layers
        + _mlp_macs(model)
        + _mtp_projection_macs(model) * num_extra
        + model.hidden_size * padded_vocab_size(config, vocab_size) * (1 + num_extra)
    )
    tokens = batch.global_batch_size * batch.seq_length
    scores = scores_per_key * num_layers * tokens * batch.seq_length / 2
    return float(PASSES * FLOPS_PER_MAC * (per_token * tokens + scores))


def peak_flops(device_name: str | None, dtype: str) -> float | None:
    """Peak FLOP/s of a device on dense matrices, or None if no datasheet figure is known.

    `device_name` is what `torch.cuda.get_device_name()` says, None for a CPU. `dtype` is "bf16" or "fp16", which are
    equally fast on every device listed. FP32 has no figure, as it depends on whether TF32 is allowed; nor has a MIG
    slice, whose name tells the whole GPU's.
    """
    if device_name is None or dtype not in ("bf16", "fp16"):
        return None
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if "mig" in words:
        return None
    return next((peak for needed, peak in PEAKS if needed <= words), None)


def attention_weights(model: ModelConfig) -> int:
    """Elements of one layer's attention matrices, over all ranks; as many multiply-adds per token."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        channels = model.kv_channels or 0
        return 2 * hidden * channels * (heads + (model.num_query_groups or 0))
    query_width = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    queries = hidden * query_width if model.q_lora_rank is None else model.q_lora_rank * (hidden + query_width)
    key_values = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim))
    return queries + key_values + hidden * model.qk_pos_emb_head_dim + heads * model.v_head_dim * hidden


def _score_macs(model: ModelConfig) -> int:
    """Multiply-adds of one layer's attention scores and of the values that they weigh, per token and key."""
    if model.multi_latent_attention:
        return model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim)
    return 2 * model.num_attention_heads * (model.kv_channels or 0)


def _mlp_macs(model: ModelConfig) -> int:
    """Multiply-adds per token of the MLPs of all layers, those of multi-token prediction included."""
    assert model.ffn_hidden_size is not None, "the config is not resolved"
    num_matrices = 3 if model.swiglu else 2
    layers = expert_layers(model)
    layers += layers[-1:] * (model.mtp_num_layers or 0)  # built like the last one
    dense = model.ffn_hidden_size
    visited = (model.moe_ffn_hidden_size or model.ffn_hidden_size) * model.moe_router_topk
    sparse = visited + (model.moe_shared_expert_intermediate_size or 0)
    return num_matrices * model.hidden_size * sum(sparse if moe else dense for moe in layers)


def expert_layers(model: ModelConfig) -> list[bool]:
    """For each layer whether it holds experts: every n-th from the first, or as moe_layer_freq lists."""
    if model.num_experts is None:
        return [False] * model.num_layers
    if isinstance(model.moe_layer_freq, int):
        return [layer % model.moe_layer_freq == 0 for layer in range(model.num_layers)]
    return [entry == 1 for entry in model.moe_layer_freq]


def _mtp_projection_macs(model: ModelConfig) -> int:
    """Multiply-adds per token of the projection that joins two embeddings before a multi-token-prediction layer, with
    its norms."""
    return 2 * model.hidden_size * model.hidden_size + 3 * model.hidden_size
