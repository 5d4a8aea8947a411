"""Bytes that a micro-batch leaves for its backward pass, by part of the model.

T tokens of a micro-batch on a rank are seq_length * micro_batch_size / cp. What the tp ranks hold in full, they hold
a 1/tp of under sequence parallelism. Terms follow arXiv 2205.05198, section 4, generalised to gated MLPs, grouped
queries, latent attention and experts. Those of Megatron's local layers are upper bounds; a test counts the tensors that
autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.layouts import RECOMPUTE, Layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The parts of the layers, as far as it decides which tensors are kept."""

    element: int = 2
    """Bytes of an activation."""
    local: bool = False
    """Megatron's local layers on torch's own operators, instead of Transformer Engine's. They keep more tensors, and
    predictions are upper bounds."""
    on_gpu: bool = True
    """Local layers have a GPU's fused kernels: RMSNorm keeps its input once, a gated activation what it is made of."""
    flash: bool = True
    """Attention keeps no scores (arXiv 2205.14135)."""
    matmul_element: float | None = None
    """Bytes of an input kept for a linear layer's weight gradient: 1 under FP8. None: as `element`."""
    by_operation: Callable[[ModelConfig, Layouts], Any] | None = None
    """Bytes that a layer keeps under another framework's selective recompute, by operation and not by module. None:
    Megatron's, everything but what `recompute_modules` name."""
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    """Modules that selective recompute runs again (Megatron's recompute_modules)."""
    kept_weight_grads: bool = False
    """A gradient per shape of weight stays allocated, which no one reads: Transformer Engine 2 returns it to autograd
    where it adds the real one to the main gradients itself."""
    logit_bytes: float = 8.0
    """Bytes per logit at the peak of the loss: the 16-bit logits, their FP32 softmax, and the 16-bit gradient."""

    @property
    def saved_input(self) -> float:
        """Bytes of one element of a linear layer's kept input."""
        return self.element if self.matmul_element is None else self.matmul_element


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one transformer layer for one micro-batch on one rank."""

    norms: Any
    attention: Any
    scores: Any
    mlp: Any

    @property
    def total(self) -> Any:
        """All of them."""
        return self.norms + self.attention + self.scores + self.mlp


def tokens(model: ModelConfig, at: Layouts) -> Any:
    """T: tokens of a micro-batch on one context-parallel rank."""
    return model.seq_length * at.micro_batch_size / at.cp


def whole_share(at: Layouts) -> Any:
    """A tp rank's share of the tensors that tp leaves whole: 1/tp under sequence parallelism, else 1."""
    return np.where(at.sequence_parallel > 0, 1 / at.tp, 1.0)


