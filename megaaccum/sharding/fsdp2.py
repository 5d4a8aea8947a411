"""The backend for torch's fully_shard (FSDP2), with HSDP, sync modes `resident` and `streaming`.

resident: parameters are gathered once per step and gradients reduced in each chunk's last backward. streaming: layers
are gathered for every forward and backward, and gradients reduce-scattered in every backward. With replicas (HSDP) the
sum over replicas waits for the last backward under both. Parameters keep whatever precision they have, float64 too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaaccum.config import Plan
from megaaccum.distributed import groups as process_groups
from megaaccum.distributed.agreement import gathered
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError, FlushError
from megaaccum.model import names
from megaaccum.model.torch_chunk import layers_of
from megaaccum.optim import owners
from megaaccum.sharding import experts
from megaaccum.sharding.base import GradShard, ShardingBackend, StatePiece
from megaaccum.sharding.expert_turns import before_experts
from megaaccum.sharding.in_one_order import ReduceScatter, StreamedReduceScatter
from megaaccum.sharding.reduction import fill
from megaaccum.sharding.sum_tree import MicrobatchSums, order_of
from megaaccum.upstream import adam, fsdp2, pytorch


class Fsdp2Backend(ShardingBackend):
    """Fills Megatron's five hooks for one fully sharded module per chunk; each layer is a unit, the rest is another.

    optimizer: a torch optimizer over the chunks' parameters; its groups are given the shards in place of them.
    """

    can_defer = False  # fully_shard reduces in a backward, or not at all

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer):
        _check_torch()
        super().__init__(plan, groups, chunks)
        sharding = plan.config.sharding
        self.optimizer, self._roots = optimizer, cast("list[FSDPModule]", chunks)
        self._streaming = sharding.sync == "streaming"
        self._splits = plan.layout.splits_backward
        self._waiting: list[FSDPModule] = []
        whole = list(names.named_parameters(chunks))
        before = {id(param) for chunk in chunks for param in before_experts(chunk)}
        own_ranks = experts.has_own_ranks(plan)  # also of a stage without experts, whose divisor is another's, too
        replicas, minutes = sharding.data_parallel_replicas, groups.timeout_minutes
        self._mesh = process_groups.replica_mesh(groups.dp_cp, replicas, minutes)
        if own_ranks:
            self._expert_mesh = process_groups.replica_mesh(groups.expert_dp, replicas, minutes)
        # Expert and dense groups differ in size, and averages would divide by different numbers: both sum instead.
        self._adds = self.sums.in_one_order or own_ranks
        self.reduction_divisor = 1 if self._adds else groups.dp_cp.size()
        self._trees: list[StreamedReduceScatter] = []
        self._of_i: dict[tuple[int, int], list[tuple[Any, torch.Tensor]]] = {}
        """Gradients that an I has computed and its W reduces, by chunk and micro-batch, if other passes lie between."""
        self._is_w = False
        self._held: dict[int, tuple[int, Any]] = {}
        """Chunk and FSDP2's own record of a whole parameter, by its id, if sums are made in one order."""
        for number, chunk in enumerate(chunks):
            self._shard(chunk, plan)
            for held, param in fsdp2.whole_parameters(chunk) if self.sums.in_one_order else ():
                param.grad_dtype = self._sum_dtype or param.dtype  # what arrives in it is not rounded on its way
                self._held[id(param)] = number, held
                if not self._streaming or self._splits:
                    call = self._keep_for_w if self._streaming else self._on_gradient
                    pytorch.OnGradient(param, pytorch.weakly(call))
        at_owners = owners.at_owners(plan.config, plan.batch.num_microbatches)
        for chunk in chunks if at_owners else ():  # first: what is added later runs before it
            fsdp2.divert(chunk, self.at_owners)
        fsdp2.watch(self._roots, self.memory.note)
        self._parameters = list(names.named_parameters(chunks))
        """(name, shard); embedding and head's copy of it, where a V has both on this rank, have one name."""
        shards = {id(param): shard for (_, param), (_, shard) in zip(whole, self._parameters, strict=True)}
        for name, param in whole:
            vars(shards[id(param)]).update(vars(param))
            if param.requires_grad:
                param.register_hook(partial(_refuse_stale, name))
        before = {id(shards[key]) for key in before}
        hooked = self.sums.in_one_order
        self._weight_grads = [fsdp2.UnitWeightGrads(each, hooked=hooked, before_experts=before) for each in chunks]
        self._names = {id(param): name for name, param in self._parameters}
        for chunk in chunks:
            fsdp2.before_reduce(chunk, self._show_held)
            fsdp2.forget_forwards_alone(chunk)
            if self.sums.in_one_order:
                fsdp2.complete_before_reduction(chunk, self._rest_of)
        # Ranks of experts wait for each other's tokens in the last backward. One that waited there for a layer that
        # another skips would keep it from them: the first step shows whether there is such a layer.
        at_end = None if plan.layout.ep > 1 else False
        roots = [] if self._streaming else self._roots
        self._turns = {each: fsdp2.UnitTurns(each, at_end=at_end, reduces=not self._splits) for each in roots}
        for group in optimizer.param_groups:
            group["params"] = [shards[id(param)] for param in group["params"]]

    def _shard(self, chunk: torch.nn.Module, plan: Plan) -> None:
        """Masters are of optimizer_dtype (float64 stays); the forward sees the precision of the model, sums are made in
        grad_reduce_dtype."""
        sharding = plan.config.sharding
        # A stage may have no layer.
        compute = next((param.dtype for param in chunk.parameters()), names.DTYPES[sharding.params_dtype or "fp32"])
        is_trained = any(param.requires_grad for param in chunk.parameters())
        if compute in (torch.bfloat16, torch.float16) and sharding.optimizer_dtype == "fp32" and is_trained:
            for param in chunk.parameters():  # buffers keep theirs
                param.data = param.data.float() if param.is_floating_point() else param.data
        self._sum_dtype = None if compute is torch.float64 else names.DTYPES[sharding.grad_reduce_dtype]
        policy = MixedPrecisionPolicy(
            param_dtype=compute if compute in (torch.bfloat16, torch.float16) else None,
            reduce_dtype=self._sum_dtype,
            cast_forward_inputs=False,
        )
        kept: dict[str, Any] = dict(mp_policy=policy, reshard_after_forward=self._streaming)
        own_ranks = experts.modules_of(chunk)
        layers = list(dict.fromkeys(layers_of(chunk)))  # one may run several times
        _refuse_shared(chunk, [*own_ranks, *layers])
        for module in own_ranks:
            fully_shard(module, mesh=self._expert_mesh, **kept)
        for layer in layers:
            fully_shard(layer, mesh=self._mesh, **kept)
        # An expert without tokens on one rank has them on another.
        fully_shard(chunk, mesh=self._mesh, **kept).set_reduce_scatter_unused_params(True)
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                if sharding.deterministic:
                    mesh = self._expert_mesh if any(module is each for each in own_ranks) else self._mesh
                    scatter = self._scatter(plan, module, mesh.get_group(mesh.ndim - 1))
                    module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # private base
                if self._adds:  # sums: an average over three ranks is rounded
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(1.0)

    def _scatter(self, plan: Plan, module: FSDPModule, group: dist.ProcessGroup) -> ReduceScatter:
        """The reduce-scatter of the unit of `module`."""
        if self.sums.in_one_order and self._streaming:
            self._trees.append(StreamedReduceScatter(self.sums, partial(plan.batch.sample_index, in_runs=False)))
            return self._trees[-1]
        order = order_of(plan, group)
        assert order is not None
        return ReduceScatter(order, partial(self._others, module)) if self.sums.in_one_order else ReduceScatter(order)

    def _others(self, module: FSDPModule, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's other partial sums of a unit, laid out as fully_shard has laid out the first in `flat`: of each
        parameter a run of rows for each rank."""
        ranks = self._groups.dp_cp.size()
        found = [torch.zeros_like(flat) for _ in range(self.sums.num_parts() - 1)]
        params = fsdp2.reduced(module) if found else []
        widths = [-(-param.shape[0] // ranks) * (param.numel() // param.shape[0]) for param in params]
        for number, param in enumerate(params):
            for other, part in zip(found, self.sums.pop_others(param), strict=True):
                if part is not None:
                    fill(other.view(ranks, -1).split(widths, dim=1)[number], part.reshape(-1))
                    if part.is_cuda:  # fully_shard reduces in a stream that has not made it, and is not done with it
                        part.record_stream(torch.cuda.current_stream())
        return found

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """Take the micro-batch's gradient from a whole parameter, and give the sum when the last has come."""
        assert isinstance(self.sums, MicrobatchSums) and param.grad is not None
        grad, param.grad = param.grad, None
        if self.sums.add(param, grad):
            fsdp2.give_gradient(self._held[id(param)][1], self.sums.total(param))

    def _rest_of(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """The sum of a parameter that some micro-batches of the step gave no gradient, before the step's reduction."""
        return self.sums.total(param) if self.sums.in_last_flush and not self._streaming else None

    def _keep_for_w(self, param: torch.nn.Parameter) -> None:
        """Keep a gradient that an I brings apart from those of other micro-batches, until the W."""
        assert param.grad is not None
        if not self._is_w:
            grad, param.grad = param.grad, None
            chunk, held = self._held[id(param)]
            self._of_i.setdefault((chunk, self.sums.of_backward), []).append((held, grad))

    def _show_held(self, held: Any, grad: torch.Tensor) -> None:
        self._show(self._names[id(held.sharded_param)], held._unsharded_param, grad)

    # --- Megatron's five hooks ---

    @contextmanager
    def no_sync_func(self) -> Iterator[None]:
        """Gradients of the backwards inside are not summed over ranks (streaming: over replicas). Chunks leave it one
        by one, the last chunk first. (Under a split backward `before_weight_grad` says when a chunk's last comes.)"""
        yield  # without `finally`, as in base.py
        if self._last_flush and self._waiting and not self._splits and torch.is_grad_enabled():
            self.expect_last_backward(self._waiting.pop())

    def finalize_model_grads_func(self, models: Any, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        assert not (self._last_flush and self._waiting), "a chunk's last backward ran without the reduction"
        turns = self._turns.values() if self._last_flush else ()
        for each in turns:
            each.finish()
        if any(each.at_end is None for each in turns):
            skips = any(gathered(any(each.skips for each in turns), self._groups.collection.tp_dp_cp))
            for each in turns:
                each.at_end = skips

    # --- a backward in two parts ---

    # In I FSDP2's hooks take it for the whole backward: they add up its gradients and, with streaming, reshard.

    def before_weight_grad(self, chunk: int, last: bool) -> None:
        root, final = self._roots[chunk], last and self._last_flush
        if final:
            self._waiting.remove(root)
            self.expect_last_backward(root)
        elif self._streaming:
            root.set_requires_gradient_sync(True)
        self._in_w, self._is_w = self._weight_grads[chunk], True
        if self.sums.in_one_order:
            for held, grad in self._of_i.pop((chunk, self.sums.of_backward), ()):
                fsdp2.give_gradient(held, grad)
        self._in_w.begin(reduce=final or self._streaming)

    def add_weight_grad(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        self._in_w.add(weight, grad)

    def after_weight_grad(self, chunk: int) -> None:
        """With streaming, gradients that the next I brings wait for its W: one reduction of a unit per micro-batch."""
        self._weight_grads[chunk].finish()
        self._is_w = False
        if self._streaming:
            self._roots[chunk].set_requires_gradient_sync(False)

    # --- the step ---

    def begin_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.clear()
        self.at_owners.begin()
        self._of_i.clear()
        for tree in self._trees:
            tree.clear()
        self.resume_accumulation()

    def gathered_parameters(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return fsdp2.gathered_parameters(self._roots)

    def finish_reduction(self) -> None:
        fsdp2.refuse_unreduced(self._roots)
        self.at_owners.finish()
        self._sum_the_rest()

    def resume_accumulation(self) -> None:
        """Keep the reduced gradients in the shards; further reductions add to them."""
        self._waiting = list(self._roots)
        for root in self._roots:
            fsdp2.drop_unreduced(root)  # of flushes that were not to be reduced
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(self._streaming)
            root.set_requires_gradient_sync(self._streaming and not self._splits)
            root.set_requires_all_reduce(False)

    def expect_last_backward(self, root: FSDPModule) -> None:
        """Have a chunk's next backward reduce its gradients, over replicas too, after those of the chunk before."""
        for each in self._turns.values():
            each.finish()
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(True)
        if root in self._turns:
            self._turns[root].begin()

    @contextmanager
    def whole(self) -> Iterator[None]:
        for unit in self._units():
            unit.unshard()
        try:
            yield
        finally:
            self.drop_gathered()

    def step(self) -> None:
        super().step()
        self.drop_gathered()  # a forward alone, after the last backward, has gathered the weights from before the step

    def streamed_modules(self) -> list[Any]:
        return self._units() if self._streaming else []

    def drop_gathered(self) -> None:
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[FSDPModule]:
        return [module for chunk in self._chunks for module in fsdp2.modules(chunk)]

    def own_shards(self) -> Iterator[GradShard]:
        """Rows of each parameter: fully_shard cuts the first dimension."""
        for name, param in self._parameters:
            if param.requires_grad:
                if param.grad is None and (self._streaming or self._waiting or self.at_owners.takes(param)):
                    param.grad = torch.zeros_like(param)  # no backward came by its layer, as under no_grad, or by any
                assert param.grad is not None, f"{name} has no gradient"
                grad = adam.own_tensor(param.grad).view(-1)
                yield GradShard(name, param, grad, fsdp2.first_element(param), _replica(param))

    def own_state(self) -> Iterator[StatePiece]:
        for name, param in self._parameters:
            tensors: dict[str, Any] = {"param": param}
            if param.requires_grad:
                tensors |= adam.state_of(self.optimizer, param, adam.moments(self.optimizer, param))
            views = {kind: adam.own_tensor(tensor.detach()).view(-1) for kind, tensor in tensors.items()}
            yield StatePiece(name, param, fsdp2.first_element(param), views, _replica(param))

    def adopt_state(self, num_steps: int) -> None:
        trained: list[torch.Tensor] = [param for _, param in self._parameters if param.requires_grad]
        adam.set_adam_step(self.optimizer, trained, num_steps)
        self.drop_gathered()  # what is gathered is of before

    def own_tensors(self) -> dict[str, Iterable[torch.Tensor]]:
        held = fsdp2.tensors(self._roots) | {"optimizer": adam.optimizer_tensors(self.optimizer)}
        kept = [grad for grads in self._of_i.values() for _, grad in grads]
        held["gradients_whole"] = [*held["gradients_whole"], *self.sums.tensors(), *kept]
        held["gradients_shard"] = [*held["gradients_shard"], *(part for tree in self._trees for part in tree.tensors())]
        return held


def _refuse_shared(chunk: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
    """Raise ConfigError if a parameter is in two units: of `modules`, or in one and outside of them. FSDP2 cuts it with
    one, and leaves the other a copy of its own."""
    paths = {path: each for path, each in chunk.named_modules(remove_duplicate=False) if each in modules}
    found: dict[torch.Tensor, tuple[str, torch.nn.Module | None]] = {}
    for name, param in chunk.named_parameters(remove_duplicate=False):
        unit = paths.get(max((path for path in paths if name.startswith(f"{path}.")), key=len, default=""))
        other, first = found.setdefault(param, (name, unit))
        if unit is not first:
            raise ConfigError(
                f"backend fsdp2: {other} and {name} are one parameter, which fully_shard cannot cut into two layers, or"
                " a layer and the rest of the model: set backend to deepspeed or ddp, or make them two parameters"
            )


def _refuse_stale(name: str, grad: torch.Tensor) -> None:
    """Raise FlushError for a gradient of a parameter whose place in the model a shard has taken: a forward has read it
    by a reference from before, whose weight stays as it was."""
    raise FlushError(
        f"backend fsdp2 trains another parameter than this {name}, which a list or closure of before initialize holds:"
        " read it as an attribute of its module, or set backend to deepspeed or ddp"
    )


def _replica(param: torch.nn.Parameter) -> int:
    """The number of the replica (HSDP) of a parameter that this rank has a shard of."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    return mesh.get_local_rank(0) if mesh.ndim > 1 else 0


def _check_torch() -> None:
    """Raise ConfigError where fully_shard is not the one that is driven here."""
    if missing := fsdp2.check():
        raise ConfigError(
            f"backend fsdp2 needs the fully_shard of torch 2.13 to 2.15, but torch {torch.__version__} has another"
            f" ({missing[0]}): set backend to deepspeed, or install that torch."
        )
