"""A backend: the object that fills Megatron's five hooks for one way of sharding.

A backend decides when parameters are gathered, in which backward gradients are reduced, and what this rank's part of
the reduced gradient is. It does not divide (step/loss.py), take norms (step/grad_norm.py) or judge a step (step/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from megaaccum.model import names
from megaaccum.observe.memory import HighWater
from megaaccum.platform.replacing import replaced
from megaaccum.sharding.owner_sums import OwnerSums
from megaaccum.sharding.reduction import sum_over_tp, sum_tied_copies
from megaaccum.sharding.sum_tree import AnyOrder, MicrobatchSums
from megaaccum.upstream import pytorch

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.ownership import MatrixUpdates

GradSync = Callable[..., Any] | list[Callable[..., Any]] | None
"""Megatron takes one function, one per chunk, or none."""


class GradShard(NamedTuple):
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


class StatePiece(NamedTuple):
    """This rank's part of one parameter's training state.

    name: in the whole model. start: offset in the flattened parameter (its part on this tp rank), in elements.
    tensors: flat views {"param": master weight, "exp_avg", "exp_avg_sq"}, of Muon's matrices {"param",
    "momentum_buffer"} (a piece each if the owner keeps it), of a frozen parameter {"param": weight}; writing to them
    and then `adopt_state` changes the model. replica: of the data-parallel ranks that hold the same piece, which one
    this is. shape: of a tensor of SOAP's, which this rank alone has, as a whole; None of parts of the parameter.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]
    replica: int = 0
    shape: tuple[int, ...] | None = None


def run_to_its_end(update: Callable[[], object], optimizer: Any) -> None:
    """Run `update`, which calls `optimizer.step`. An error there is raised after the rest of the update, in which other
    ranks wait for this one's share of the new weights."""
    step, raised = optimizer.step, list[BaseException]()

    def run(*args: Any, **keys: Any) -> None:
        try:
            step(*args, **keys)
        except BaseException as error:
            raised.append(error)

    try:
        with replaced(optimizer, step=run):
            update()
    finally:
        if raised:
            raise raised[0]


