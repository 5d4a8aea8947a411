"""AdamW over a rank's parameters: fused where Transformer Engine, apex or torch has a fused one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed import cpu
from megaaccum.model import gpt
from megaaccum.training import lr_schedule

if TYPE_CHECKING:
    from megaaccum.config import Plan


def build(plan: Plan, chunks: list[torch.nn.Module]) -> torch.optim.Optimizer:
    """AdamW over this rank's parameters, in two groups: with weight decay (matrices) and without (biases, norms)."""
    optimizer = plan.config.optimizer
    groups = lr_schedule.param_groups(list(gpt.named_parameters(chunks)), optimizer.weight_decay)  # type: ignore[arg-type]
    options: dict[str, Any] = dict(
        lr=optimizer.lr, betas=(optimizer.adam_beta1, optimizer.adam_beta2), eps=optimizer.adam_eps
    )
    fused = _fused_adam() if cpu.has_accelerator() and plan.config.sharding.offload_optimizer == "none" else None
    if fused is not None:
        return fused(groups, adam_w_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _fused_adam():
    """Transformer Engine's FusedAdam, else apex's, else None (torch's fused kernel serves then)."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            return None
    return FusedAdam
