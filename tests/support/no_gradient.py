"""Models of which some parameters get no gradient: frozen ones, ones that nothing uses or some micro-batches skip,
experts that see no token.

Every function here runs inside ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from tests.support import parity
from tests.support.parity import Case, Gradient, Rig

Change = Callable[[list[torch.nn.Module]], None]
"""A change of a rank's chunks, applied right after they are built."""


def frozen(chunks) -> None:
    """The embedding, the first layer and, in the third, what a backward reads last."""
    for name, param in named(chunks):
        first = name.startswith(("embedding.", "decoder.layers.0."))
        if first or name.startswith(("decoder.layers.2.input_layernorm", "decoder.layers.2.self_attention.linear_qkv")):
            param.requires_grad_(False)


def frozen_stage(chunks) -> None:
    """The first half of the model: with two pipeline ranks, all that the first one has."""
    for name, param in named(chunks):
        if name.startswith(("embedding.", "decoder.layers.0.", "decoder.layers.1.")):
            param.requires_grad_(False)


def unused(chunks) -> None:
    """A parameter in each layer that no forward reads."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.unread = torch.nn.Parameter(torch.ones(3, 5, dtype=next(chunk.parameters()).dtype))


def seldom(chunks) -> None:
    """A factor on each layer's output that half of the samples skip: not in the graph of a micro-batch of such."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.seldom = torch.nn.Parameter(
                torch.linspace(0.5, 1.5, layer.config.hidden_size).to(next(layer.parameters()))
            )
            layer.forward = partial(_times_seldom, layer, layer.forward)


def _times_seldom(layer, forward, *args, **kwargs):
    hidden, *rest = forward(*args, **kwargs)
    if (reads := _reading(hidden)).any():
        hidden = torch.where(reads, hidden * layer.seldom, hidden)
    return hidden, *rest


def gated(chunks) -> None:
    """A factor on the final norm's output that half of the samples skip. Where its gradient comes it is the first."""
    for chunk in chunks:
        if (norm := chunk.decoder.final_layernorm) is not None:
            norm.gate = torch.nn.Parameter(torch.linspace(0.5, 1.5, norm.weight.numel()).to(norm.weight))
            norm.register_forward_hook(
                lambda norm, _args, hidden: (
                    torch.where(reads, hidden * norm.gate, hidden) if (reads := ~_reading(hidden)).any() else hidden
                )
            )


def gated_above_frozen(chunks) -> None:
    """The same on a frozen embedding and first layer: the last gradient is that of a recomputed layer."""
    gated(chunks)
    for name, param in named(chunks):
        if name.startswith(("embedding.", "decoder.layers.0.")):
            param.requires_grad_(False)


def _reading(hidden):
    """Which samples read it, of [sequence, sample, hidden]: by two numbers that are further apart than rounding."""
    return (hidden[:1, :, :1] > hidden[:1, :, 1:2]).detach()


def dropped(chunks) -> None:
    """Layers that half of the samples skip: not run in a micro-batch of such."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.forward = partial(_unless_dropped, layer.forward)


def _unless_dropped(forward, hidden_states, *args, **kwargs):
    if not (reads := _reading(hidden_states)).any():
        return hidden_states.clone(), None
    hidden, *rest = forward(*args, hidden_states=hidden_states, **kwargs)
    return torch.where(reads, hidden, hidden_states), *rest


def left_out(chunks) -> None:
    """Layer 1, which the third micro-batch of the last rank does not call at all."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class LeftOut(TransformerLayer):
        calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 3 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                return kwargs["hidden_states"], None
            return super().__call__(*args, **kwargs)

    for chunk in chunks:
        chunk.decoder.layers[1].__class__ = LeftOut


def uncalled(chunks) -> None:
    """Layers without experts, which a micro-batch calls if one of its samples does not skip them."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class Uncalled(TransformerLayer):
        def __call__(self, *args, **kwargs):
            return _unless_dropped(super().__call__, kwargs.pop("hidden_states"), *args, **kwargs)

    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if not isinstance(layer.mlp, MoELayer):
            layer.__class__ = Uncalled


def skipping(chunks) -> None:
    """Experts that are not called where they have no token, so that they get no gradient there."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SequentialMLP):
                for expert in module.local_experts:
                    expert.forward = partial(_unless_empty, expert.forward)


def _unless_empty(forward, hidden, *args, **kwargs):
    if len(hidden):
        return forward(hidden, *args, **kwargs)
    _skipped.append(True)
    return torch.zeros_like(hidden), None


_skipped: list[bool] = []


def named(chunks):
    from megaaccum.model import names

    return list(names.named_parameters(chunks))


def changed(change: Change) -> None:
    """Have the models of this process changed as they are built."""
    from megaaccum.pretrain.model import gpt

    build = gpt.build_chunks

    def build_and_change(*args, **kwargs):
        chunks = build(*args, **kwargs)
        change(chunks)
        return chunks

    gpt.build_chunks = build_and_change


def gradients(cases: list[Case], change: Change) -> list[Gradient]:
    """`parity.gradients` of the changed model, of its second step: the first may leave something."""
    changed(change)
    found = [second_gradient(case) for case in cases]
    assert _skipped or change is not skipping, "every expert had tokens in every micro-batch"
    return found


def second_gradient(case: Case) -> Gradient:
    """`parity.gradient`, after a step whose gradient was discarded."""
    rig = Rig.of(case)
    with patch.object(rig.backend, "step", lambda: None):
        rig.train()
    rig.backend.discard()
    gradient, _ = rig.watched(step=1)
    trained = {name for name, param in named(rig.chunks) if param.requires_grad}
    return replace(gradient, parts={name: part for name, part in gradient.parts.items() if name in trained})


def references(change: Change, model_flags: str, global_batch: int, dtypes: list[str]) -> list[parity.Reference]:
    """`parity.reference` of the changed model, in each precision."""
    changed(change)
    return [parity.reference(model_flags, global_batch, dtype) for dtype in dtypes]
