"""How many parameters a model has, in closed form, without building it."""

from __future__ import annotations

from typing import NamedTuple

from megaaccum.config.schema import Config
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.pretrain.metrics.layer_shapes import expert_layers, layer_elements, norm_parameters, prediction_elements


class ParameterCount(NamedTuple):
    """Parameters of the whole model, over all ranks. Padded rows of the vocabulary count: they are stored."""

    total: int
    """All of them."""
    active: int
    """The parameters that one token meets: all, but for the experts that it does not visit."""


def count_parameters(config: Config, vocab_size: int) -> ParameterCount:
    """Parameters of a resolved configuration's model with `vocab_size` entries in the vocabulary before padding."""
    model = config.model
    rows = padded_vocab_size(config, vocab_size)
    positions = (model.max_position_embeddings or 0) if model.position_embedding_type == "learned_absolute" else 0
    tables = rows * (1 + model.untie_embeddings_and_output_weights) + positions
    sinks = model.num_layers * model.num_attention_heads * (config.megatron.get("softmax_type") == "learnable")
    outside = tables * model.hidden_size + sinks + norm_parameters(model, model.hidden_size)
    layers = [layer_elements(model, moe=moe) for moe in expert_layers(model)]
    layers += [prediction_elements(model)] * (model.mtp_num_layers or 0)
    visited = [each.experts // (model.num_experts or 1) * model.moe_router_topk for each in layers]
    shared = outside + sum(each.cut + each.whole for each in layers)
    return ParameterCount(shared + sum(each.experts for each in layers), shared + sum(visited))
