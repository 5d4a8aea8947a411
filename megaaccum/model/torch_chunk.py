"""A model that is one plain torch module (no pipeline), in the form of Megatron's chunks.

A user's module has arguments, outputs and attributes of any type: `Any`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megaaccum.errors import CheckpointError


class TorchChunk(torch.nn.Module):
    """A chunk that passes its arguments on to `module`; attributes that it lacks are the module's.

    Names of parameters are those of `module`. A configuration that the module has is not Megatron's: the engine sets
    `config`, which the schedules read.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        if hasattr(module, "save_pretrained"):
            _guard_save(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no other stage."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _guard_save(module: Any) -> None:
    """Let a transformers model write only weights that it is given: its own are spread over ranks, and under ZeRO-3 it
    would write empty tensors."""
    save = module.save_pretrained

    def save_given(folder: Any, *, state_dict: Any = None, **kwargs: Any) -> Any:
        if state_dict is None:
            raise CheckpointError(
                f"save_pretrained({str(folder)!r}): the engine has spread the weights over ranks."
                " Write, on every rank:\n"
                "    weights = dict(engine.whole_weights(rank=0))\n"
                "    if torch.distributed.get_rank() == 0:\n"
                f"        model.save_pretrained({str(folder)!r}, state_dict=weights)"
            )
        return save(folder, state_dict=state_dict, **kwargs)

    module.save_pretrained = save_given


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's arguments or output: itself, or those in tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping | list | tuple):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(each)


def layers_of(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that sharding treats as units: a Megatron decoder's, else the members of the outermost ModuleLists.
    Of a member that is a list or dict of modules, and so has no forward, its own members."""
    decoder: Any = getattr(chunk, "decoder", None)
    if isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
        return list(decoder.layers)
    return _layers_in(chunk, False)


def _layers_in(module: torch.nn.Module, listed: bool) -> list[torch.nn.Module]:
    if listed and not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        return [module]
    listed = listed or isinstance(module, torch.nn.ModuleList)
    return [found for child in module.children() for found in _layers_in(child, listed)]
