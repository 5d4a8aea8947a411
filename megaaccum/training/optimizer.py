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
    fused = _fused_adam() if _takes_fused(plan) else None
    if fused is not None:
        return fused(groups, adam_w_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _takes_fused(plan: Plan) -> bool:
    """Whether Transformer Engine's or apex's Adam serves: on a GPU, and where what it updates is FP32. Their moments
    are FP32 whatever the weights are, which `optimizer_dtype: bf16` is chosen to avoid."""
    sharding = plan.config.sharding
    masters = sharding.params_dtype if sharding.backend == "ddp" else sharding.optimizer_dtype
    return cpu.has_accelerator() and sharding.offload_optimizer == "none" and masters in (None, "fp32")


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
