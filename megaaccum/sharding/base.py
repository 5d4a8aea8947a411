"""A backend: the object that fills Megatron's five hooks for one way of sharding.

A backend decides when parameters are gathered, in which backward gradients are reduced, and what this rank's part of
the reduced gradient is. It does not divide (step/loss.py), take norms (step/grad_norm.py) or judge a step (step/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaaccum.model import names
from megaaccum.observe.memory import HighWater
from megaaccum.sharding.owner_sums import OwnerSums
from megaaccum.sharding.reduction import sum_over_tp, sum_tied_copies
from megaaccum.sharding.sum_tree import AnyOrder

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.ownership import MatrixUpdates

GradSync = Callable[..., Any] | list[Callable[..., Any]] | None
"""Megatron takes one function, one per chunk, or none."""


@dataclass(frozen=True, slots=True)
class GradShard:
    """This rank's part of one parameter's reduced gradient, after `finish_reduction`.

    name: the parameter's name in the whole model. grad: flat view, in the precision that the optimizer reads; writing
    to it changes what the optimizer sees. start: offset of the part in the flattened parameter, in elements. replica:
    of the data-parallel ranks that hold the same numbers, which one this is; the norm counts them on number 0.
    """

    name: str
    param: torch.nn.Parameter
    grad: torch.Tensor
    start: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class StatePiece:
    """This rank's part of one parameter's training state.

    name: in the whole model. start: offset in the flattened parameter (its part on this tp rank), in elements.
    tensors: flat views {"param": master weight, "exp_avg", "exp_avg_sq"}, of Muon's matrices {"param",
    "momentum_buffer"} (a piece each if the owner keeps it), of a frozen parameter {"param": weight}; writing to them
    and then `adopt_state` changes the model. replica: of the data-parallel ranks that hold the same piece, which one
    this is.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]
    replica: int = 0


def whole_frozen_pieces(chunks: list[torch.nn.Module], groups: Groups) -> Iterator[StatePiece]:
    """Frozen parameters of a backend that cuts only those that are trained: each data-parallel rank has them whole."""
    for name, param in names.named_parameters(chunks):
        if not param.requires_grad:
            replica = names.dp_group(param, groups).rank()
            yield StatePiece(name, param, 0, {"param": param.detach().view(-1)}, replica)


