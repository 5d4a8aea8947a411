"""Sharding backends: what reduces the gradients of an accumulated step, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaaccum.model.attention import prepare_latent_attention
from megaaccum.sharding.base import GradShard, ShardingBackend, fill_hooks, note_held

if TYPE_CHECKING:
    import torch

    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups

__all__ = ["GradShard", "ShardingBackend", "build", "fill_hooks", "note_held"]


def build(
    plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> ShardingBackend:
    """The backend that `plan.config.sharding.backend` names, its hooks filled into the chunks' configuration."""
    if plan.config.sharding.backend == "ddp":
        from megaaccum.sharding.ddp import DdpBackend as kind
    elif plan.config.sharding.backend == "fsdp2":
        from megaaccum.sharding.fsdp2 import Fsdp2Backend as kind  # type: ignore[assignment]
    elif plan.config.sharding.backend == "megatron":
        from megaaccum.sharding.megatron import MegatronBackend as kind  # type: ignore[assignment]
    elif plan.config.sharding.sync == "streaming":
        from megaaccum.sharding.streaming import StreamingBackend as kind  # type: ignore[assignment]
    else:
        from megaaccum.sharding.deepspeed import DeepSpeedBackend as kind  # type: ignore[assignment]
    for chunk in chunks:
        # Schedules and Megatron's DDP then divide nothing: Divisor does. Without it every gradient is 1 / N of its own.
        chunk.config.calculate_per_token_loss = True  # type: ignore[union-attr]
    prepare_latent_attention(chunks)
    backend = kind(plan, groups, chunks, optimizer)
    fill_hooks(backend, chunks)
    optimizer.register_step_pre_hook(lambda *_: note_held(backend))
    return backend
