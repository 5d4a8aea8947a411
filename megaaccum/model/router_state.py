"""State that the routers of a mixture of experts keep between steps, apart from their weights.

Aux-loss-free balancing (arXiv 2408.15664) gives each expert a bias that moves by a fixed rate towards the experts that
had too few tokens in the last global batch. No gradient does that: Megatron's `finalize_model_grads` does, and a
backend that replaces it has to. Megatron's configuration and routers have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

from megaaccum.distributed.groups import Groups


def keep_fp32(chunk: torch.nn.Module) -> None:
    """Hold a router's biases and counts of tokens in FP32, in which it makes them. Megatron's Float16Module casts them:
    BF16 has no whole numbers between 256 and 258 (NVIDIA/Megatron-LM#7081)."""
    for name, buffer in chunk.named_buffers():
        if buffer.dtype.itemsize == 2 and name.endswith((".expert_bias", "tokens_per_expert", ".ga_steps")):
            buffer.data = buffer.data.float()


def begin_step(chunks: Sequence[torch.nn.Module]) -> None:
    """Forget the tokens that were counted for the bias, and for the global balancing loss, in an earlier step or in one
    that was skipped."""
    for chunk in chunks:
        config: Any = chunk.config
        if getattr(config, "num_moe_experts", None):
            reset_model_temporary_tensors(config, [chunk])


def update_bias(chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """Move each expert's bias by its tokens in this step, summed over tp x dp x cp: every rank of a stage computes the
    same bias. Collective over that group. Call it for a step that counts; a skipped one leaves the bias."""
    if not (routers := [router for chunk in chunks for router in _routers(chunk)]):
        return
    config: Any = chunks[0].config
    updated = get_updated_expert_bias(
        torch.stack([router.local_tokens_per_expert for router in routers]),
        torch.stack([router.expert_bias for router in routers]),
        config.moe_router_bias_update_rate,
        tp_dp_cp_group=groups.collection.tp_dp_cp,
    )
    for router, bias in zip(routers, updated, strict=True):
        router.expert_bias.copy_(bias)


def _routers(chunk: torch.nn.Module) -> list[Any]:
    """The routers of a chunk that keep a bias, without those that Megatron leaves alone: frozen, or in evaluation."""
    modules: Any = chunk.modules() if getattr(chunk.config, "num_moe_experts", None) else ()
    biased = [module for module in modules if getattr(module, "expert_bias", None) is not None]
    return [module for module in biased if module.training and not getattr(module, "frozen_expert_bias", False)]
