"""What MoE routers gather over the micro-batches of a step, and the bias that balances experts without a loss.

Megatron-core does both in its own `finalize_model_grads`, which a boundary replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megaaccum.groups import Groups


def forget(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the routers' statistics (tokens per expert, of `global_aux_loss` and of the expert bias) start anew: at the
    beginning of a step, and of every other run of its micro-batches."""
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

    config = chunks[0].config
    if config.num_moe_experts:  # type: ignore[union-attr]
        reset_model_temporary_tensors(config, list(chunks))  # type: ignore[arg-type]


def update_expert_bias(chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """Move every router's expert bias towards the experts that got fewer tokens than the mean in this step (Wang et
    al., Auxiliary-loss-free load balancing, arXiv:2408.15664). Collective over tp x dp x cp."""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    config = chunks[0].config
    if not config.moe_router_enable_expert_bias:  # type: ignore[union-attr]
        return
    for chunk in chunks:
        for module in chunk.modules():
            bias = getattr(module, "expert_bias", None)
            if bias is not None:
                moved = get_updated_expert_bias(
                    module.local_tokens_per_expert,
                    bias,
                    config.moe_router_bias_update_rate,  # type: ignore[union-attr]
                    tp_dp_cp_group=groups.collection.tp_dp_cp,
                )
                bias.copy_(moved)
