"""The CPU lane: stand-ins that Megatron-core needs on a machine without an accelerator.

Megatron-core 0.19 names CUDA in a few places (receive buffers of the pipeline, the token counter of the schedules, the
random-number tracker, `.cuda()` when tied embeddings are made equal). `install()` installs CPU stand-ins for those
calls. It does nothing if a GPU is found, and nothing else in the package knows about it.

A stand-in passes on whatever it is called with, and stubs of torch forbid replacing its functions: hence `Any`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megaaccum.platform.replacing import replaced

if TYPE_CHECKING:
    import torch

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "ones_like", "empty_like")


@functools.cache
def has_accelerator() -> bool:
    """Whether torch finds a CUDA device; asked once. Initialises no CUDA context."""
    import torch

    return torch.cuda.is_available()


def device() -> torch.device:
    """The torch.device that this rank computes on."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_accelerator() else torch.device("cpu")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on this rank's device. From host memory it is copied without the host waiting for the stream, as torch's
    `to` makes it do."""
    target = device()
    return tensor if tensor.device.type == target.type else tensor.pin_memory().to(target, non_blocking=True)


def backend() -> str:
    """The torch.distributed backend of this lane."""
    return "nccl" if has_accelerator() else "gloo"


@functools.cache
def install() -> None:
    """Prepare this process for the CPU lane; call it before Megatron or DeepSpeed is imported. No-op with a GPU, and
    when called again."""
    if has_accelerator():
        return
    _hide_gpu_extensions()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for other vendors' devices
    _redirect_factories()
    _redirect_cuda_module()
    _redirect_rng()
    _redirect_all_to_all()
    _redirect_uneven()
    _adapt_deepspeed()


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Context in which to import Megatron and DeepSpeed. Both call torch.compile where they define functions whose
    fusions are for GPUs, and importing the compiler is a fifth of a start; without a GPU those functions stay as they
    are, as under Megatron's --disable_jit_fuser."""
    if has_accelerator():
        yield
        return
    import torch

    def compile(model: Any = None, **keys: Any) -> Any:
        return (lambda function: function) if model is None else model

    with replaced(torch, compile=compile):
        yield
        from megatron.core import jit

        jit.disable_jit_fuser()  # what is imported later


def cuda_type_names() -> contextlib.AbstractContextManager[None]:
    """Context in which `tensor.type()` names CPU tensors as CUDA's, if there is no GPU: Megatron's distributed
    optimizer sorts parameters by that name when it is built."""
    import torch

    if has_accelerator():
        return contextlib.nullcontext()
    plain: Any = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return replaced(torch.Tensor, type=cuda_name)


def _hide_gpu_extensions() -> None:
    """Make Megatron use its own layers: Transformer Engine's and apex's optimizers and kernels fail on a CPU."""
    extensions = ("transformer_engine", "apex")
    if loaded := [name for name in extensions if sys.modules.get(name) is not None]:
        raise RuntimeError(f"megaaccum.platform.cpu.install() has to run before {', '.join(loaded)} is imported")
    # An import of None raises ModuleNotFoundError.
    sys.modules.update(dict.fromkeys(extensions))  # type: ignore[arg-type]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with a CUDA device argument read as the CPU; pinned memory needs a driver, and is plain memory here."""
    import torch

    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        # An int is a device only to CUDA; torch.device(0) would ask for the accelerator that is not there.
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _redirect_factories() -> None:
    import torch

    # torch lists the functions that `with torch.device(...)` applies to when such a block first makes a tensor. Listed
    # later, the stand-ins would be in the list and the functions that they call would ignore the block: transformers,
    # which builds models under the meta device, would then leave rotary frequencies uninitialised.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron makes tied embeddings equal by `.cuda()`, and records buffers on streams.
    for movable in (torch.Tensor, torch.nn.Module):
        setattr(movable, "cuda", lambda self, *args, **kwargs: self)  # noqa: B010
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None


def _redirect_cuda_module() -> None:
    import torch

    # Classes, because libraries name them in annotations.
    class Event(torch.cpu.Event):
        """torch's of the CPU, which has always happened, with the arguments of CUDA's."""

        def __init__(self, *args: Any, **kwargs: Any): ...

    class Stream(torch.cpu.Stream):
        """torch's of the CPU, which has only one order of execution, with what else CUDA's has."""

        def __init__(self, *args: Any, **kwargs: Any): ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None: ...

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # Megatron passes it on as the device of its buffers
    cuda.synchronize = lambda device=None: None  # not torch.cpu's, which dynamo would then meet twice
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream, cuda.Event = Stream, Event


def _adapt_deepspeed() -> None:
    """Allow FP16 in DeepSpeed, which refuses it on a processor that has no FP16 arithmetic of its own: torch computes
    in it on any, slowly, which is all that a test of the loss scale needs. And have its devices counted once: ZeRO-3
    asks at each bucket, and each time DeepSpeed 0.19 starts `numactl`, which takes 1 % of a small step."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.device_count = functools.cache(accelerator.device_count)


def _redirect_all_to_all() -> None:
    """Accept split sizes as tensors too: Megatron turns those of its expert dispatcher into numbers when it copies them
    from the GPU, but here they are on the CPU already."""
    import torch

    dist: Any = torch.distributed
    exchange = dist.all_to_all_single

    def numbers(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return exchange(output, input, numbers(output_split_sizes), numbers(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def _redirect_uneven() -> None:
    """Gather and reduce-scatter pieces of different lengths, which NCCL does and gloo refuses: where experts are spread
    and cut, Megatron's dispatcher gathers over tp what came from other experts' ranks. Each is one all-to-all here."""
    import torch

    dist: Any = torch.distributed
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def is_uneven(tensors: list[torch.Tensor]) -> bool:
        return len({tensor.shape for tensor in tensors}) > 1

    @functools.wraps(gather)
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_uneven(tensor_list):
            return gather(tensor_list, tensor, *args, **kwargs)
        sizes = [each.numel() for each in tensor_list]
        theirs, mine = tensor.new_empty(sum(sizes)), tensor.reshape(-1).repeat(len(sizes))
        dist.all_to_all_single(theirs, mine, sizes, [tensor.numel()] * len(sizes), *args, **kwargs)
        for each, part in zip(tensor_list, theirs.split(sizes), strict=True):
            each.copy_(part.view_as(each))
        return None

    @functools.wraps(scatter)
    def reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if not is_uneven(input_list):
            return scatter(output, input_list, *args, **kwargs)
        sizes = [each.numel() for each in input_list]
        mine = torch.cat([each.reshape(-1) for each in input_list])
        theirs = output.new_empty(len(sizes), output.numel())
        dist.all_to_all_single(theirs.view(-1), mine, [output.numel()] * len(sizes), sizes, *args, **kwargs)
        output.copy_(theirs.sum(dim=0).view_as(output))
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _redirect_rng() -> None:
    """Let Megatron's tracker of CUDA random states track the CPU's, which is the one that dropout draws from here.

    `torch.manual_seed` calls `torch.cuda.manual_seed_all`, so the stand-in seeds the generator itself.
    """
    import torch

    generator = torch.default_generator  # one for both: Megatron's fork() then sets the state that dropout reads
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.get_rng_state = lambda device=None: generator.get_state()
        module.set_rng_state = lambda state, device=None: generator.set_state(state)
        module.manual_seed = lambda seed: generator.manual_seed(seed)

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: generator.set_state(state)
