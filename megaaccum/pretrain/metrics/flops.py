"""Floating-point operations of a step on paper, and the peak of a device per second.

Model FLOPs are those of the mathematics alone: recomputed activations do not count, so the utilisation that follows is
MFU and not HFU (PaLM, arXiv 2204.02311, appendix B). Every matrix multiplication of an m x n by an n x k matrix counts
2mnk in the forward pass and twice that in the backward pass (Megatron-LM, arXiv 2104.04473, appendix).
"""

from __future__ import annotations

import re

from megaaccum.config.schema import Config, ModelConfig
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.pretrain.metrics.layer_shapes import elements, expert_layers, layer_matrices
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

_UNCOUNTED = ("attention_output_gate", "experimental_attention_variant", "hybrid_layer_pattern", "moe_latent_size")
"""Fields of Megatron's model configuration that give layers other matrices than layer_shapes.py has."""


def uncounted(config: Config) -> list[str]:
    """The fields for which neither `step_flops` nor `param_count` counts the layers of this model."""
    return [name for name in _UNCOUNTED if config.megatron.get(name)]


def step_flops(config: Config, sequences: int, *, vocab_size: int) -> float:
    """Model FLOPs of one optimizer step over all ranks: forward and backward of `sequences` (global_batch_size).

    `config` is a resolved one, `vocab_size` the tokens of the vocabulary before padding. The attention mask is causal,
    so half of the score matrix counts; an MoE layer counts the experts that a token visits (`moe_router_topk`) and the
    shared ones. Masked tokens count like any other: they are computed. Equal to `num_floating_point_operations` of
    megatron.training 0.19; without GQA, SwiGLU and MoE it is 72 B s l h^2 (1 + s / 12h + V / 12lh), which is formula
    (3) of arXiv 2104.04473 less the recomputed forward pass and the masked half of the scores.
    """
    model = config.model
    assert model.kv_channels and model.num_query_groups and model.ffn_hidden_size, "the config is not resolved"
    num_extra, layers = model.mtp_num_layers or 0, expert_layers(model)
    layers += layers[-1:] * num_extra  # built like the last one
    # Megatron counts a multiply-add for each element of a normed latent, and of the three norms before a layer that
    # predicts, beside the projection that joins its two embeddings.
    latents = (model.kv_lora_rank + (model.q_lora_rank or 0)) * model.multi_latent_attention
    per_token = (
        sum(_visited(model, moe=moe) + latents for moe in layers)
        + (2 * model.hidden_size * model.hidden_size + 3 * model.hidden_size) * num_extra
        + model.hidden_size * padded_vocab_size(config, vocab_size) * (1 + num_extra)
    )
    tokens = sequences * model.seq_length
    scores = score_macs(model) * len(layers) * tokens * model.seq_length / 2
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


def score_macs(model: ModelConfig) -> int:
    """Multiply-adds of one layer's attention scores and of the values that they weigh, per token and key."""
    if model.multi_latent_attention:
        return model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim)
    return 2 * model.num_attention_heads * (model.kv_channels or 0)


def _visited(model: ModelConfig, *, moe: bool) -> int:
    """Elements of a layer's matrices, of routed experts those that a token visits: as many multiply-adds per token."""
    cut, whole, experts = map(elements, layer_matrices(model, moe=moe))
    return cut + whole + (experts // model.num_experts * model.moe_router_topk if model.num_experts else 0)
