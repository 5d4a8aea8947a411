"""Bytes that Megatron's local layers keep (megatron-core 0.19 on torch's own operators: the CPU lane), by tensor.

A test runs real steps and counts what autograd keeps. T tokens of a micro-batch on a rank; what tp does not cut is a
1/tp under sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.layouts import Layouts


def norm(model: ModelConfig, whole: Any, element: float) -> Any:
    """A norm's input, which RMSNorm keeps twice, and its statistics per token: mean and deviation, or the latter."""
    rms = model.normalization == "RMSNorm"
    return whole * element * (model.hidden_size * (2 if rms else 1) + (1 if rms else 2))


def attention(model: ModelConfig, at: Layouts, t: Any, whole: Any, element: float, *, fused: bool) -> Any:
    """The projections' inputs; queries, keys and values as the products of scores and values need them. Fused: also the
    sum of exponentials of each head's scores, an FP32 number per token."""
    channels = model.kv_channels or 0
    queries, groups = model.num_attention_heads * channels, (model.num_query_groups or 0) * channels
    mixed, rotated, grouped = queries + 2 * groups, model.position_embedding_type == "rope", groups != queries
    tables = 4 * model.seq_length * channels * model.rotary_percent * element if rotated else 0
    if fused:
        kept: Any = mixed + (queries + groups if rotated else 0)
        sums = t * model.num_attention_heads / at.tp * 4
        # Cut sequences: keys and values of the whole sequence, and which of its positions each token attends to.
        cut = at.cp > 1
        far = np.where(cut, t * at.cp * 2 * groups / at.tp * element + t * model.seq_length * element, 0.0)
        kept = np.where(cut, queries if rotated else mixed, kept)
        return whole * model.hidden_size * element + t * (kept + queries) / at.tp * element + sums + tables + far
    if grouped:
        # Keys and values are repeated for every head; the projection's output is kept only if queries are a part of it.
        kept = 3 * queries if rotated else mixed + 2 * queries
    else:
        kept = mixed + (2 * queries if rotated else 0)
    return whole * model.hidden_size * element + t * (kept + queries) / at.tp * element + tables


def scores(model: ModelConfig, at: Layouts, t: Any, element: float) -> Any:
    """The softmax (in FP32, unless all is float64), what multiplies the values if that is another tensor, the dropout's
    noise; and the causal mask, a byte per pair of positions."""
    softmax = max(4.0, element)
    dropout = bool(model.attention_dropout)
    per_score = softmax + (element if element < 4 or dropout else 0) + (element if dropout else 0)
    mask = float(model.seq_length) ** 2
    return t * model.seq_length * model.num_attention_heads / at.tp * per_score + mask


def mlp(model: ModelConfig, at: Layouts, t: Any, whole: Any, element: float) -> Any:
    """The first matrix' input and output, and the second's input; gated: also the gate's activation, and both factors
    of the product."""
    width = (model.ffn_hidden_size or 0) * (5 if model.swiglu else 2)
    return whole * model.hidden_size * element + t * width / at.tp * element


def dropouts(model: ModelConfig, whole: Any, element: float) -> Any:
    """The noise of a layer's two dropouts on the residual stream."""
    return 2 * whole * model.hidden_size * element if model.hidden_dropout else 0 * whole


def embedding(model: ModelConfig, at: Layouts, t: Any, whole: Any, element: float) -> Any:
    """Token numbers, positions where they are learned, which tokens are another tp rank's, and the dropout's noise."""
    learned = 8 if model.position_embedding_type == "learned_absolute" else 0
    noise = model.hidden_size * element * whole if model.hidden_dropout else 0
    return t * (8 + learned + np.where(at.tp > 1, 1, 0)) + noise


def head(model: ModelConfig, t: Any, whole: Any, element: float) -> Any:
    """The final norm, the output matrix' input, and the loss' targets, their probabilities and masks; logits aside."""
    return norm(model, whole, element) + whole * model.hidden_size * element + t * (8 + 4 + 1)
