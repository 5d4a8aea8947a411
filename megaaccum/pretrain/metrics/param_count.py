"""How many parameters a model has, in closed form, without building it.

The shapes are those of megatron.core.models.gpt.GPTModel (megatron-core 0.19): a test builds it and counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaaccum.config.schema import Config, ModelConfig
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.pretrain.metrics.flops import attention_weights, expert_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, over all ranks. Padded rows of the vocabulary count: they are stored."""

    embedding: int
    """Word table, and the position table if there is one."""
    layers: tuple[int, ...]
    """Each transformer layer, in model order."""
    active_layers: tuple[int, ...]
    """Each transformer layer, with only those of the routed experts that one token visits."""
    prediction: int
    """Multi-token-prediction layers."""
    active_prediction: int
    """Multi-token-prediction layers, with only those of the routed experts that one token visits."""
    head: int
    """Final norm, and the output matrix unless it is the word table."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + sum(self.layers) + self.prediction + self.head

    @property
    def active(self) -> int:
        """Parameters that one token meets: all, but for the experts it does not visit."""
        return self.embedding + sum(self.active_layers) + self.active_prediction + self.head


def count_parameters(config: Config, vocab_size: int) -> ParameterCount:
    """Parameters of a resolved configuration's model with `vocab_size` entries in the vocabulary before padding."""
    model = config.model
    rows = padded_vocab_size(config, vocab_size)
    positions = (model.max_position_embeddings or 0) if model.position_embedding_type == "learned_absolute" else 0
    is_moe = expert_layers(model)
    extra = model.mtp_num_layers or 0
    sinks = model.num_attention_heads * (config.megatron.get("softmax_type") == "learnable")
    output = rows * model.hidden_size if model.untie_embeddings_and_output_weights else 0
    return ParameterCount(
        embedding=(rows + positions) * model.hidden_size,
        layers=tuple(_layer(model, moe, model.num_experts) + sinks for moe in is_moe),
        active_layers=tuple(_layer(model, moe, model.moe_router_topk) + sinks for moe in is_moe),
        # An extra layer is shaped like the last one.
        prediction=extra * (_prediction_extra(model) + _layer(model, is_moe[-1], model.num_experts)),
        active_prediction=extra * (_prediction_extra(model) + _layer(model, is_moe[-1], model.moe_router_topk)),
        head=norm_parameters(model, model.hidden_size) + output,
    )


def layer_parameters(model: ModelConfig, *, moe: bool) -> int:
    """Parameters of one transformer layer, over all ranks; of one with experts if `moe`, all of them counted."""
    return _layer(model, moe, model.num_experts)


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of the routed experts of one layer, over all ranks."""
    return (model.num_experts or 0) * _mlp(model, model.moe_ffn_hidden_size or 0)


def _layer(model: ModelConfig, moe: bool, num_experts: int | None) -> int:
    attention = _latent_attention(model) if model.multi_latent_attention else _attention(model)
    mlp = _experts(model, num_experts or 0) if moe else _mlp(model, model.ffn_hidden_size or 0)
    return attention + mlp + 2 * norm_parameters(model, model.hidden_size)


def norm_parameters(model: ModelConfig, width: int) -> int:
    """A norm of `width` channels: LayerNorm has a bias too."""
    return width * (2 if model.normalization == "LayerNorm" else 1)


def _attention(model: ModelConfig) -> int:
    """Grouped-query attention: its matrices, their biases, norms on queries and keys."""
    channels = model.kv_channels or 0
    qkv = (model.num_attention_heads + 2 * (model.num_query_groups or 0)) * channels
    biases = qkv * (model.add_bias_linear or model.add_qkv_bias) + model.hidden_size * model.add_bias_linear
    return attention_weights(model) + biases + (2 * norm_parameters(model, channels) if model.qk_layernorm else 0)


def _latent_attention(model: ModelConfig) -> int:
    """Multi-latent attention: its matrices, the output's bias, norms on the latents."""
    latents = model.kv_lora_rank + (model.q_lora_rank or 0)
    bias = model.hidden_size * model.add_bias_linear
    return attention_weights(model) + bias + (norm_parameters(model, latents) if model.qk_layernorm else 0)


def _mlp(model: ModelConfig, width: int) -> int:
    inner = width * (2 if model.swiglu else 1)
    return model.hidden_size * (inner + width) + (inner + model.hidden_size) * model.add_bias_linear


def _experts(model: ModelConfig, count: int) -> int:
    """`count` of the routed experts, the router of all of them, and the shared experts."""
    shared = _mlp(model, model.moe_shared_expert_intermediate_size or 0)
    router = (model.hidden_size + model.add_bias_linear) * (model.num_experts or 0)
    visited = count * _mlp(model, model.moe_ffn_hidden_size or 0)
    return visited + router + (shared if model.moe_shared_expert_intermediate_size else 0)


def _prediction_extra(model: ModelConfig) -> int:
    """Parameters of a multi-token-prediction layer beside a transformer layer: three norms, and a 2h x h matrix."""
    return 3 * norm_parameters(model, model.hidden_size) + 2 * model.hidden_size**2
