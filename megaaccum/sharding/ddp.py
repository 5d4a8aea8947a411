"""The backend for torch DistributedDataParallel: nothing is sharded, gradients are all-reduced once per step.

FP32 and FP64 parameters keep their precision everywhere, which makes it the lane in which the mathematics of schedule,
divisor and sums is checked to 1e-12. 16-bit ones have FP32 masters: their gradients are handed to these, which DDP
reduces and the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megaaccum.model import names
from megaaccum.sharding.base import GradShard, StatePiece, UnshardedBackend, sums_of, whole_frozen_pieces
from megaaccum.sharding.in_one_order import all_reduce_hook as all_reduce_in_one_order
from megaaccum.sharding.sum_tree import MicrobatchSums, order_of
from megaaccum.upstream import adam, pytorch

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups


class DdpBackend(UnshardedBackend):
    """Fills Megatron's five hooks for one torch DDP per chunk.

    The schedules call the bare chunks; DDP contributes its reducer, which learns before a chunk's last backward that
    the gradients it will see are final. optimizer: a torch optimizer over the chunks' parameters.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        super().__init__()
        self._groups = groups
        self._chunks = chunks
        self._optimizer = optimizer
        self._buckets: dict[tuple[int, int], torch.Tensor] = {}
        self._masters = {id(param): _master(param) for _, param in names.named_parameters(chunks) if _is_16_bit(param)}
        """FP32 master weight of each 16-bit parameter that is trained."""
        named = names.named_parameters(chunks)
        self._parameters = [(name, self._masters.get(id(param), param)) for name, param in named]
        self._names = {id(param): name for name, param in self._parameters}
        for group in optimizer.param_groups:
            group["params"] = [self._masters.get(id(param), param) for param in group["params"]]
        owners = [self._owner(chunk) for chunk in chunks if _trainable(chunk)]
        self._ddp = [DistributedDataParallel(owner, process_group=groups.dp_cp) for owner in owners]
        order, self.sums = order_of(plan), MicrobatchSums.from_plan(plan, groups)
        average = allreduce_hook if groups.dp_cp.size() > 1 else noop_hook
        self._reduce_bucket = average if order is None else partial(all_reduce_in_one_order, order, self.sums)
        for param in self._compute_params():
            param.grad_dtype = torch.float32  # else what arrives in FP32 (of torch's RMSNorm) would be rounded
            pytorch.on_gradient(param, self._hand_to_master)
        for ddp in self._ddp if self.sums.in_one_order else ():
            for param in _trainable(ddp):
                pytorch.on_gradient(param, self._on_gradient)
        for number, ddp in enumerate(self._ddp):
            ddp.register_comm_hook((number, groups.dp_cp), self._show_and_reduce)
        self.reduction_divisor = groups.dp_cp.size() if order is None else 1
        self.replica = groups.dp_cp.rank()
        self._syncing = False
        self._waiting: list[DistributedDataParallel] = []
        self._arrived: set[int] = set()
        if plan.layout.splits_backward:
            self.grad_sync_func = self.reduce_chunk
        else:
            for ddp in self._ddp:
                for param in _trainable(ddp):
                    param.register_hook(partial(self._before_gradient, ddp, param))

    def _owner(self, chunk: torch.nn.Module) -> torch.nn.Module:
        """The module whose parameters DDP reduces: the chunk itself, or one of its masters and what has none."""
        if not self._masters:
            return chunk
        return torch.nn.ParameterList([self._masters.get(id(param), param) for param in _trainable(chunk)])

    def _compute_params(self) -> list[torch.nn.Parameter]:
        """The 16-bit parameters that have masters, in the order of these."""
        return [param for _, param in names.named_parameters(self._chunks) if id(param) in self._masters]

    def _hand_to_master(self, param: torch.nn.Parameter) -> None:
        """Add a micro-batch's gradient to the master's in FP32, as a backward of its own: DDP's reducer (torch 2.13)
        refuses gradients of another precision than the parameter's, so it is given the masters."""
        assert param.grad is not None
        grad, param.grad = param.grad, None
        pytorch.add_by_autograd(self._masters[id(param)], grad)

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Gradients of the backwards inside stay on this rank. It may be entered again for another chunk."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = self._last_flush

    def _before_gradient(self, ddp: DistributedDataParallel, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """A chunk's first final gradient is about to be added: from now on each of its gradients is."""
        if self._syncing:
            self._arrived.add(id(param))
            if ddp in self._waiting:
                self._waiting.remove(ddp)
                pytorch.ddp_expect_gradients(ddp)

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Take the micro-batch's gradient, before DDP's reducer looks; outside `no_sync_func` it is the last."""
        if not self.sums.accept(param) and self._syncing:
            self.sums.give_back(param)

    def reduce_chunk(self, params: Iterator[torch.nn.Parameter]) -> None:
        """All-reduce a chunk whose gradients are all there.

        Under a split backward a matrix' gradient of an early micro-batch may come after a norm's last one, and DDP's
        reducer takes one gradient per parameter once it expects any. So it is given them at the end, as zeros to add.
        """
        mine = {id(self._masters.get(id(param), param)) for param in params}
        for ddp in self._ddp if self._last_flush else ():
            if any(id(param) in mine for param in ddp.parameters()):
                self._give_zeros(ddp)

    def _give_zeros(self, ddp: DistributedDataParallel) -> None:
        """Let DDP's reducer have a gradient of every parameter: of those that got none, zeros (they may have some of
        earlier micro-batches). It sends its buckets in one order on all ranks, whichever of them lack some."""
        if ddp in self._waiting:
            self._waiting.remove(ddp)
            pytorch.ddp_expect_gradients(ddp)
        missing = [param for param in _trainable(ddp) if id(param) not in self._arrived]
        for param in missing:
            self.sums.give_back(param)
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(param) for param in missing])

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        self._syncing = False
        if self._last_flush:
            self._reduce()

    def _reduce(self) -> None:
        """All-reduce gradients that are not reduced yet. DDP waits for it here, so the last flush does it."""
        if self._reduced:
            return
        for ddp in self._ddp if self.grad_sync_func is None or self._waiting else ():
            self._give_zeros(ddp)
        assert not self._waiting, "a chunk was not reduced"
        self._reduced = True

    def _show_and_reduce(self, place, bucket):  # type: ignore[no-untyped-def]
        """DDP's reduction of a bucket (dist.GradBucket), the rank's own gradients shown to `before_reduce` first. Also
        the traffic of a reduction without any hook, which DDP makes in C++, would not be counted.
        Without annotations: torch reads them and takes no strings."""
        number, group = place
        self._buckets[number, bucket.index()] = bucket.buffer()
        if self.before_reduce is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                for each in sums_of(param, grad, self.sums):
                    self.before_reduce(self._names[id(param)], each)
        return self._reduce_bucket(group, bucket)

    def begin_accumulation(self) -> None:
        self._waiting, self._syncing, self._reduced = list(self._ddp), False, False
        self._arrived.clear()
        self.sums.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def shards(self) -> Iterator[GradShard]:
        """The whole gradient of every parameter that is trained, equal on all data-parallel ranks."""
        for name, param in self._parameters:
            if not param.requires_grad:
                continue
            assert param.grad is not None, f"{name} has no gradient"
            yield GradShard(name, param, param.grad.view(-1), 0)

    def step(self) -> None:
        self._optimizer.step()
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Set the 16-bit parameters to their rounded masters."""
        for param in self._compute_params():
            param.copy_(self._masters[id(param)])

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[StatePiece]:
        for name, param in self._parameters:
            if param.requires_grad:
                yield StatePiece(name, param, 0, adam.adam_views(self._optimizer, param))
        yield from whole_frozen_pieces(self._chunks, self.replica)

    def adopt_state(self, num_steps: int) -> None:
        adam.set_adam_step(self._optimizer, [p for ddp in self._ddp for p in _trainable(ddp)], num_steps)
        self._round_masters()

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Gradients are held twice: as parameters' own, and in DDP's buckets, once a reduction has shown these."""
        params = [param for _, param in names.named_parameters(self._chunks)]
        grads = [param.grad for _, param in self._parameters if param.grad is not None]
        grads += self.sums.tensors()
        return {
            "parameters_whole": params,
            "gradients_whole": [*grads, *self._buckets.values()],
            "optimizer": [*self._masters.values(), *adam.optimizer_tensors(self._optimizer)],
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups


def _is_16_bit(param: torch.nn.Parameter) -> bool:
    """Whether it is trained in a precision in which sums and updates would round to nothing."""
    return param.requires_grad and param.dtype in (torch.bfloat16, torch.float16)


def _master(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """An FP32 copy of the parameter, with Megatron's attributes."""
    master = torch.nn.Parameter(param.detach().float())
    vars(master).update(vars(param))
    return master


def _trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]
