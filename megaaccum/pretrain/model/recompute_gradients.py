"""Gradients of recomputed layers that Megatron's re-entrant checkpoints get wrong (megatron-core 0.19).

Which micro-batch a recomputed forward belongs to is not decided here: see step/forward_step.py and step/seeds.py.

Hooks receive whatever a module of Megatron's is called with: `Any`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

WITHOUT_OUTPUT = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Modules whose output is dropped and recomputed (CheckpointWithoutOutput), for which Megatron asks Transformer Engine
even without FP8: its own layers cannot."""


def prepare(chunk: GPTModel) -> None:
    """Correct the gradients of recomputed layers of `chunk`: after frozen layers, and of an MLP's bias."""
    config = chunk.config
    if config.recompute_granularity is None:
        return
    chunk.decoder.register_forward_pre_hook(_need_input_gradient, with_kwargs=True)
    if config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ()):
        for module in chunk.modules():
            if getattr(module, "recompute_mlp", False):
                module.mlp.register_forward_hook(_copy_bias)


def _need_input_gradient(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the decoder's inputs need a gradient: a checkpoint whose inputs need none (the embedding is frozen) gives its
    parameters none either. Nor does it run again, which is when Megatron's routers count the tokens that move expert
    biases, also in a stage whose layers are all frozen."""
    hidden = kwargs["hidden_states"]
    if hidden is not None and not hidden.requires_grad and torch.is_grad_enabled():
        counts: bool = decoder.config.moe_router_enable_expert_bias  # type: ignore[union-attr, assignment]
        hidden.requires_grad_(counts or any(param.requires_grad for param in decoder.parameters()))


def _copy_bias(
    mlp: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy the last bias of an MLP, which its caller adds. A checkpoint that returns the parameter itself becomes the
    parameter's origin, and a backward of the bias then recomputes the MLP for ever."""
    hidden, bias = output
    return hidden, None if bias is None else bias.clone()
