"""torch's linear layer for weights that are released between its forward and its backward (ZeRO-3, streaming).

torch 2.13 saves `weight.t()` for the backward, a view that keeps the gathered weight of every micro-batch in flight.
DeepSpeed replaces `torch.nn.functional.linear` in the whole process for this reason, by a function that rounds twice in
16 bits where the layer has a bias. This one changes only the layers of the model that streams, and no bit of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional

from megaaccum.upstream import pytorch


def install(chunk: torch.nn.Module) -> None:
    """Let every torch.nn.Linear of `chunk` save its weight itself, which is empty while it is released, and let errors
    of its forward say so."""
    for module in chunk.modules():
        if type(module).forward is torch.nn.Linear.forward:
            module.forward = partial(_forward, module)
    chunk.forward = _explained(chunk.forward)


def _explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A chunk's forward, whose errors say what becomes of a weight that is read outside of its module's forward."""

    def explained(*args: Any, **keys: Any) -> Any:
        try:
            return forward(*args, **keys)
        except (RuntimeError, TypeError, IndexError) as error:
            error.add_note(
                "With sync streaming a module's parameters are there while its forward runs. One that is read outside"
                " of it, as in linear(x, self.embedding.weight), has no elements: call the module, or set sync to"
                " resident."
            )
            raise

    return explained


def _forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
        return functional.linear(input, layer.weight, layer.bias)
    return cast("torch.Tensor", _Linear.apply(input, layer.weight, layer.bias))


class _Linear(torch.autograd.Function):
    """torch's own product, and the products of its own backward."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return pytorch.without_base(functional.linear(input, weight, bias))  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            rows.mm(weight).view(input.shape) if wants_input else None,
            rows.t().mm(input.reshape(-1, input.shape[-1])) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
