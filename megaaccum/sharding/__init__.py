"""Boundaries: what reduces the gradients of an accumulated step, and when."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from megaaccum.sharding.base import Boundary, GradShard, fill_hooks, note_held

if TYPE_CHECKING:
    import torch

    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups

__all__ = ["Boundary", "GradShard", "batch_statistics", "build", "fill_hooks", "note_held"]


def build(plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> Boundary:
    """The boundary that `plan.config.sharding.boundary` names, its hooks filled into the chunks' configuration."""
    if plan.config.sharding.boundary == "ddp":
        from megaaccum.sharding.ddp import DdpBoundary as kind
    elif plan.config.sharding.boundary == "fsdp2":
        from megaaccum.sharding.fsdp2 import Fsdp2Boundary as kind  # type: ignore[assignment]
    elif plan.config.sharding.boundary == "megatron":
        from megaaccum.sharding.megatron import MegatronBoundary as kind  # type: ignore[assignment]
    elif plan.config.sharding.sync == "streaming":
        from megaaccum.sharding.streaming import StreamingBoundary as kind  # type: ignore[assignment]
    else:
        from megaaccum.sharding.deepspeed import DeepSpeedBoundary as kind  # type: ignore[assignment]
    for text in batch_statistics(chunks):
        warnings.warn(text, stacklevel=2)
    boundary = kind(plan, groups, chunks, optimizer)
    fill_hooks(boundary, chunks)
    optimizer.register_step_pre_hook(lambda *_: note_held(boundary))
    return boundary


def batch_statistics(chunks: list[torch.nn.Module]) -> list[str]:
    """A warning for each module that keeps statistics of its batch: no accumulation makes them the big batch's."""
    return [
        f"{name} ({type(module).__name__}) takes statistics of each micro-batch, so its output is not that of the big"
        " batch, whatever the accumulation: replace it by a norm over features"
        for chunk in chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "running_mean") and getattr(module, "track_running_stats", True)
    ]
