"""What MoE routers gather over the micro-batches of a step, and the bias that balances experts without a loss.

Megatron-core does both in its own `finalize_model_grads`, which a boundary replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum import model
from megaaccum.errors import CheckpointError

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
    for module in _with_bias(chunks).values():
        moved = get_updated_expert_bias(
            module.local_tokens_per_expert,
            module.expert_bias,
            config.moe_router_bias_update_rate,  # type: ignore[union-attr]
            tp_dp_cp_group=groups.collection.tp_dp_cp,
        )
        module.expert_bias.copy_(moved)


def expert_bias(chunks: Sequence[torch.nn.Module]) -> dict[str, list[float]]:
    """{router's name in the whole model: bias of each expert, float32 numbers}, of all stages; the same on every rank.
    Collective over the world where there are such routers."""
    if not chunks[0].config.moe_router_enable_expert_bias:  # type: ignore[union-attr]
        return {}
    mine = {name: module.expert_bias.tolist() for name, module in _with_bias(chunks).items()}
    everyone: list[dict[str, list[float]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: bias for biases in everyone for name, bias in (biases or {}).items()}


def load_expert_bias(chunks: Sequence[torch.nn.Module], state: dict[str, list[float]]) -> None:
    """Take up what `expert_bias` gave, under any layout. Raises CheckpointError where a router's is not there."""
    for name, module in _with_bias(chunks).items():
        if name not in state:
            raise CheckpointError(f"the checkpoint lacks the bias of {name}: start afresh with --no_load")
        module.expert_bias.copy_(torch.tensor(state[name]))


def _with_bias(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """This rank's routers that have an expert bias, by their name in the whole model."""
    return {
        model.global_name(chunk, name): module  # type: ignore[arg-type]
        for chunk in chunks
        for name, module in chunk.named_modules()
        if getattr(module, "expert_bias", None) is not None
    }
