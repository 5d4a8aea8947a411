"""A model that is one plain torch module (no pipeline), in the form of Megatron's chunks.

A user's module has arguments, outputs and attributes of any type: `Any`.
"""

from __future__ import annotations

from typing import Any

import torch


class TorchChunk(torch.nn.Module):
    """A chunk that passes its arguments on to `module`; attributes that it lacks are the module's.

    Names of parameters are those of `module`. A configuration that the module has is not Megatron's: the engine sets
    `config`, which the schedules read.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no other stage."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def layers_of(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that sharding treats as units: a Megatron decoder's, else the members of the outermost ModuleLists."""
    decoder: Any = getattr(chunk, "decoder", None)
    if isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
        return list(decoder.layers)
    return [layer for layers in _outermost_lists(chunk) for layer in layers]


def _outermost_lists(module: torch.nn.Module) -> list[torch.nn.ModuleList]:
    if isinstance(module, torch.nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in _outermost_lists(child)]
