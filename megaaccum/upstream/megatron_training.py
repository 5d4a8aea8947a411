"""The parts of Megatron-LM's `megatron.training` that the models are built with, and its pretraining loop
(megatron-core 0.19.2).

Import these names from here: importing `megatron.training` itself gives the program's root logger a handler and level
INFO. Megatron's functions, arguments and models have no types: `Any`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, cast

from megaaccum.platform import cpu, quiet
from megaaccum.platform.replacing import replaced
from megaaccum.upstream.lookup import absent

with quiet.root_logger_kept():
    from megatron.training.models import gpt as gpt_builder
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
    from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

__all__ = [
    "GPTModelBuilder",
    "GPTModelConfig",
    "HybridModelBuilder",
    "HybridModelConfig",
    "answer_for_cuda",
    "args_of_run",
    "check",
    "flags_of_run",
    "function",
    "gpt_builder",
    "in_place_of",
]

_NAMES = {
    "training.training": (
        "pretrain train get_model get_megatron_optimizer get_forward_backward_func initialize_megatron"
        " set_jit_fusion_options"
    ).split(),
    "training.initialize": ["_compile_dependencies"],
    "training.arguments": ["get_device_arch_version", "add_megatron_arguments"],
    "training.global_vars": ["get_args"],
    "core.parallel_state": ["is_pipeline_first_stage", "is_pipeline_last_stage"],
}
"""Names that are called or replaced below, by module."""


def _module(name: str) -> ModuleType:
    """A module of Megatron's; its loop takes a second to import, which only its users pay."""
    with quiet.root_logger_kept():
        return importlib.import_module(f"megatron.{name}")


def check() -> list[str]:
    """Names that this version of Megatron lacks, as sentences; empty when all is well."""
    return [problem for module, names in _NAMES.items() for problem in absent(_module(module), names)]


def args_of_run() -> Any:
    """Megatron's arguments of this run, as its parser has set them."""
    return _module("training.global_vars").get_args()


@cache
def _actions() -> list[argparse.Action]:
    """Megatron's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _module("training.arguments").add_megatron_arguments(parser)
    return parser._actions


_CHECKED = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "None": "auto", "1": None}
"""Values that Megatron's check gives to arguments, and what stood there before it: names of dtypes, sizes."""


_FILLED_IN = {
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}
"""Arguments that Megatron's check sets to the value of another one where they are left out."""


def flags_of_run(args: Any) -> dict[str, str]:
    """The arguments that differ from Megatron's defaults, by destination, as flags."""
    found: dict[str, str] = {}
    for action in _actions():
        value, default = getattr(args, action.dest, action.default), action.default
        if default in (value, _CHECKED.get(str(value), value)):
            continue
        if action.dest in _FILLED_IN and value == getattr(args, _FILLED_IN[action.dest]):
            continue
        if action.nargs != 0:
            words = value if isinstance(value, list | tuple) else [value]
            found[action.dest] = " ".join([action.option_strings[0], *map(str, words)])
        elif action.const == value:
            found[action.dest] = action.option_strings[0]
    return found


def function(name: str) -> Callable[..., Any]:
    """A function of Megatron's loop."""
    return cast("Callable[..., Any]", getattr(_module("training.training"), name))


@contextmanager
def in_place_of(**names: Callable[..., Any]) -> Iterator[None]:
    """Context in which Megatron's loop (and parallel_state) calls these functions under its own names: it gets its
    model, its optimizer and its schedule from functions of its module, and there are no arguments for others."""
    replaceable = ("training.training", "core.parallel_state")
    modules = {name: _module(module) for module in replaceable for name in _NAMES[module]}
    assert names.keys() <= modules.keys(), f"{names.keys()} are not all names of Megatron's loop"
    with ExitStack() as stack:
        for name, ours in names.items():
            stack.enter_context(replaced(modules[name], **{name: ours}))
        yield


def answer_for_cuda() -> None:
    """On the CPU lane, install stand-ins for the six calls by which Megatron's argument parser and its loop need a GPU.

    They ask for its architecture (twice), select it, refuse to initialise without it, compile C++ that the wheel has no
    source of, and warm up fused kernels. No-op with a GPU.
    """
    import torch

    if cpu.has_accelerator():
        return
    cuda: Any = torch.cuda
    training: Any = _module("training.training")
    initialization: Any = _module("training.initialize")
    arguments: Any = _module("training.arguments")
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.set_device = lambda device: None
    arguments.get_device_arch_version = lambda: 9
    initialization._compile_dependencies = lambda: None
    training.set_jit_fusion_options = lambda tp_size=None: None
    initialize = training.initialize_megatron
    if getattr(initialize, "on_cpu", False):
        return

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        # Megatron makes groups and random states only if it counts a device.
        with replaced(cuda, device_count=lambda: 1):
            return initialize(*args, **(kwargs | {"allow_no_cuda": True}))

    training.initialize_megatron = initialize_megatron
    training.initialize_megatron.on_cpu = True
