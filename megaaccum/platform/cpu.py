"""The CPU lane: what Megatron-core needs in order to run where there is no accelerator.

Megatron-core 0.19 names CUDA in a few places (receive buffers of the pipeline, the token counter of the schedules, the
random-number tracker, `.cuda()` when tied embeddings are made equal). `install()` gives those places a CPU answer. It
does nothing where a GPU is found, and nothing else in the package knows about it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_installed = False

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "ones_like", "empty_like")


@functools.cache
def has_accelerator() -> bool:
    """True where torch finds a CUDA device, looked for once. Initialises no CUDA context."""
    import torch

    return torch.cuda.is_available()


def device() -> torch.device:
    """The torch.device that this rank computes on."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_accelerator() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of this lane."""
    return "nccl" if has_accelerator() else "gloo"


def install() -> None:
    """Prepare this process for the CPU lane; call it before Megatron or DeepSpeed is imported. No-op with a GPU."""
    global _installed
    if _installed or has_accelerator():
        return
    _hide_gpu_extensions()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _redirect_factories()
    _redirect_cuda_module()
    _redirect_rng()
    _redirect_all_to_all()
    _allow_fp16()
    _installed = True


@contextlib.contextmanager
def cuda_type_names():
    """Inside, `tensor.type()` names CPU tensors as CUDA's, where there is no GPU: Megatron's distributed optimizer
    sorts parameters by that name when it is built."""
    import torch

    if has_accelerator():
        yield
        return
    plain = torch.Tensor.type

    def named(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = plain  # type: ignore[method-assign]


def _hide_gpu_extensions() -> None:
    """Make Megatron take its own layers: Transformer Engine's and apex's optimizers and kernels fail on a CPU."""
    loaded = [name for name in ("transformer_engine", "apex") if sys.modules.get(name) is not None]
    if loaded:
        raise RuntimeError(f"megaaccum.platform.cpu.install() has to run before {', '.join(loaded)} is imported")
    for name in ("transformer_engine", "apex"):
        sys.modules[name] = None  # type: ignore[assignment]  # import then raises ModuleNotFoundError


def _on_cpu(factory):
    """`factory` with a CUDA device argument read as the CPU; pinned memory needs a driver, and is plain memory here."""
    import torch

    @functools.wraps(factory)
    def make(*args, device=None, **kwargs):
        kwargs.pop("pin_memory", None)
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _redirect_factories() -> None:
    import torch

    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


class _Stream:
    """A stream on a device that has only one order of execution."""

    def __init__(self, *args, **kwargs): ...

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *args, **kwargs): ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _redirect_cuda_module() -> None:
    import torch

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _Stream  # a class: libraries name it in annotations
    cuda.Event = _Event


def _allow_fp16() -> None:
    """DeepSpeed refuses FP16 where the processor has no FP16 arithmetic of its own. torch computes in FP16 on any
    processor, slowly, which is all that a test of the loss scale needs."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def _redirect_all_to_all() -> None:
    """Take split sizes as tensors too: Megatron turns those of its expert dispatcher into numbers when it copies them
    from the GPU, and here they are on the CPU already."""
    import torch

    exchange = torch.distributed.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        return exchange(output, input, _numbers(output_split_sizes), _numbers(input_split_sizes), *args, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single


def _numbers(sizes):
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _redirect_rng() -> None:
    """Let Megatron's tracker of CUDA random states track the CPU's, which is the one that dropout draws from here.

    `torch.manual_seed` calls `torch.cuda.manual_seed_all`, so the stand-in seeds the generator itself.
    """
    import torch

    def get_state(device=None):
        return torch.default_generator.get_state()

    def set_state(state, device=None):
        torch.default_generator.set_state(state)

    def seed(value):
        torch.default_generator.manual_seed(value)

    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.get_rng_state = get_state
        module.set_rng_state = set_state
        module.manual_seed = seed

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: set_state(state)
