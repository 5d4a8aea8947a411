"""Modules and parameters that no accumulated step trains, or that a backend's library does not take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from megaaccum.config.schema import ShardingConfig
from megaaccum.errors import listed
from megaaccum.model.names import DTYPES
from megaaccum.upstream import pytorch

_DRIVERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Classes that reduce gradients or cut parameters themselves; Megatron's have the names of torch's."""

_OF_EMBEDDINGS = {
    "sparse": (False, "has sparse gradients, which no backend reduces"),
    "max_norm": (None, "changes its weight in every forward, so that the step depends on how the batch is cut"),
    "scale_grad_by_freq": (False, "divides by a micro-batch's counts: the step depends on how the batch is cut"),
}
"""Options of embeddings that no accumulated step can have: their value without, and the reason."""


def module_problems(chunk: torch.nn.Module) -> Iterator[str]:
    """An error text for each module that another library drives, or whose gradient no accumulation makes."""
    for name, module in chunk.named_modules():
        called = f"{name or 'the model'} ({type(module).__name__})"
        if not _DRIVERS.isdisjoint(kind.__name__ for kind in type(module).__mro__):
            yield (
                f"{called} reduces gradients or cuts parameters already: give the module that it was made of, and set"
                " the plan's sharding"
            )
        if hasattr(module, "running_mean") and getattr(module, "track_running_stats", True):
            yield (
                f"{called} takes statistics of each micro-batch, which no accumulation makes those of the full batch:"
                " replace it by a norm over features (LayerNorm, RMSNorm, GroupNorm)"
            )
        for key, (off, why) in _OF_EMBEDDINGS.items():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and getattr(module, key) != off:
                yield f"{called} {why}: build it with {key}={off}"


def parameter_problems(sharding: ShardingConfig, params: dict[str, torch.nn.Parameter]) -> list[str]:
    """Parameters that no backend takes, that this one's library fails on or would convert, or of another precision than
    the plan's."""
    backend, asked = sharding.backend, sharding.params_dtype or "fp32"
    unfit: dict[str, list[str]] = {}
    first, in_memory = dict[torch.dtype, str](), dict[int, tuple[str, torch.nn.Parameter]]()
    for name, param in params.items():
        first.setdefault(param.dtype, name)
        if not (why := _unfit(backend, param)):
            other, there = in_memory.setdefault(param.data_ptr(), (name, param))
            if there is not param and (there.requires_grad or param.requires_grad):
                why = f"in the memory of {other}, of which a backend makes two; assign that parameter, not its .data"
        if why:
            unfit.setdefault(why, []).append(name)
    problems = [f"{listed(found)}: {why}" for why, found in unfit.items()]
    some = " and ".join(f"{name} in {_named(dtype)}" for dtype, name in first.items())
    if some and DTYPES[asked] not in first and (asked != "fp32" or torch.float16 in first):
        problems.append(
            f"the model has {some}, but params_dtype is {asked}, for which loss scale and backend are set up: convert"
            f" the model to {_named(DTYPES[asked])}, or set params_dtype to what it has"
        )
    if len(first) > 1 and backend in ("deepspeed", "fsdp2"):
        problems.append(
            f"{backend} gives all parameters one dtype, but the model has {some}: convert them, or set backend to"
            " megatron or ddp"
        )
    return problems


def _unfit(backend: str, param: torch.nn.Parameter) -> str:
    """Return why a parameter is not taken, or nothing."""
    if isinstance(param, UninitializedParameter):
        return "without a shape yet; run a forward, which gives a lazy module its parameters, before initialize"
    if isinstance(param, DTensor):
        return "a DTensor; give the model whole, and the plan's layout and sharding cut it"
    if param.is_meta:
        return "on the meta device; give the model memory (to_empty) and its initial weights before initialize"
    if param.numel() == 0:
        return "without an element; leave it out"
    if param.requires_grad and not param.is_floating_point():
        return f"{_named(param.dtype)}; train real numbers, as torch.view_as_real gives them"
    if param.dtype is torch.float64 and backend in ("deepspeed", "megatron"):
        return f"float64, which {backend} does not train; convert it to float32, or set backend to fsdp2 or ddp"
    if backend == "fsdp2" and pytorch.has_hooks(param):
        return "with a hook, which fsdp2 loses, whose parameters are others; set backend to deepspeed, megatron or ddp"
    if param.dim() == 0 and backend in ("deepspeed", "fsdp2"):
        return f"a scalar, which {backend} does not take; make it a tensor of shape [1]"
    return ""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
