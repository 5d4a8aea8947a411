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
from megaaccum.pretrain.metrics import param_count
from megaaccum.pretrain.metrics.flops import expert_layers
from megaaccum.pretrain.metrics.param_count import norm_parameters


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """One layer: elements that tp cuts, that every tp rank holds whole, and that ep and etp cut."""

    cut: int
    whole: int
    expert: int

    def on_rank(self, at: RankLayout | Layouts) -> Elements:
        return Elements(self.cut // at.tp + self.whole, self.expert // (at.ep * at.etp))


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
    total = _layer(model, False).on_rank(at) * stage.dense
    total = total + _layer(model, True).on_rank(at) * stage.moe
    total = total + _prediction(model).on_rank(at) * stage.prediction
    if stage.embedding or stage.prediction:
        learned = model.position_embedding_type == "learned_absolute"
        total = total + Elements(table + learned * (model.max_position_embeddings or 0) * model.hidden_size, 0)
    if stage.head:
        tied = not model.untie_embeddings_and_output_weights
        total = total + Elements(0 if tied and stage.embedding else table, 0)
    if stage.final_norm:
        total = total + Elements(norm_parameters(model, model.hidden_size), 0)
    return total


def _prediction(model: ModelConfig) -> _Parts:
    """A multi-token-prediction layer: three norms, a 2h x h matrix cut over tp, and a layer like the last one."""
    inner = _layer(model, expert_layers(model)[-1])
    norms = 3 * norm_parameters(model, model.hidden_size)
    return _Parts(inner.cut + 2 * model.hidden_size**2, inner.whole + norms, inner.expert)


def _layer(model: ModelConfig, moe: bool) -> _Parts:
    if moe and model.num_experts is None:
        return _Parts(0, 0, 0)
    total = param_count.layer_parameters(model, moe=moe)
    expert = param_count.expert_parameters(model) if moe else 0
    whole = _whole_on_every_tp_rank(model, moe)
    return _Parts(total - whole - expert, whole, expert)


def _whole_on_every_tp_rank(model: ModelConfig, moe: bool) -> int:
    """Norms, the biases of matrices whose output is summed over tp, the router, and latent down-projections."""
    hidden = model.hidden_size
    whole = 2 * norm_parameters(model, hidden)
    if model.add_bias_linear:
        whole += hidden * (1 if moe else 2)  # those of routed experts count as experts
    if model.multi_latent_attention:
        whole += _latent_whole(model)
    elif model.qk_layernorm:
        whole += 2 * norm_parameters(model, model.kv_channels or 0)
    return whole + (hidden * (model.num_experts or 0) if moe else 0)


def _latent_whole(model: ModelConfig) -> int:
    """Down-projections of latent attention are whole on every tp rank, and the norms of the latents with them."""
    widths = model.kv_lora_rank + (model.q_lora_rank or 0)
    norms = norm_parameters(model, widths) if model.qk_layernorm else 0
    return model.hidden_size * (widths + model.qk_pos_emb_head_dim) + norms
