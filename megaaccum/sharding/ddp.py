"""The backend for torch DistributedDataParallel: nothing is sharded, gradients are all-reduced once per step.

FP32 and FP64 parameters keep their precision everywhere, which makes it the lane in which the mathematics of schedule,
divisor and sums is checked to 1e-12. 16-bit ones have FP32 masters: their gradients are handed to these, which DDP
reduces and the optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.sharding import experts
from megaaccum.sharding.base import AccumulatingBackend, GradShard, StatePiece
from megaaccum.sharding.fp32_sums import Fp32Sums
from megaaccum.sharding.in_one_order import all_reduce_hook as all_reduce_in_one_order
from megaaccum.sharding.sum_tree import order_of
from megaaccum.upstream import adam, pytorch


class DdpBackend(AccumulatingBackend):
    """Fills Megatron's five hooks for one torch DDP per chunk.

    The schedules call the bare chunks; DDP contributes its reducer, which learns before a chunk's last backward that
    the gradients it will see are final. optimizer: a torch optimizer over the chunks' parameters.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        super().__init__(plan, groups, chunks)
        self.optimizer = optimizer
        self._buckets: dict[tuple[int, int], torch.Tensor] = {}
        named = list(names.named_parameters(chunks))
        # In 16 bits sums and updates would round to nothing.
        in_16_bit = [param for _, param in named if param.requires_grad and param.element_size() == 2]
        self.copied = [(_master(param), param, 0) for param in in_16_bit]
        self._masters = {id(param): master for master, param, _ in self.copied}
        """FP32 master weight of each 16-bit parameter that is trained."""
        self._parameters = [(name, self._masters.get(id(param), param)) for name, param in named]
        self._names = {id(param): name for name, param in self._parameters}
        for group in optimizer.param_groups:
            group["params"] = [self._masters.get(id(param), param) for param in group["params"]]
        self._of_chunk = [
            [DistributedDataParallel(owner, process_group=_group(owner, groups)) for owner in self._owners(chunk)]
            for chunk in chunks
        ]
        self._ddp = [ddp for ddps in self._of_chunk for ddp in ddps]
        # An average over the ranks of experts would be another than that of the rest. A stage without experts has to
        # divide as others do: the last one's divisor is in the gradients of all.
        sums = order_of(plan, groups.dp_cp) is not None or experts.has_own_ranks(plan)
        self._fp32_sums = Fp32Sums(in_16_bit, chunks)
        for param in in_16_bit:
            pytorch.OnGradient(param, pytorch.weakly(self._hand_to_master))
        for param in (each for ddp in self._ddp if self.sums.in_one_order for each in _trainable(ddp)):
            pytorch.OnGradient(param, pytorch.weakly(self._on_gradient))
        for number, ddp in enumerate(self._ddp):
            ranks = _group(ddp, groups)
            order = order_of(plan, ranks)
            by_collective = noop_hook if ranks.size() == 1 else _all_reduce if sums else allreduce_hook
            reduce = by_collective if order is None else partial(all_reduce_in_one_order, order, self.sums)
            ddp.register_comm_hook((weakref.ref(self), number, ranks, reduce), _show_and_reduce)
        self.reduction_divisor = 1 if sums else groups.dp_cp.size()
        self._waiting: list[DistributedDataParallel] = []
        self._arrived: set[int] = set()
        self._open: list[DistributedDataParallel] = []
        """The reducers of the chunk whose final gradients come now."""
        # A tied embedding's gradient comes twice. A recomputed layer has a backward of its own, at whose end DDP waits
        # for all reductions if its gradients are the rank's last: ranks that have others to come need its experts.
        at_end = plan.config.parallel.overlap_moe_expert_parallel_comm or (
            plan.layout.ep > 1
            and plan.config.model.recompute_granularity is not None
            and plan.config.model.recompute_modules != ["core_attn"]
        )
        if plan.layout.splits_backward:
            self.grad_sync_func = [partial(self.reduce_chunk, number) for number in range(len(chunks))]
        elif not at_end:
            for number, ddps in enumerate(self._of_chunk):
                for param in (param for ddp in ddps for param in _trainable(ddp)):
                    param.register_hook(partial(pytorch.weakly(self._before_gradient), number, id(param)))

    def _owners(self, chunk: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules whose parameters a DDP reduces: the chunk itself, or one of its masters and what has none; and
        one of experts with ranks of their own. None for a chunk that does not train."""
        trained = _trainable(chunk)
        own_ranks = [param for param in trained if names.is_expert(param)]
        if trained and not own_ranks and not self._masters:
            return [chunk]
        parts = ([param for param in trained if not names.is_expert(param)], own_ranks)
        return [torch.nn.ParameterList([self._masters.get(id(p), p) for p in part]) for part in parts if part]

    def _hand_to_master(self, param: torch.nn.Parameter) -> None:
        """Add a micro-batch's gradient to the master's in FP32, as a backward of its own: DDP's reducer (torch 2.13)
        refuses gradients of another precision than the parameter's, so it is given the masters."""
        assert param.grad is not None
        grad, param.grad = param.grad, None
        self._add_to_master(self._masters[id(param)], grad)

    @staticmethod
    def _add_to_master(master: torch.nn.Parameter, grad: torch.Tensor) -> None:
        master.grad_dtype = None if master.grad is not None else torch.float32  # cast what becomes the sum alone
        pytorch.add_by_autograd(master, grad)

    def add_weight_grad(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add a gradient that a W has computed: autograd would copy one that the parameter is given first. Hooks on the
        weight, besides the one that hands its gradient to the master, are called by autograd."""
        if self._open:
            self._arrived.add(id(self._masters.get(id(weight), weight)))
        if (master := self._masters.get(id(weight))) is not None and pytorch.num_hooks(weight) <= 1:
            self._add_to_master(master, grad)
        else:
            pytorch.add_by_autograd(weight, grad)

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Gradients of the backwards inside stay on this rank. It may be entered again for another chunk: the final
        gradients of one are all there then, but for those of experts that saw no token."""
        self._close()
        with super().no_sync_func():
            yield

    def _before_gradient(self, chunk: int, key: int, grad: torch.Tensor) -> None:
        """A chunk's first final gradient is about to be added, of the parameter with the id `key`: from now on each of
        its gradients is."""
        if self._syncing:
            self._arrived.add(key)
            self._expect(self._of_chunk[chunk])

    def _expect(self, ddps: list[DistributedDataParallel]) -> None:
        """Let the reducers of a chunk take the next gradient of each parameter as final."""
        self._open = ddps
        for ddp in (ddp for ddp in ddps if ddp in self._waiting):
            self._waiting.remove(ddp)
            pytorch.ddp_expect_gradients(ddp)

    def _close(self) -> None:
        """Reduce what the chunk's last backward has not brought: zeros, and what earlier micro-batches have left."""
        ddps, self._open = self._open, []
        for ddp in ddps:
            self._give_zeros(ddp, _trainable(ddp))

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Take the micro-batch's gradient, before DDP's reducer looks; outside `no_sync_func` it is the last."""
        if not self.sums.accept(param) and self._syncing:
            self.sums.give_back(param)

    # --- a backward in two parts ---

    def before_weight_grad(self, chunk: int, last: bool) -> None:
        """Let the reducers take the gradients of a chunk's last W, each as it comes.

        A norm's last gradient, of an I, may have come before those of a matrix of early micro-batches, and DDP's
        reducer takes one gradient per parameter once it expects any. So what came in I is given now, as zeros to add.
        """
        if last and self._last_flush and not self.sums.in_one_order:
            late = {id(self._masters.get(id(p), p)) for p in self._chunks[chunk].parameters() if wgrad.is_put_off(p)}
            self._expect(self._of_chunk[chunk])
            for ddp in self._open:
                self._give_zeros(ddp, [param for param in _trainable(ddp) if id(param) not in late])

    def reduce_chunk(self, number: int, params: Iterator[torch.nn.Parameter]) -> None:
        """All-reduce what is left of a chunk whose gradients are all there."""
        if self._last_flush:
            self._expect(self._of_chunk[number])
            self._close()

    def _give_zeros(self, ddp: DistributedDataParallel, params: list[torch.nn.Parameter]) -> None:
        """Let DDP's reducer have a gradient of these parameters: of those that got none, zeros (they may have some of
        earlier micro-batches). It sends its buckets in one order on all ranks, whichever of them lack some."""
        missing = [param for param in params if id(param) not in self._arrived]
        for param in missing:
            self._arrived.add(id(param))
            self.sums.give_back(param)
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(param) for param in missing])

    def _reduce(self) -> None:
        """All-reduce gradients that are not reduced yet. DDP waits for it here, so the last flush does it."""
        if self._reduced:
            return
        self._close()
        for ddps in self._of_chunk:
            if any(ddp in self._waiting for ddp in ddps):
                self._expect(ddps)
                self._close()
        self._reduced = True

    def hold_bucket(self, number: int, bucket: Any) -> None:
        """Show the rank's own gradients of a bucket (dist.GradBucket) of DDP `number`, which is about to be reduced."""
        self._buckets[number, bucket.index()] = bucket.buffer()
        if self.before_reduce is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._show(self._names[id(param)], param, grad)

    def begin_accumulation(self) -> None:
        self._waiting, self._open, self._syncing, self._reduced = list(self._ddp), [], False, False
        self._arrived.clear()
        self.sums.clear()
        self.optimizer.zero_grad(set_to_none=True)
        self._fp32_sums.begin_apart()

    def own_shards(self) -> Iterator[GradShard]:
        """The whole gradient of every parameter that is trained, equal on all data-parallel ranks."""
        for name, param in self._parameters:
            if param.requires_grad:
                assert param.grad is not None, f"{name} has no gradient"
                yield GradShard(name, param, param.grad.view(-1), 0, names.dp_group(param, self._groups).rank())

    def step(self) -> None:
        super().step()
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Set the 16-bit parameters to their rounded masters."""
        for master, param, _ in self.copied:
            param.copy_(master)

    def own_state(self) -> Iterator[StatePiece]:
        for name, param in self._parameters:
            if param.requires_grad:
                replica = names.dp_group(param, self._groups).rank()
                views = adam.views(self.optimizer, param, adam.moments(self.optimizer, param))
                yield StatePiece(name, param, 0, views, replica)
        yield from self.frozen_state()

    def adopt_state(self, num_steps: int) -> None:
        adam.set_adam_step(self.optimizer, [p for ddp in self._ddp for p in _trainable(ddp)], num_steps)
        self._round_masters()

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Gradients are held twice: as parameters' own, and in DDP's buckets, once a reduction has shown these."""
        grads = [param.grad for _, param in self._parameters if param.grad is not None]
        return {
            "parameters_whole": [param for _, param in names.named_parameters(self._chunks)],
            "gradients_whole": [*grads, *self.sums.tensors(), *self._buckets.values()],
            "optimizer": [*self._masters.values(), *adam.optimizer_tensors(self.optimizer)],
        }


def _group(owner: torch.nn.Module, groups: Groups) -> dist.ProcessGroup:
    """The ranks over which the parameters of a DDP are reduced."""
    return names.dp_group(_trainable(owner)[0], groups)


def _show_and_reduce(place, bucket):  # type: ignore[no-untyped-def]
    """DDP's reduction of a bucket, shown to its backend first. Also the traffic of a reduction without any hook, which
    DDP makes in C++, would not be counted. Without annotations: torch reads them and takes no strings."""
    backend, number, group, reduce = place
    backend().hold_bucket(number, bucket)
    return reduce(group, bucket)


def _all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for torch DDP: the sum over `group`."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(lambda done: done.value()[0]))


def _master(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """An FP32 copy of the parameter, with Megatron's attributes."""
    master = torch.nn.Parameter(param.detach().float())
    vars(master).update(vars(param))
    return master


def _trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]