def layer_input(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """Bytes of a layer's input: all that full recompute keeps of a layer."""
    return tokens(model, at) * model.hidden_size * whole_share(at) * kernels.element


def gathered_input(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """Bytes of a linear layer's input where sequence parallelism keeps a part of it and gathers the whole to use it."""
    whole = tokens(model, at) * model.hidden_size * kernels.element
    return np.where((at.sequence_parallel > 0) & (at.tp > 1), whole, 0.0)


def regrouped(model: ModelConfig, at: Layouts) -> Any:
    """Elements of the product of queries, keys and values that Megatron gathers over tp and slices if there are fewer
    query groups than tp ranks (Attention.get_query_key_value_tensors), else 0. Values are views that hold it whole."""
    groups = model.num_query_groups or model.num_attention_heads
    width = (model.num_attention_heads + 2 * groups) * (model.kv_channels or 0)
    return np.where((at.tp > groups) & (not model.multi_latent_attention), tokens(model, at) * width, 0.0)


def layer(model: ModelConfig, at: Layouts, kernels: Kernels, *, moe: bool) -> LayerBytes:
    """Everything that one layer keeps without recompute."""
    whole = tokens(model, at) * whole_share(at)
    if kernels.local:
        return _local_layer(model, at, kernels, whole, moe=moe)
    dropout = 2 * whole * model.hidden_size if model.hidden_dropout else 0
    return LayerBytes(
        norms=2 * whole * model.hidden_size * kernels.element + dropout,
        attention=_attention(model, at, kernels),
        scores=0 if kernels.flash else _scores(model, at, kernels),
        mlp=_experts(model, at, kernels) if moe else _mlp(model, at, kernels, model.ffn_hidden_size or 0),
    )


def _local_layer(model: ModelConfig, at: Layouts, kernels: Kernels, whole: Any, *, moe: bool) -> LayerBytes:
    """Upper bound of what a local layer keeps (megatron-core 0.19), with torch's fused attention or with scores.

    A norm keeps its input (on a CPU RMSNorm twice) and two statistics, a dropout its noise as an activation, attention
    copies of rotated and repeated queries, keys and values, and a gated MLP both factors of each product unless they
    are one kernel.
    """
    t, element, hidden = tokens(model, at), kernels.element, model.hidden_size
    queries, groups = (
        heads * (model.kv_channels or 0) for heads in (model.num_attention_heads, model.num_query_groups or 0)
    )
    noise = 2 * whole * hidden * element if model.hidden_dropout else 0
    attention = _latent_attention(model, at, kernels)
    if not model.multi_latent_attention:
        inside = (4 * queries + 2 * groups) * element + model.num_attention_heads * 4
        rotation = 4 * model.seq_length * (model.kv_channels or 0) * element
        # A cut sequence gathers keys and values of all of it, and which of its positions each token attends to.
        far = np.where(at.cp > 1, t * (at.cp * 2 * groups / at.tp + model.seq_length) * element, 0.0)
        again = regrouped(model, at) * (1 - 1 / at.tp) * element
        attention = whole * hidden * element + t * inside / at.tp + rotation + far + again
    per_score = max(4.0, element) + element * (2 if model.attention_dropout else 1)
    scores = t * model.seq_length * model.num_attention_heads / at.tp * per_score + float(model.seq_length) ** 2
    gated = 3 if kernels.on_gpu and model.bias_swiglu_fusion else 5
    width = (model.ffn_hidden_size or 0) * (gated if model.swiglu else 2)
    twice = model.normalization == "RMSNorm" and not kernels.on_gpu
    return LayerBytes(
        norms=2 * whole * (hidden * (2 if twice else 1) + 2) * element + noise,
        attention=attention,
        scores=0 if kernels.flash else scores,
        mlp=_experts(model, at, kernels) if moe else whole * hidden * element + t * width / at.tp * element,
    )


def _attention(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """The projections' inputs, queries, keys and values, and one FP32 number per head and token of the softmax."""
    t, hidden, heads = tokens(model, at), model.hidden_size, model.num_attention_heads
    if model.multi_latent_attention:
        return _latent_attention(model, at, kernels)
    queries, groups = heads * (model.kv_channels or 0), (model.num_query_groups or 0) * (model.kv_channels or 0)
    kept = t * hidden * whole_share(at) * kernels.saved_input
    kept = kept + (t * (queries + 2 * groups) / at.tp + regrouped(model, at) * (1 - 1 / at.tp)) * kernels.element
    if model.position_embedding_type == "rope":
        # Rotated queries and keys are new tensors, and the values, a view, hold the product that all three are cut of.
        kept = kept + t * (queries + groups) * kernels.element / at.tp
    return kept + t * queries * kernels.element / at.tp + t * heads * 4 / at.tp


def _latent_attention(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    t, heads = tokens(model, at), model.num_attention_heads
    latents = (model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim
    head = 2 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + model.v_head_dim
    kept = t * model.hidden_size * whole_share(at) * kernels.saved_input
    kept = kept + 2 * t * latents * whole_share(at) * kernels.element
    kept = kept + t * heads * head * kernels.element / at.tp
    return kept + t * heads * model.v_head_dim * kernels.element / at.tp + t * heads * 4 / at.tp


def _scores(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """Attention that keeps its scores: the softmax, and with dropout its mask (1 byte) and its output."""
    keys = model.seq_length / at.cp
    per_score = kernels.element + ((1 + kernels.element) if model.attention_dropout else 0)
    return tokens(model, at) * keys * model.num_attention_heads * per_score / at.tp


def _mlp(model: ModelConfig, at: Layouts, kernels: Kernels, width: int) -> Any:
    """The first matrix' input, its output (twice as wide when gated), and the second matrix' input."""
    t, inner = tokens(model, at), (2 if model.swiglu else 1)
    kept = t * model.hidden_size * whole_share(at) * kernels.saved_input
    return kept + t * width * (inner * kernels.element + kernels.saved_input) / at.tp


def _experts(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """Router, dispatched tokens and experts (of etp ranks, each sees all rows and holds a part of the width)."""
    t, width = tokens(model, at) * whole_share(at), model.moe_ffn_hidden_size or 0
    rows, inner = routed_rows(model, t), 2 if model.swiglu else 1
    kept = t * (model.hidden_size * kernels.element + (model.num_experts or 0) * 4 * 2)
    kept = kept + dispatched(model, at, kernels) + rows * width * (inner * kernels.element + kernels.saved_input)
    if model.moe_shared_expert_intermediate_size:
        kept = kept + _mlp(model, at, kernels, model.moe_shared_expert_intermediate_size)
    return kept


def expert_load(model: ModelConfig) -> float:
    """Tokens that the experts of the most loaded rank compute, over an even share: moe_expected_imbalance, and with a
    capacity no more than that."""
    capacity = model.moe_expert_capacity_factor
    if capacity is not None and model.moe_pad_expert_input_to_capacity:
        return capacity
    return min(model.moe_expected_imbalance, capacity or model.moe_expected_imbalance)


def routed_rows(model: ModelConfig, t: Any) -> Any:
    """Rows that enter the experts of the most loaded rank, if each rank routes `t` tokens."""
    return t * model.moe_router_topk * expert_load(model)


def dispatched(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """Bytes of the dispatch buffers that a micro-batch in flight keeps in one layer: the rows that the experts received
    (their products' input, on each of etp ranks), and those that they return."""
    rows = routed_rows(model, tokens(model, at) * whole_share(at))
    return rows * model.hidden_size * (kernels.saved_input * at.etp + kernels.element)


def _recomputed_modules(model: ModelConfig, at: Layouts, kernels: Kernels, every: LayerBytes, *, moe: bool) -> Any:
    """Tensors that selective recompute does not keep: per module, its inside but not its input; a norm's output."""
    names, whole = kernels.recompute_modules, tokens(model, at) * model.hidden_size * whole_share(at)
    dropped = 0 * every.total
    if "core_attn" in names:
        dropped = dropped + every.scores
    if ("moe" if moe else "mlp") in names:
        dropped = dropped + every.mlp - whole * kernels.saved_input
    elif "layernorm" in names:
        dropped = dropped + whole * kernels.saved_input
    if "layernorm" in names:
        dropped = dropped + whole * kernels.saved_input
    if "mla_up_proj" in names and model.multi_latent_attention:
        head = 2 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + model.v_head_dim
        dropped = dropped + tokens(model, at) * model.num_attention_heads * head * kernels.element / at.tp
    if moe and "moe_act" in names and "moe" not in names:
        rows = routed_rows(model, whole / model.hidden_size)
        dropped = dropped + rows * (model.moe_ffn_hidden_size or 0) * kernels.saved_input
    return dropped


def kept_per_layer(model: ModelConfig, at: Layouts, kernels: Kernels, *, moe: bool) -> Any:
    """Bytes that a layer keeps under each layout's recompute, in bytes per micro-batch."""
    every = layer(model, at, kernels, moe=moe)
    if kernels.by_operation is not None:
        selective = kernels.by_operation(model, at) + 0 * every.total
    else:
        selective = every.total - _recomputed_modules(model, at, kernels, every, moe=moe)
    return np.select(
        [at.recompute == RECOMPUTE.index("full"), at.recompute == RECOMPUTE.index("selective")],
        [layer_input(model, at, kernels) + 0 * every.total, selective],
        every.total,
    )


def recomputed_at_once(model: ModelConfig, at: Layouts, kernels: Kernels, *, moe: bool) -> Any:
    """Bytes that a layer's backward pass brings back while it runs, beside what is kept: a layer, or its scores."""
    every = layer(model, at, kernels, moe=moe).total
    whole = (kernels.by_operation is not None) & (at.recompute == RECOMPUTE.index("selective"))
    return every - np.where(whole, 0.0, kept_per_layer(model, at, kernels, moe=moe))


def loss(model: ModelConfig, rows: Any, at: Layouts, kernels: Kernels) -> Any:
    """Logits and loss of one micro-batch on the stage with the head: `rows` vocabulary entries cut over tp."""
    t, whole = tokens(model, at), tokens(model, at) * whole_share(at)
    head_input = 2 * whole * model.hidden_size * kernels.element
    if kernels.local:  # a second copy of the norm's input and its statistics; targets, their probabilities, masks
        head_input = head_input + whole * (model.hidden_size + 2) * kernels.element + t * 13
    return head_input + t * rows / at.tp * kernels.logit_bytes


def embedding(model: ModelConfig, at: Layouts, kernels: Kernels) -> Any:
    """The token numbers that the table's gradient needs (8 bytes each), and its dropout's mask. Local layers also keep
    positions, which tokens are another tp rank's, and the mask as activations."""
    mask = model.hidden_size * whole_share(at) if model.hidden_dropout else 0
    if kernels.local:
        return tokens(model, at) * (17 + mask * kernels.element)
    return tokens(model, at) * (8 + mask)
