"""Tracks, without a GPU, on which device tensors would be with one: NCCL carries no tensor of host memory.

`following()` gives the code under test a device of its own (`cpu.device()` is `cuda:0`). Tensors that it makes there or
moves there are marked, results of operations on marked ones too, and a collective refuses a tensor that is not marked.
All tensors lie on the CPU in truth and the collectives are gloo's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single")


class OnHost(AssertionError):
    """A collective over a GPU's group was given a tensor of host memory."""


@contextmanager
def following() -> Iterator[None]:
    """Follow devices inside; collectives raise OnHost where NCCL would."""
    from megaaccum.platform import cpu

    with ExitStack() as stack:
        stack.enter_context(patch.object(cpu, "device", lambda: GPU))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, _checked(name, getattr(dist, name))))
        stack.enter_context(_Devices())
        yield


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, as one of the GPU."""
    tensor.is_on_gpu = True  # type: ignore[attr-defined]
    return tensor


def _checked(name: str, collective):
    def call(*args, **kwargs):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not _marked(tensor):
                raise OnHost(f"{name} of a tensor {tuple(tensor.shape)} of host memory")
        return collective(*args, **kwargs)

    return call


def _marked(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "is_on_gpu", False)


class _Devices(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:  # each look-up makes another object
            return GPU if _marked(args[0]) else HOST
        if func is torch.Tensor.pin_memory:
            return args[0]
        asked = [each for each in tree_leaves((args[1:], kwargs or {})) if isinstance(each, torch.device)]
        args, kwargs = tree_map_only(torch.device, lambda device: HOST, (args, kwargs or {}))
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        goes = asked[0].type == "cuda" if asked else any(map(_marked, tensors)) and func is not torch.Tensor.cpu
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            return result  # in place: a tensor stays where it is
        if asked and result is args[0]:
            result = result.view_as(result)  # moved: not the same tensor on a GPU
        return tree_map_only(torch.Tensor, on_gpu, result) if goes else result


# --- on ranks --------------------------------------------------------------------------------------------------------


class Offloaded:
    """A sharding backend, as far as sums and norms use one, whose gradients are in host memory."""

    replica = 0

    def __init__(self, names: list[str]):
        from megaaccum.sharding import GradShard
        from megaaccum.sharding.sum_tree import AnyOrder

        self.sums = AnyOrder()

        self._shards = []
        for name in names:
            param = torch.nn.Parameter(torch.zeros(4))
            param.sequence_parallel = True  # type: ignore[attr-defined]
            self._shards.append(GradShard(name, param, torch.full((4,), float(dist.get_rank() + 1)), 0))

    def shards(self):
        return iter(self._shards)


def sums_of_offloaded_gradients() -> tuple[float, list[float]]:
    """(norm, gradient summed over tp) of gradients in host memory, on two ranks."""
    from types import SimpleNamespace

    from megaaccum.sharding.reduction import sum_over_tp
    from megaaccum.step import grad_norm

    groups = SimpleNamespace(tp=dist.group.WORLD)
    backend = Offloaded(["a.weight", "b.weight"])
    with following():
        sum_over_tp(backend, groups)  # type: ignore[arg-type]
        flag = on_gpu(torch.zeros(()))
        norm, *_ = grad_norm.global_norm(backend, groups, along=(), flag=flag, overflow=None)  # type: ignore[arg-type]
    return norm, [float(shard.grad[0]) for shard in backend.shards()]


def partitions_in_host_memory(deterministic: bool) -> list[float]:
    """A partition of [1, 2, 3, 4] * (rank + 1) summed over two ranks, accumulated in host memory."""
    from types import SimpleNamespace

    from megaaccum.sharding.reduction import PartitionReducer
    from megaaccum.sharding.sum_tree import AnyOrder

    sharding = dict(reproducible="none", deterministic=deterministic, grad_reduce_dtype="fp32")
    plan = SimpleNamespace(config=SimpleNamespace(sharding=SimpleNamespace(**sharding)))
    param, partition = torch.nn.Parameter(torch.zeros(4)), torch.zeros(2)
    param.grad = on_gpu(torch.arange(1.0, 5.0) * (dist.get_rank() + 1))
    with following():
        reducer = PartitionReducer(plan, dist.group.WORLD, AnyOrder())  # type: ignore[arg-type]
        reducer.add([(param, partition)])
        reducer.wait()
    return partition.tolist()


def agreements() -> int:
    """Every collective of an agreement; the number that rank 1 got of rank 0."""
    from megaaccum.distributed.agreement import check_agreement

    with following():
        return check_agreement("plan", tell={"rank": dist.get_rank()}, step=1).told["rank"][0]


def a_tensor_of_the_host() -> str:
    """The message where a collective is given one."""
    try:
        with following():
            dist.all_reduce(torch.ones(2))
    except OnHost as error:
        return str(error)
    return "nothing was refused"