class ShardingBackend(Protocol):
    """One way of sharding, as Megatron's schedules see it. Every method is collective over the data-parallel group."""

    reduction_divisor: int
    """By how much the reduction divides the sum over ranks (data-parallel averaging); step/loss.py takes it back."""

    loss_scale: float
    """Scale of the loss in the backward pass (FP16), the same on every rank; 1 elsewhere."""

    matrices: MatrixUpdates | None
    """Muon's updates, which take the place of the gradients of matrices before `step`; None with another optimizer."""

    sums: AnyOrder
    """Sums of the micro-batches' gradients. Sums in one order track the running micro-batch and keep waiting sums."""

    memory: HighWater
    """The most bytes that it held since the last call, by kind."""

    at_owners: OwnerSums
    """Sums and momenta of matrices whose gradients are reduced straight to their owners."""

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Bytes that it holds now, by kind (observe/memory.py)."""

    before_reduce: Callable[[str, torch.Tensor], None] | None
    """Called with the name and the whole local gradient of each parameter before it is reduced, if set."""

    def param_sync_func(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Make a chunk's parameters whole. Called by Megatron before a chunk's first forward (interleaved), and by
        `begin_step` for every other schedule; a second call finds nothing to do."""

    def no_sync_func(self) -> AbstractContextManager[None]:
        """Around all but a chunk's last backward: gradients are only added up on this rank. Outside it, every gradient
        that arrives is final. It is entered and left once per chunk, or, under a split backward, around each action."""

    grad_sync_func: GradSync
    """None: gradients are reduced bucket by bucket inside each chunk's last backward, under its compute. Else, one or
    one per chunk, called when a chunk's gradients are all there."""

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        """After each flush: nothing of it is under way any more but the reduction, if it was the step's last."""

    def grad_scale_func(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss * loss_scale`. The schedules call it where a backward starts, in the last stage, and nowhere else."""

    def begin_step(self) -> None:
        """Parameters are whole after this on every rank, and gradients empty."""

    def gather(self) -> None:
        """Parameters are whole after this on every rank (evaluation)."""

    def gather_ahead(self) -> None:
        """Start the collective that the next `gather` waits for, if the backend has one."""

    def whole(self) -> AbstractContextManager[None]:
        """Context in which, between flushes, the chunks' parameters are whole plain tensors, for code that reads or
        writes a model through its modules. Writes take effect when they are copied into `state` and adopted."""

    def set_last_flush(self, last: bool) -> None:
        """Whether the next flush is the step's last, the one whose last backward reduces."""

    can_defer: bool
    """Whether gradients of a flush that was not the last may wait, unreduced, for `finish_reduction`. If not, the last
    flush of every call of `forward_backward` is a last one, and reductions add up."""

    def resume_accumulation(self) -> None:
        """Reopen a step after its last flush; later flushes add to its gradients."""

    def finish_reduction(self) -> None:
        """After the step's flushes, reduce the gradients that no last backward has reduced, then sum over tp and over
        the two copies of a tied embedding."""

    def shards(self) -> Iterator[GradShard]:
        """This rank's parts of the reduced gradient, after `finish_reduction`; of matrices that are reduced to their
        owners, what this rank keeps."""

    def own_shards(self) -> Iterator[GradShard]:
        """The gradients that the optimizer reads in `step`, in which updates of matrices are put."""

    def step(self) -> None:
        """Run the optimizer on the gradients as they are now."""

    def copy_gradients(self) -> Callable[[], None]:
        """Copy the reduced gradients. Returns a function that passes the copy to the optimizer, also after `step`."""

    def discard(self) -> None:
        """Drop the gradients of this step, leaving weights and optimizer state as they were."""

    def state(self) -> Iterator[StatePiece]:
        """This rank's parts of weights, frozen ones too, and optimizer state, momenta at owners included."""

    def own_state(self) -> Iterator[StatePiece]:
        """`state` without momenta at owners."""

    def adopt_state(self, num_steps: int) -> None:
        """Make the contents of `state` the model after `num_steps` optimizer steps."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, for the learning-rate schedule."""


def sums_of(param: torch.nn.Parameter, grad: torch.Tensor | None, sums: AnyOrder) -> list[torch.Tensor]:
    """This rank's sums of a parameter's gradients that are about to cross ranks: `grad` and the others."""
    return [each for each in (grad, *sums.others(param)) if each is not None]


def copied_gradients(backend: ShardingBackend) -> Callable[[], None]:
    """`copy_gradients` of a backend whose gradients stay where they are through the optimizer's step."""
    grads = [shard.grad for shard in backend.shards()]
    copies = [grad.clone() for grad in grads]

    def give_back() -> None:
        for grad, copy in zip(grads, copies, strict=True):
            grad.copy_(copy)

    return give_back


class ReducedSoFar:
    """Reduced gradients that were set aside, because more of them comes: a copy of each shard."""

    def __init__(self) -> None:
        self._shards: list[torch.Tensor] = []

    def clear(self) -> None:
        self._shards = []

    def add(self, backend: ShardingBackend) -> None:
        """Add the kept gradients to the backend's reduced gradients, and keep a copy of the sums."""
        self.give_back(backend)
        self._shards = [shard.grad.clone() for shard in backend.shards()]

    def give_back(self, backend: ShardingBackend) -> None:
        """Add the kept gradients to the backend's reduced gradients, and drop them."""
        if self._shards:
            for shard, kept in zip(backend.shards(), self._shards, strict=True):
                shard.grad.add_(kept)
            self.clear()


class Backend:
    """The common part of all backends: one that gathers nothing ahead, and whose gradients stay where they are."""

    grad_sync_func: GradSync = None
    can_defer = True
    loss_scale = 1.0
    before_reduce: Callable[[str, torch.Tensor], None] | None = None
    matrices: MatrixUpdates | None = None
    sums: AnyOrder = AnyOrder()

    def __init__(self, groups: Groups, chunks: list[torch.nn.Module]):
        self.memory = HighWater()
        self._groups, self._chunks = groups, chunks
        self._last_flush = True
        self.at_owners = OwnerSums(groups)

    def own_shards(self) -> Iterator[GradShard]:
        """This backend's parts of the gradient."""
        raise NotImplementedError

    def own_state(self) -> Iterator[StatePiece]:
        """This backend's parts of weights and optimizer state."""
        raise NotImplementedError

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """This backend's tensors, by kind."""
        raise NotImplementedError

    def shards(self) -> Iterator[GradShard]:
        yield from (shard for shard in self.own_shards() if not self.at_owners.takes(shard.param))
        for name, owned in self.at_owners.owned.items():
            assert owned.grad is not None, f"{name} has no gradient"
            yield GradShard(name, owned.param, owned.grad, 0)

    def state(self) -> Iterator[StatePiece]:
        yield from self.own_state()
        for name, owned in self.at_owners.owned.items():
            yield StatePiece(name, owned.param, 0, {"momentum_buffer": owned.momentum})

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        held, owned = self.own_tensors(), self.at_owners.owned.values()
        for kind, more in (("optimizer", [o.momentum for o in owned]), ("gradients_shard", [o.grad for o in owned])):
            if found := [each for each in more if each is not None]:
                held[kind] = [*held.get(kind, ()), *found]
        return held

    def param_sync_func(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do: parameters are whole, or a module's forward gathers them."""

    def gather(self) -> None:
        """Nothing to do, as for `param_sync_func`."""

    def gather_ahead(self) -> None:
        """Nothing to do."""

    def grad_scale_func(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def set_last_flush(self, last: bool) -> None:
        self._last_flush = last

    def copy_gradients(self) -> Callable[[], None]:
        return copied_gradients(self)  # type: ignore[arg-type]


class UnshardedBackend(Backend):
    """The common part of backends whose parameters and unreduced gradients are whole on each rank (DDP, Megatron).

    A backend brings `begin_accumulation`, and `_reduce`: all that no last backward has reduced.
    """

    def __init__(self, groups: Groups, chunks: list[torch.nn.Module]):
        super().__init__(groups, chunks)
        self._reduced = False
        self._kept = ReducedSoFar()

    def _reduce(self) -> None:
        raise NotImplementedError

    def begin_accumulation(self) -> None:
        """Empty the gradients for the next flushes."""
        raise NotImplementedError

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self) -> None:
        self._kept.clear()
        self.begin_accumulation()

    def resume_accumulation(self) -> None:
        self._reduce()
        self._kept.add(self)  # type: ignore[arg-type]
        self.begin_accumulation()

    def finish_reduction(self) -> None:
        """Both cut the two copies of a tied embedding alike (Megatron gives it a bucket of its own)."""
        self._reduce()
        self._kept.give_back(self)  # type: ignore[arg-type]
        sum_over_tp(self, self._groups)  # type: ignore[arg-type]
        sum_tied_copies(self, self._groups)  # type: ignore[arg-type]


def measure_memory(backend: ShardingBackend) -> None:
    """Record in `backend.memory` the bytes that the backend holds now."""
    backend.memory.measure(backend.tensors)


def fill_hooks(backend: ShardingBackend, chunks: list[torch.nn.Module]) -> None:
    """Put the backend's five hooks into the chunks' Megatron configuration."""

    def finalize(*args: Any, **kwargs: Any) -> None:
        measure_memory(backend)
        backend.finalize_model_grads_func(*args, **kwargs)

    configs: dict[int, Any] = {id(chunk.config): chunk.config for chunk in chunks}
    for config in configs.values():
        config.no_sync_func = backend.no_sync_func
        config.param_sync_func = backend.param_sync_func
        config.grad_sync_func = backend.grad_sync_func
        config.grad_scale_func = backend.grad_scale_func
        config.finalize_model_grads_func = finalize
