"""How many parameters a model has, in closed form, without building it."""

from __future__ import annotations

from dataclasses import dataclass

from megaaccum.config.schema import Config, ModelConfig
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.pretrain.metrics.layer_shapes import (
    LayerElements,
    expert_layers,
    layer_elements,
    norm_parameters,
    prediction_elements,
)


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
    layers = [layer_elements(model, moe=moe) for moe in expert_layers(model)]
    extra, prediction = model.mtp_num_layers or 0, prediction_elements(model)
    sinks = model.num_attention_heads * (config.megatron.get("softmax_type") == "learnable")
    output = rows * model.hidden_size if model.untie_embeddings_and_output_weights else 0
    return ParameterCount(
        embedding=(rows + positions) * model.hidden_size,
        layers=tuple(sum(layer) + sinks for layer in layers),
        active_layers=tuple(_active(layer, model) + sinks for layer in layers),
        prediction=extra * sum(prediction),
        active_prediction=extra * _active(prediction, model),
        head=norm_parameters(model, model.hidden_size) + output,
    )


def _active(layer: LayerElements, model: ModelConfig) -> int:
    """Elements of a layer with only those of the routed experts that one token visits."""
    return layer.cut + layer.whole + layer.experts // (model.num_experts or 1) * model.moe_router_topk
