"""The backend for DeepSpeed ZeRO-3, sync mode `streaming`: for stages that do not fit whole.

Parameters are gathered unit by unit (the embedding, each layer, the final norm, the head) before each forward and each
backward of a micro-batch and released after it; the next unit is gathered while this one computes. A unit's gradients
are reduce-scattered as soon as its backward is done, and added to the FP32 partition that DeepSpeed's optimizer reads.
If a schedule splits the backward, gradients of norms, biases and embeddings are reduced after the unit's I, and those
of matrices in W, for which nothing is gathered: a weight's gradient does not need the weight.
So at most two units' whole parameters and gradients exist at a time, however many micro-batches are in flight, and
every micro-batch pays 2 gathers of the parameters and 1 reduction of the gradients. Parameters of the first units, up
to max_live_parameters, stay gathered through the flush and are gathered once.

DeepSpeed's own hooks count one micro-batch in flight and cannot serve here (docs/concepts/design.md); these count per
parameter.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.model.torch_chunk import layers_of, tensors_in
from megaaccum.sharding import released_linear
from megaaccum.sharding.deepspeed import DeepSpeedBackend
from megaaccum.sharding.experts import ReducerByRanks
from megaaccum.sharding.sum_tree import SumTree
from megaaccum.upstream import pytorch, zero


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and released together. params: that its forward reads; own: those whose gradient is
    final when its backward is done (a tied weight belongs to the embedding, and the head only reads it); chunk: which
    of the rank's chunks it is a part of."""

    module: torch.nn.Module
    params: list[torch.nn.Parameter]
    own: list[torch.nn.Parameter]
    chunk: int = 0
    kept: bool = False
    before: Unit | None = field(default=None, repr=False)
    after: Unit | None = field(default=None, repr=False)
    arrived: int = 0
    uses: Counter[int] = field(default_factory=Counter)
    """Forwards of a micro-batch whose backward is to come."""

    @property
    def numel(self) -> int:
        return sum(param.ds_numel for param in self.params)  # type: ignore[attr-defined]


