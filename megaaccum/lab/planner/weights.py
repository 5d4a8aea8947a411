"""How many parameters one rank holds, in closed form (megatron.core.models.gpt.GPTModel, megatron-core 0.19)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaaccum.config.layout import RankLayout
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.lab.planner.stages import Stage
from megaaccum.model.sizes import padded_rows
from megaaccum.pretrain.metrics.layer_shapes import LayerElements, layer_elements, norm_parameters, prediction_elements


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameters in elements: numbers, or one per layout. `plain` are sharded over dp * cp, `expert` over edp."""

    plain: Any
    expert: Any

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.plain + other.plain, self.expert + other.expert)

    def __mul__(self, times: int) -> Elements:
        return Elements(self.plain * times, self.expert * times)

    @property
    def total(self) -> Any:
        """All of them."""
        return self.plain + self.expert


def rank_parameters(model: ModelConfig, chunks: Iterable[Stage], vocab_size: int, at: RankLayout | Layouts) -> Elements:
    """Parameters of one rank with these chunks, of one layout or of many."""
    zero = np.zeros_like(at.tp) if np.ndim(at.tp) else 0
    total = Elements(zero, zero)
    for chunk in chunks:
        total = total + stage_parameters(model, chunk, vocab_size, at)
    return total


def stage_parameters(model: ModelConfig, stage: Stage, vocab_size: int, at: RankLayout | Layouts) -> Elements:
    """Parameters that one rank holds of one stage.

    A stage that predicts further tokens holds a copy of the word table, and a last stage whose output matrix is tied to
    the table holds one more, unless it is the first stage too.
    """
    table = padded_rows(model, vocab_size, at.tp) // at.tp * model.hidden_size
    total = _on_rank(layer_elements(model, moe=False), at) * stage.dense
    if model.num_experts is not None:
        total = total + _on_rank(layer_elements(model, moe=True), at) * stage.moe
    if stage.prediction:
        total = total + _on_rank(prediction_elements(model), at) * stage.prediction
    if stage.embedding or stage.prediction:
        learned = model.position_embedding_type == "learned_absolute"
        total = total + Elements(table + learned * (model.max_position_embeddings or 0) * model.hidden_size, 0)
    if stage.head:
        tied = not model.untie_embeddings_and_output_weights
        total = total + Elements(0 if tied and stage.embedding else table, 0)
    if stage.final_norm:
        total = total + Elements(norm_parameters(model, model.hidden_size), 0)
    return total


def _on_rank(layer: LayerElements, at: RankLayout | Layouts) -> Elements:
    return Elements(layer.cut // at.tp + layer.whole, layer.experts // (at.ep * at.etp))