class ShardingBackend(ABC):
    """One way of sharding, as Megatron's schedules see it. Every method is collective over the data-parallel group.

    What is not abstract here serves a backend that gathers nothing ahead and whose gradients stay where they are.
    `optimizer` has the parameter groups, for the learning-rate schedule.
    """

    optimizer: Any

    reduction_divisor = 1
    """By how much the reduction divides the sum over ranks (data-parallel averaging); step/loss.py takes it back."""

    loss_scale = 1.0
    """Scale of the loss in the backward pass (FP16), the same on every rank; 1 elsewhere."""

    matrices: MatrixUpdates | None = None
    """Updates of Muon or SOAP, which take the place of matrices' gradients before `step`; None with another."""

    before_reduce: Callable[[str, torch.Tensor], None] | None = None
    """Called with the name and the whole local gradient of each parameter before it is reduced, if set."""

    grad_sync_func: GradSync = None
    """None: gradients are reduced bucket by bucket inside each chunk's last backward, under its compute. Else, one or
    one per chunk, called when a chunk's gradients are all there."""

    copied: Sequence[tuple[torch.nn.Parameter, torch.Tensor, int]] = ()
    """(parameter as in `state`, a tensor of the chunks, its offset in the flattened parameter) of weights that the
    chunks have a copy of: an update changes those in `state`, and writes over this."""

    observers: Sequence[Any] = ()
    """Observers of each micro-batch's forward step (step/forward_step.py), with a method `begin_flush(function)`."""

    can_defer = True
    """Whether gradients of a flush that was not the last may wait, unreduced, for `finish_reduction`. If not, the last
    flush of every call of `forward_backward` is a last one, and reductions add up."""

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module]):
        self.memory = HighWater()
        """The most bytes that it held since the last call, by kind."""
        self.sums: AnyOrder = MicrobatchSums.from_plan(plan, groups)
        """Sums of micro-batches' gradients. Sums in one order track the running micro-batch and keep waiting sums."""
        self._groups, self._chunks = groups, chunks
        self._names = {id(param): name for name, param in names.named_parameters(chunks)}
        self._has_tied = any(names.is_tied(param) for chunk in chunks for param in chunk.parameters())
        self._last_flush = True
        self.at_owners = OwnerSums(groups)
        """Sums and momenta of matrices whose gradients are reduced straight to their owners."""

    def tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """Bytes that it holds now, by kind (observe/memory.py)."""
        held, owned = self.own_tensors(), self.at_owners.owned.values()
        states = [tensor for piece in self._states_at_owners() for tensor in piece.tensors.values()]
        for kind, more in (("optimizer", states), ("gradients_shard", [o.grad for o in owned])):
            if found := [each for each in more if each is not None]:
                held[kind] = [*held.get(kind, ()), *found]
        return held

    @abstractmethod
    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        """`tensors` without those at owners."""

    # --- Megatron's five hooks ---

    def param_sync_func(self, params: Iterable[torch.nn.Parameter]) -> None:  # noqa: B027 - nothing to do
        """Make a chunk's parameters whole, if no module's forward does. Called by Megatron before a chunk's first
        forward (interleaved), and by `begin_step` for every other schedule; a second call finds nothing to do."""

    @abstractmethod
    def no_sync_func(self) -> AbstractContextManager[None]:
        """Around all but a chunk's last backward: gradients are only added up on this rank. Outside it, every gradient
        that arrives is final. It is entered and left once per chunk, or, under a split backward, around each action."""

    @abstractmethod
    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        """After each flush: nothing of it is under way any more but the reduction, if it was the step's last."""

    def grad_scale_func(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss * loss_scale`. The schedules call it where a backward starts, in the last stage, and with ones for the
        scale of side losses, on every stage that has them."""
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    # --- a backward in two parts: an input gradient (I) and its weight gradients (W), perhaps many actions apart ---

    def after_input_grad(self, chunk: int) -> None:  # noqa: B027 - nothing to do where gradients are only added up
        """An I of this rank's chunk number `chunk` is done: gradients of norms, biases and embeddings are there."""

    def before_weight_grad(self, chunk: int, last: bool) -> None:  # noqa: B027
        """A W of chunk `chunk` begins; last: it is the flush's last of this chunk."""

    def add_weight_grad(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """In a W: add `grad`, of the weight's whole shape, to the weight's gradient."""
        pytorch.add_by_autograd(weight, grad)

    def after_weight_grad(self, chunk: int) -> None:  # noqa: B027
        """A W of chunk `chunk` is done: all gradients of that micro-batch are there."""

    # --- the step ---

    @abstractmethod
    def begin_step(self) -> None:
        """Parameters are whole after this on every rank, and gradients empty."""

    def gathered_parameters(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """(shard, the whole parameter that takes its place in the chunks' modules while it is gathered), if so."""
        return []

    def gather(self) -> None:  # noqa: B027
        """Parameters are whole after this on every rank (evaluation), or a module's forward gathers them."""

    def drop_gathered(self) -> None:  # noqa: B027
        """Drop whole copies of parameters that are shards between steps, if the backend has such: a program may change
        the shards before they are gathered again."""

    def gather_ahead(self) -> None:  # noqa: B027
        """Start the collective that the next `gather` waits for, if the backend has one."""

    def streamed_modules(self) -> list[Any]:
        """Modules that are gathered in each of their forwards, and reduced in each backward (`sync: streaming`)."""
        return []

    def whole(self) -> AbstractContextManager[None]:
        """Context in which, between flushes, the chunks' parameters are whole plain tensors, for code that reads or
        writes a model through its modules. Writes take effect when they are copied into `state` and adopted."""
        return nullcontext()

    def set_last_flush(self, last: bool) -> None:
        """Whether the next flush is the step's last, the one whose last backward reduces."""
        self._last_flush = last

    @abstractmethod
    def resume_accumulation(self) -> None:
        """Reopen a step after its last flush; later flushes add to its gradients."""

    def finish_reduction(self) -> None:
        """After the step's flushes, reduce the gradients that no last backward has reduced, then sum over tp and over
        the two copies of a tied embedding."""
        self._sum_the_rest()

    def _sum_the_rest(self) -> None:
        """Make the sums that no data-parallel reduction makes. Every backend cuts the copies of an embedding alike."""
        sum_over_tp(self, self._groups)
        if self._has_tied:
            sum_tied_copies(self, self._groups)

    def shards(self) -> Iterator[GradShard]:
        """This rank's parts of the reduced gradient, after `finish_reduction`; of matrices that are reduced to their
        owners, what this rank keeps."""
        yield from (shard for shard in self.own_shards() if not self.at_owners.takes(shard.param))
        for name, owned in self.at_owners.owned.items():
            assert owned.grad is not None, f"{name} has no gradient"
            yield GradShard(name, owned.param, owned.grad, 0)

    @abstractmethod
    def own_shards(self) -> Iterator[GradShard]:
        """The gradients that the optimizer reads in `step`, in which updates of matrices are put."""

    def step(self) -> None:
        """Run the optimizer on the gradients as they are now."""
        self.optimizer.step()

    def copy_gradients(self) -> Callable[[], None]:
        """Copy the reduced gradients. Returns a function that passes the copy to the optimizer, also after `step`."""
        copies = [(shard.grad, shard.grad.clone()) for shard in self.shards()]

        def give_back() -> None:
            for grad, copy in copies:
                grad.copy_(copy)

        return give_back

    def discard(self) -> None:
        """Drop the gradients of this step, leaving weights and optimizer state as they were."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[StatePiece]:
        """This rank's parts of weights, frozen ones too, and optimizer state, that of owners included."""
        yield from self.own_state()
        yield from self._states_at_owners()

    def _states_at_owners(self) -> Iterator[StatePiece]:
        for name, owned in self.at_owners.owned.items():
            yield StatePiece(name, owned.param, 0, {"momentum_buffer": owned.momentum})
        if self.matrices is not None:
            yield from self.matrices.state()

    @abstractmethod
    def own_state(self) -> Iterator[StatePiece]:
        """`state` without that of owners."""

    def frozen_state(self) -> Iterator[StatePiece]:
        """Frozen parameters, of which each data-parallel rank has the whole if only trained ones are cut."""
        for name, param in names.named_parameters(self._chunks):
            if not param.requires_grad:
                replica = names.dp_group(param, self._groups).rank()
                yield StatePiece(name, param, 0, {"param": param.detach().view(-1)}, replica)

    @abstractmethod
    def adopt_state(self, num_steps: int) -> None:
        """Make the contents of `state` the model after `num_steps` optimizer steps."""

    def edited(self) -> Iterator[str]:
        """Names of parameters of which the chunks have other weights than `state`, in this rank's parts."""
        pieces = {id(piece.param): piece for piece in self.own_state()}
        for param, tensor, start in self.copied:
            piece = pieces.get(id(param))
            if piece is not None and tensor.untyped_storage().nbytes():  # else another rank's, or released
                copy = piece.tensors["param"]
                part = tensor.detach().reshape(-1)[piece.start - start :][: copy.numel()]
                if not torch.allclose(part, copy.to(part), rtol=0, atol=0, equal_nan=True):
                    yield piece.name

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, for the learning-rate schedule."""
        return cast("list[dict[str, Any]]", self.optimizer.param_groups)

    def _show(self, name: str, param: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
        """Show this rank's sums of a parameter's gradients, which are about to cross ranks: `grad` and the others."""
        if self.before_reduce is not None:
            for each in (grad, *self.sums.others(param)):
                if each is not None:
                    self.before_reduce(name, each)


class AccumulatingBackend(ShardingBackend):
    """The common part of backends whose gradients are whole on each rank until a chunk's last backward reduces them.

    A backend brings `begin_accumulation`, and `_reduce`: all that no last backward has reduced.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module]):
        super().__init__(plan, groups, chunks)
        self._reduced = self._syncing = False
        self._kept: list[torch.Tensor] = []
        """Reduced gradients, a copy of each shard, that were set aside because more of them comes."""

    @abstractmethod
    def _reduce(self) -> None: ...

    @abstractmethod
    def begin_accumulation(self) -> None:
        """Empty the gradients for the next flushes."""

    def _set_syncing(self, syncing: bool) -> None:
        """Say whether gradients that come now are final."""
        self._syncing = syncing

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Gradients of the backwards inside stay on this rank; those after it are final in the step's last flush."""
        self._set_syncing(False)
        # No `finally`: Megatron's schedules drop a context that they have entered (an evaluation, a flush that fails),
        # and Python would run it whenever it collects that one, in the middle of a later flush.
        yield
        self._set_syncing(self._last_flush and torch.is_grad_enabled())  # an evaluation has no backward

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        self._set_syncing(False)
        if self._last_flush:
            self._reduce()

    def begin_step(self) -> None:
        self._kept = []
        self.begin_accumulation()

    def resume_accumulation(self) -> None:
        self._reduce_whole_step()
        self._kept = [shard.grad.clone() for shard in self.shards()]
        self.begin_accumulation()

    def finish_reduction(self) -> None:
        self._reduce_whole_step()
        self._sum_the_rest()

    def _reduce_whole_step(self) -> None:
        """Reduce what is left, and add what was set aside."""
        self._reduce()
        kept, self._kept = self._kept, []
        for shard, grad in zip(self.shards(), kept, strict=True) if kept else ():
            shard.grad.add_(grad)


def fill_hooks(backend: ShardingBackend, chunks: list[torch.nn.Module]) -> None:
    """Put the backend's five hooks into the chunks' Megatron configuration."""

    def finalize(*args: Any, **kwargs: Any) -> None:
        backend.memory.measure(backend.tensors)
        backend.finalize_model_grads_func(*args, **kwargs)

    for chunk in chunks:
        config: Any = chunk.config
        config.no_sync_func = backend.no_sync_func
        config.param_sync_func = backend.param_sync_func
        config.grad_sync_func = backend.grad_sync_func
        config.grad_scale_func = backend.grad_scale_func
        config.finalize_model_grads_func = finalize