class StreamingBackend(DeepSpeedBackend):
    """Fills the hooks for ZeRO-3 with parameters that come and go. Arguments as for DeepSpeedBackend."""

    streams = True

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        super().__init__(plan, groups, chunks, optimizer)
        assert isinstance(self.driver, zero.Zero3), "streaming is a sync mode of ZeRO-3"
        self._zero = self.driver
        self.reduction_divisor = 1  # sums, where DeepSpeed's own reduction averages
        self.units = [unit for number, chunk in enumerate(chunks) for unit in units_of(chunk, number)]
        self._owner = {id(param): unit for unit in self.units for param in unit.own}
        readers = Counter(id(param) for unit in self.units for param in unit.params)
        self._read_elsewhere = {key for key, count in readers.items() if count > 1}
        live = itertools.accumulate(unit.numel for unit in self.units)
        for unit, elements in zip(self.units, live, strict=True):  # the first units stay gathered through the flush
            unit.kept = elements <= plan.config.sharding.max_live_parameters
        self._reducer = ReducerByRanks(plan, groups, self.sums)
        self._batch = plan.batch
        self._trees: dict[int, SumTree] = {}
        """Sums over the micro-batches of all ranks, each parameter's partition, where they are made in one order."""
        self._holds: Counter[int] = Counter()
        self._whole = self._waiting = self._backward = 0
        """Bytes now of whole parameters, and of sums in the trees; the backward that `_in_backward` is in."""
        self._ahead: tuple[Unit, Any] | None = None
        self._in_backward: Unit | None = None
        self._microbatch = 0
        """Whose gradients are reduced next."""
        self._recomputed: Unit | None = None
        self._splitting = False
        self._in_w: list[list[torch.nn.Parameter]] = []
        for chunk in chunks:
            released_linear.install(chunk)
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._before_forward(unit), prepend=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit), with_kwargs=True)

    # --- Megatron's hooks: the flush as a whole needs little ---

    def param_sync_func(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do: each unit's forward gathers it."""

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Nothing to hold back: every micro-batch's gradients are reduced."""
        yield

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        """After each flush nothing is gathered or under way."""
        self._end_backward()
        self._drop_ahead()

    def resume_accumulation(self) -> None:
        """Nothing to do: every micro-batch adds to the accumulators."""

    def finish_reduction(self) -> None:
        """Give the optimizer the accumulators as its partitions."""
        self._reducer.wait()
        self.at_owners.finish()
        for param in self._zero.params:
            if (tree := self._trees.pop(id(param), None)) is not None and (total := tree.total()) is not None:
                self._zero.accumulator(param).add_(total)
        self._zero.give_partitions()
        self._sum_the_rest()

    def begin_step(self) -> None:
        self._reducer.wait()  # sums of flushes that were for looking only
        self._trees.clear()
        self.at_owners.begin()
        self._waiting = 0
        self._zero.begin_partitions()
        for unit in self.units:
            unit.uses.clear()
        self._whole = _bytes([param for param in self._zero.params if self._zero.is_whole(param)])
        for param in self._zero.params:
            param.grad = None
        self.fp32_sums.begin_apart()

    def gather(self) -> None:
        """Nothing to do: each unit's forward gathers it."""

    gather_ahead = gather

    def streamed_modules(self) -> list[torch.nn.Module]:
        return [unit.module for unit in self.units]

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        held = super().own_tensors()
        partial_sums = [tensor for tree in self._trees.values() for tensor in tree.tensors()]
        return held | {"gradients_shard": [*held["gradients_shard"], *partial_sums]}

    # --- a unit's forward and backward ---

    def _before_forward(self, unit: Unit) -> None:
        if self._recomputes_itself(unit):
            return
        torch.clear_autocast_cache()  # of another micro-batch, whose backward would not be this one's
        recomputes = pytorch.in_backward()
        if not (recomputes and self._awaits_gradients()):
            self._end_backward()
        if recomputes:
            self._drop_recomputed()
        self._acquire(unit, unit.before if recomputes else unit.after)

    def _after_forward(self, unit: Unit, module: Any, args: Any, keys: Any, output: Any) -> None:
        """Have the unit gathered again before its backward, and release it unless that comes next (recompute). The
        backward begins at whichever tensor of the output comes first: some may have no use. One that was given and
        passed on is another unit's, and a parameter's hook would stay."""
        if self._recomputes_itself(unit):
            return
        outputs = [each for each in tensors_in(output) if each.requires_grad]
        if torch.is_grad_enabled() and outputs:
            passed_on = {id(each) for each in tensors_in((args, keys, unit.params))}
            made = [each for each in outputs if id(each) not in passed_on] or outputs
            microbatch = self.sums.microbatch
            unit.uses[microbatch] += 1
            torch.autograd.graph.register_multi_grad_hook(
                made, lambda grad: self.before_unit_backward(unit, microbatch), mode="any"
            )
        if pytorch.in_backward() and torch.is_grad_enabled():
            self._recomputed = unit
        else:
            self._release(unit)

    def _recomputes_itself(self, unit: Unit) -> bool:
        """Whether the unit's backward has begun, and runs its forward again (torch's checkpoint without reentry, which
        may also end a forward early): it is whole, and stays so until its backward ends. In another backward, as of the
        next micro-batch in a chunk of this one unit, it is recomputed as any other."""
        return unit is self._in_backward and pytorch.backward_under_way() == self._backward

    def _awaits_gradients(self) -> bool:
        """Whether none has come of the unit whose backward runs: such a checkpoint over several units recomputes the
        first of them inside the backward of the last."""
        unit = self._in_backward
        return unit is not None and unit.arrived == 0 and any(not wgrad.is_put_off(param) for param in unit.own)

    def before_unit_backward(self, unit: Unit, microbatch: int) -> None:
        """Gather the unit for its backward, and end the backward of the one before."""
        self._end_backward()
        self._microbatch = microbatch
        unit.uses[microbatch] -= 1
        if self._recomputed is unit:
            self._recomputed = None
        else:
            self._drop_recomputed()
            self._acquire(unit, unit.before)
        self._in_backward, self._splitting, self._backward = unit, wgrad.is_splitting(), pytorch.backward_under_way()
        unit.arrived = 0

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Release a unit when every parameter has its gradient: none is read any more. A frozen one, or one whose
        gradient comes in W, does not say when it was read last: that is known when the next unit's turn comes."""
        unit = self._owner[id(param)]
        unit.arrived += 1
        if unit is self._in_backward and unit.arrived == len(unit.params):
            self._end_backward()

    def _end_backward(self) -> None:
        """Reduce and release the unit whose backward ran last. Some of its parameters may have no gradient (an expert
        without tokens); then only the next unit's turn says that it is done, at the same place on every rank."""
        unit, self._in_backward = self._in_backward, None
        if unit is None:
            return
        own = [param for param in unit.own if not (self._splitting and wgrad.is_put_off(param))]
        # Autograd adds up the uses of a micro-batch (of an embedding that prediction layers read too) and brings their
        # sum after the last.
        comes_later = unit.uses[self._microbatch] > 0 and all(param.grad is None for param in own)
        if not (self.sums.in_one_order and comes_later):
            self._reduce_now(own)
        self._release(unit)

    def _reduce_now(self, params: list[torch.nn.Parameter]) -> None:
        for param in params:
            self._show(self._names[id(param)], param, param.grad)
        if params:
            if self.sums.in_one_order:
                self._reducer.wait()  # the unit before has then become sums of shards
            # No other unit has whole gradients now.
            self.memory.note("gradients_whole", sum(param.grad.nbytes for param in params if param.grad is not None))
            for param in filter(self.at_owners.takes, params):
                grad, param.grad = param.grad, None
                self.at_owners.add(param, param.new_zeros(self._zero.numel(param)) if grad is None else grad)
            self.at_owners.send()
            params = [param for param in params if not self.at_owners.takes(param)]
            shares = [(param, self._zero.accumulator(param)) for param in params]
            if self.sums.in_one_order:
                self._reducer.exchange(shares, partial(self._add_to_trees, params, self._microbatch))
            else:
                self._reducer.add(shares)
            self.memory.note("gradients_whole", 0)

    def _add_to_trees(self, params: list[torch.nn.Parameter], microbatch: int, rows: torch.Tensor) -> None:
        """Take the gradients of one micro-batch of each rank into the trees."""
        count = self.sums.count * len(rows)
        trees = [self._trees.setdefault(id(param), SumTree(count, self.sums.rounded)) for param in params]
        widths = [self._zero.accumulator(param).numel() for param in params]
        before = sum(tree.nbytes for tree in trees)
        for rank, row in enumerate(rows):
            leaf = self._batch.sample_index(microbatch, rank, in_runs=False)
            for tree, part in zip(trees, row.split(widths), strict=True):
                tree.add(leaf, part, lent=True)
        self._waiting += sum(tree.nbytes for tree in trees) - before
        self.memory.note("gradients_shard", self._zero.accumulated_bytes + self._waiting)

    def _drop_recomputed(self) -> None:
        unit, self._recomputed = self._recomputed, None
        if unit is not None:
            self._release(unit)

    # --- a backward in two parts ---

    def after_input_grad(self, chunk: int) -> None:
        """Nothing stays gathered for a W, which may be far away."""
        self._end_backward()
        self._drop_ahead()

    def before_weight_grad(self, chunk: int, last: bool) -> None:
        self._in_w = self._put_off(chunk) if self._splitting else []  # none when micro-batches are looked at
        self._microbatch = self.sums.of_backward

    def add_weight_grad(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Take a gradient that W has computed. Those of a unit go out when the first of the next one comes."""
        while id(weight) not in self._read_elsewhere and not any(weight is each for each in self._in_w[0]):
            self._reduce_now(self._in_w.pop(0))
        self._zero.add_gradient(weight, grad)

    def after_weight_grad(self, chunk: int) -> None:
        """Reduce what is left of this W, in the order of all ranks: here a weight may have got no gradient."""
        for params in self._in_w:
            self._reduce_now(params)

    def _put_off(self, chunk: int) -> list[list[torch.nn.Parameter]]:
        """The gradients that a W of `chunk` computes, unit by unit in the order of a backward; a weight that several
        units read comes last."""
        units = [unit for unit in reversed(self.units) if unit.chunk == chunk]
        own = [[param for param in unit.own if wgrad.is_put_off(param)] for unit in units]
        alone = [[param for param in params if id(param) not in self._read_elsewhere] for params in own]
        shared = [param for params in own for param in params if id(param) in self._read_elsewhere]
        return [params for params in (*alone, shared) if params]

    # --- parameters come and go ---

    def _acquire(self, unit: Unit, then: Unit | None) -> None:
        """Make the unit's parameters whole, and start to gather those of `then`, which comes next. A rank that shares
        with none has nothing to wait for: whole at once, they would be there for code that reads them elsewhere, whose
        gradient no backward of the unit brings."""
        if self._ahead is not None and self._ahead[0] is unit:
            self._ahead[1].wait()
            self._ahead = None
        else:
            self._drop_ahead()
            self._gather(unit).wait()
        if then is not None and self._groups.dp_cp.size() > 1:
            self._ahead = then, self._gather(then)

    def _gather(self, unit: Unit) -> Any:
        """Start to gather the unit's missing parameters. Returns a function that waits for them."""
        missing = [param for param in unit.params if not self._holds[id(param)]]
        for param in unit.params:
            self._holds[id(param)] += 1
        self._whole += _bytes([param for param in missing if not self._zero.is_whole(param)])
        self.memory.note("parameters_whole", self._whole)
        return self._zero.start_gather(missing)

    def _release(self, unit: Unit) -> None:
        self._holds.subtract(id(param) for param in unit.params)
        free = [param for param in unit.params if not self._holds[id(param)] and not unit.kept]
        self._whole -= _bytes(free)
        self._zero.release(free)
        self.memory.note("parameters_whole", self._whole)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            unit, handle = self._ahead
            self._ahead = None
            handle.wait()
            self._release(unit)


def units_of(chunk: Any, number: int = 0) -> list[Unit]:
    """The units of a chunk, this rank's chunk `number`: each layer, and each other module with parameters of its own
    (the embedding, the final norm, the head), in the order in which the chunk lists them. Raises ConfigError for
    parameters that lie beside modules with parameters."""
    owned: set[int] = set()
    units = []
    predicting = chunk.mtp.layers if getattr(chunk, "mtp", None) is not None else []
    whole = [*layers_of(chunk), *predicting, getattr(chunk, "embedding", None)]
    for module in _parts_of(chunk, {id(module) for module in whole if module is not None}):
        params = list(module.parameters())
        if module is getattr(chunk, "output_layer", None) and not params:
            params = [chunk.shared_embedding_or_output_weight()]
        own = [param for param in params if param.requires_grad and id(param) not in owned]
        owned |= {id(param) for param in params}
        if params:
            units.append(Unit(module, params, own, number))
    if left := [name for name, param in chunk.named_parameters() if id(param) not in owned]:
        raise ConfigError(
            f"sync streaming gathers a module's parameters as its forward begins, and {', '.join(left[:4])} lie beside"
            " modules that have parameters too, or in a list: put them into a module of their own, or set sync to"
            " resident"
        )
    for before, after in itertools.pairwise(units):
        before.after, after.before = after, before
    return units


def _parts_of(module: torch.nn.Module, whole: set[int]) -> Iterator[torch.nn.Module]:
    """Modules of `whole`, and outside them those that have no parameters in their children; lists of parameters have no
    forward."""
    if isinstance(module, torch.nn.ParameterList | torch.nn.ParameterDict):
        return
    if id(module) in whole or not any(True for child in module.children() for _ in child.parameters()):
        yield module
    else:
        for child in module.children():
            yield from _parts_of(child, whole)


def _bytes(params: list[torch.nn.Parameter]) -> int:
    """Bytes of the whole parameters, gathered or not; one that no other rank shares is its shard."""
    shared = [param for param in params if param.ds_numel > param.partition_numel()]  # type: ignore[attr-defined]
    return sum(param.ds_numel * param.element_size() for param in shared)  # type: ignore[attr-defined]
