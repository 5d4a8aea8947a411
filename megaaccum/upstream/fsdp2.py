"""Internals of torch's fully_shard: the tensors that it holds, and the calls that its hooks make (torch 2.13 to 2.15).

Up to torch 2.14 a parameter's sum of backwards lies beside the last one's gradient; torch 2.15 has autograd add to the
whole parameter's own.

A unit (FSDPParamGroup) and its parameters (FSDPParam) are private and partly untyped, and no type says that a fully
sharded module is both a Module and an FSDPModule: `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from megaaccum.errors import FlushError
from megaaccum.platform.replacing import replaced
from megaaccum.upstream import pytorch
from megaaccum.upstream.adam import own_tensor
from megaaccum.upstream.lookup import missing


def check() -> list[str]:
    """Names that this version of torch's fully_shard lacks, as sentences; empty when all is well."""
    return missing("fsdp2")


def units(root: Any) -> list[Any]:
    """Groups of parameters that FSDP2 gathers and reduces at once in a fully sharded chunk, in the order of a backward:
    the last layer first. The root (embedding, final norm, head), whose gradients come both first and last, ends it."""
    return [unit for module in reversed(modules(root)) for unit in _own_units(module)]


def modules(root: Any) -> list[Any]:
    """The fully sharded modules of a chunk, itself first, in the order of the model."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _own_units(module: Any) -> list[Any]:
    """Units of a fully sharded module's parameters that are in no other inside it; a chunk in the middle has none."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def _by_layer(root: Any) -> list[list[Any]]:
    """The units of `units`, each with those inside it (experts, in a layer)."""
    layers: list[list[Any]] = []
    for module in modules(root)[1:]:
        if layers and any(module is inside for inside in layers[-1][0].modules()):
            layers[-1].append(module)
        else:
            layers.append([module])
    inner = [[unit for module in reversed(layer) for unit in _own_units(module)] for layer in reversed(layers)]
    return [*inner, _own_units(root)]


def even_out(unit: Any) -> None:
    """Give the parameters of a unit that have no gradient yet zeros in the precision of the others' sums.

    FSDP2 (torch 2.13: `unsharded_zero_grad_data`) makes them in the parameter's, and then refuses to reduce both.
    """
    params = _trained_in(unit)
    # Only then: it has no `reduce_dtype` before its first forward.
    if any(param.unsharded_accumulated_grad is not None for param in params):
        for param in params:
            if param.unsharded_accumulated_grad is None and param.reduce_dtype is not None:
                give_gradient(param, torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype))


class UnitWeightGrads:
    """The weight gradients (W) of one fully sharded chunk whose backward is split.

    FSDP2 ends a unit's backward when its input's gradient is there, and reduces then. Its hooks do not see a W, so
    their calls after it are made here (torch 2.13; torch.distributed.pipelining makes the same after a stage's last
    W): `post_backward` of a unit, and `_root_post_backward_final_callback`. hooked: hooks look at each gradient.
    before_experts: ids of the shards of parameters whose W comes after those of all units inside their layer.
    """

    def __init__(self, root: Any, *, hooked: bool, before_experts: set[int]):
        self._root, self._units, self._last, self._hooked = root, units(root), _own_units(root), hooked
        self._before_experts = before_experts
        self._left: list[list[Any]] = []
        """Units that are not reduced yet, those of a layer together: the router's W may come before its experts'."""

    def begin(self, *, reduce: bool) -> None:
        """Begin a W. reduce: reduce all gradients that its units have by then."""
        self._reduces, self._left = reduce, _by_layer(self._root)
        self._of = {
            id(param._unsharded_param): (unit, param)
            for unit in self._units
            for param in unit.fsdp_params
            if hasattr(param, "_unsharded_param")
        }

    def add(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add `grad`, in the precision in which gradients are reduced; reduce the units before the weight's."""
        unit, param = self._of[id(weight)]
        while self._reduces and unit not in self._last and unit not in self._left[0]:
            self._reduce(self._left.pop(0))
        if self._reduces and id(param.sharded_param) in self._before_experts:
            inner, self._left[0] = self._left[0][:-1], self._left[0][-1:]
            self._reduce(inner)
        hooked = self._hooked or pytorch.num_hooks(weight)
        if not hooked and (weight.grad is None or not _adds_apart(param)):  # autograd would copy `grad` first
            if param.unsharded_accumulated_grad is None:
                give_gradient(param, grad.to(param.reduce_dtype or grad.dtype))
            else:
                param.unsharded_accumulated_grad.add_(grad)
            return
        torch.autograd.backward(weight, grad)  # of a released weight FSDP2 keeps the shape
        _add_up(param)
        if _adds_apart(param):
            param.to_accumulated_grad_if_needed()

    def finish(self) -> None:
        """Reduce the units that are left, on every rank in one order, and end this backward for torch."""
        if self._reduces:
            for layer in self._left:
                self._reduce(layer)
            _end_backward(self._root)

    @staticmethod
    def _reduce(layer: list[Any]) -> None:
        for unit in layer:
            even_out(unit)
            unit.post_backward()


class UnitTurns:
    """Gathers and reductions of the units of one fully sharded chunk, in one order on every rank, where parameters stay
    gathered through a step.

    FSDP2 gathers a unit in its own forward, and reduces it where a backward comes by, or at the end of one that does
    not, so that ranks whose micro-batches run other layers would mix up these. Here a forward begins with gathers of
    all units. In the last backward a unit that has all its gradients is reduced at once if those before it (`units`)
    are; else it waits for them, at most to the end. reduces: its backwards are not split. at_end: all wait for the end,
    as they do while it is None.
    """

    def __init__(self, root: Any, *, at_end: bool | None, reduces: bool):
        self.at_end, self.skips = at_end, False
        """`skips`: whether a backward has left out a unit."""
        self._root, self._all = root, units(root)
        self._units = [unit for unit in self._all if reduces and _trained_in(unit)]
        self._post_backward = {id(unit): unit.post_backward for unit in self._units}
        self._left: list[Any] = []
        root.set_modules_to_forward_prefetch(modules(root)[1:])
        root._set_unshard_async_op(True)  # otherwise a stream of its own keeps memory for all that is under way
        root.register_forward_hook(self._end_forward, always_call=True)
        for unit in self._all:  # it would gather again what is reduced, on the ranks that ran it
            unit._backward_prefetch = partial(self._without_prefetch, unit)
        for unit in self._units:
            unit.post_backward = partial(self._came, unit)
        for state in (module._get_fsdp_state() for module in modules(root)):
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def begin(self) -> None:
        """Begin the chunk's last backward."""
        self._left = list(self._units)

    def finish(self) -> None:
        """Reduce what is left if the last micro-batch had no backward: it did not run the chunk, or without a graph. A
        rank that has run it in no micro-batch gathers too, as the others have."""
        if self._left:
            self._root._get_fsdp_state()._lazy_init()
            for module in modules(self._root):
                module.unshard()
            _end_backward(self._root)

    def _end_forward(self, *_: Any) -> None:
        for unit in self._all:
            unit.wait_for_unshard()  # of one that did not run

    @staticmethod
    def _without_prefetch(unit: Any) -> None:
        if unit._training_state.name == "PRE_BACKWARD" and unit._post_forward_indices:
            unit._post_forward_indices.pop()

    def _came(self, unit: Any, *_: Any) -> None:
        with replaced(unit, reduce_grads=False, reshard_after_backward=False):
            self._post_backward[id(unit)]()  # adds its gradients to those before
        for first in list(self._left) if self.at_end is False else ():
            # A layer that runs twice has another backward to come.
            if first._training_state.name != "POST_BACKWARD" or first._post_forward_indices:
                break
            self._reduce()

    def _end(self, end: Callable[[], None]) -> None:
        self.skips |= any(unit._training_state.name == "IDLE" for unit in self._units)
        while self._left:
            self._reduce()
        end()

    def _reduce(self) -> None:
        unit = self._left.pop(0)
        even_out(unit)
        self._post_backward[id(unit)]()


def _end_backward(root: Any) -> None:
    """End a backward of a fully sharded chunk for torch, whose hooks have seen none if its inputs needed no gradient or
    it did not run: torch 2.15 then lacks this attribute's value, and earlier ones do not have the attribute."""
    context = root._get_fsdp_state()._state_ctx
    context.manual_backward_finalization_active = bool(getattr(context, "manual_backward_finalization_active", None))
    root._get_fsdp_state()._root_post_backward_final_callback()


def refuse_unreduced(roots: Iterable[Any]) -> None:
    """Raise FlushError if a gradient is left after the reductions of a step. torch 2.13 reduces a unit that runs more
    than once only for the first of the backwards in which a reentrant checkpoint computes it."""
    for late in (param for root in roots for unit in units(root) for param in unit.fsdp_params if _gradients(param)):
        raise FlushError(
            f"a gradient of {late._param_fqn} came after its reduction: let no other layer use it, and checkpoint a"
            " layer that runs more than once with use_reentrant=False"
        )


def drop_unreduced(root: Any) -> None:
    """Forget the gradients that a fully sharded module has added up and not reduced (of backwards inside
    set_requires_gradient_sync(False), and of HSDP before its all-reduce). torch 2.13's FSDPModule has no method for it,
    and `zero_grad` knows of the reduced ones only."""
    for unit in units(root):
        unit._partial_reduce_output = None
        for param in unit.fsdp_params:
            _forget(param)


def whole_parameters(root: Any) -> list[tuple[Any, torch.nn.Parameter]]:
    """(`held`, the argument of `give_gradient`; the whole parameter, without its data) of each trained parameter of a
    fully sharded chunk. Their `grad_dtype` stays what it is set to: torch 2.15 leaves it open in a backward that
    reduces, where two uses of a parameter are then added in the precision of its weights. Collective: FSDP2 makes whole
    parameters when it first gathers them, and keeps them (torch 2.13)."""
    for unit in units(root):
        unit._set_unsharded_grad_dtypes = lambda **_: None
    found = []
    for module in modules(root):
        module.unshard()
        found += [(held, held._unsharded_param) for held in _trained(module)]
        module.reshard()
    return found


def gathered_parameters(roots: Iterable[Any]) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """(shard, whole parameter) of those that FSDP2 has made whole so far, and keeps (torch 2.13)."""
    params = [held for root in roots for unit in units(root) for held in unit.fsdp_params]
    return [(held.sharded_param, held._unsharded_param) for held in params if hasattr(held, "_unsharded_param")]


def mark_experts(unit: Any) -> None:
    """Mark the whole parameters of a gathered unit that are experts', as their shards are: torch 2.13 makes whole
    parameters without the attributes of those that it cut."""
    for held in _trained(unit):
        if hasattr(held.sharded_param, "allreduce"):
            held._unsharded_param.allreduce = held.sharded_param.allreduce


def complete_before_reduction(root: Any, rest: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> None:
    """Before each reduction of a unit of a fully sharded chunk, give each parameter what `rest` returns for it; one
    without any gradient gets zeros in the precision of the sums (FSDP2's own are in the parameter's)."""

    def complete(unit: Any) -> None:
        for held in _trained_in(unit):
            param = held._unsharded_param
            if (left := rest(param)) is not None:
                give_gradient(held, left)
            elif not _gradients(held):
                give_gradient(held, torch.zeros_like(param, dtype=held.reduce_dtype))

    _before_reductions(root, complete)


def divert(root: Any, sums: Any) -> None:
    """Before each reduction of a unit of a fully sharded chunk, give `sums` (OwnerSums) the whole gradients that it
    takes, and let FSDP2 reduce the others alone. One without any gradient gets zeros, which torch 2.13 would make for
    those that were given too."""

    def divert(unit: Any) -> None:
        trained = _trained_in(unit)
        if not any(sums.takes(held.sharded_param) for held in trained):
            return
        unit.reduce_scatter_unused_params = False
        for held in trained:
            _add_up(held)
        dtype = next((grad.dtype for held in trained for grad in _gradients(held)), None)
        for held in trained:
            if not _gradients(held):
                give_gradient(held, torch.zeros_like(held._unsharded_param, dtype=dtype or held.reduce_dtype))
            if sums.takes(held.sharded_param):
                (grad,) = _gradients(held)
                _forget(held)
                sums.add(held.sharded_param, grad)
        sums.send()

    _before_reductions(root, divert)


def _trained(module: Any) -> list[Any]:
    """FSDP2's record of each trained parameter of a fully sharded module's own unit, in the order of a reduction."""
    return [held for unit in _own_units(module) for held in _trained_in(unit)]


def _trained_in(unit: Any) -> list[Any]:
    return [held for held in unit.fsdp_params if held.sharded_param.requires_grad]


def reduced(module: Any) -> list[torch.nn.Parameter]:
    """The whole parameters of a fully sharded module's own unit, in the order of a reduction, once FSDP2 has gathered
    them."""
    return [param._unsharded_param for param in _trained(module)]


def give_gradient(held: Any, grad: torch.Tensor | None) -> None:
    """Let the next reduction reduce `grad`, in the precision of the reduction, as the sum of all backwards."""
    if _adds_apart(held):
        held.unsharded_accumulated_grad = grad
        return
    held._unsharded_param.grad = None  # of another precision, perhaps
    if grad is not None:
        held._unsharded_param.grad_dtype = grad.dtype
        held._unsharded_param.grad = grad


def _forget(held: Any) -> None:
    """Drop a parameter's gradients that are not reduced."""
    if hasattr(held, "_unsharded_param"):
        give_gradient(held, None)
        held._unsharded_param.grad = None


def _adds_apart(held: Any) -> bool:
    """Whether the sum of backwards lies beside the last one's gradient (before torch 2.15)."""
    return hasattr(held, "accumulate_unsharded_grad_if_needed")


def _add_up(held: Any) -> None:
    """Add the last backward's gradient to those before."""
    if _adds_apart(held):
        held.accumulate_unsharded_grad_if_needed()


def first_element(param: torch.nn.Parameter) -> int:
    """Start of this rank's shard in the flattened parameter, in elements; `param` is a DTensor cut by rows.

    torch.distributed.tensor has the shard's offset in a module that is not public (read in torch 2.13).
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return offset[0] * (param.numel() // max(param.shape[0], 1))


def tensors(roots: Iterable[Any]) -> dict[str, Iterable[torch.Tensor]]:
    """Tensors that fully sharded modules hold now, by kind (observe/memory.py), without the optimizer's state."""
    groups = [unit for root in roots for unit in units(root)]
    params = [param for group in groups for param in group.fsdp_params]
    sharded = [param.sharded_param for param in params]
    partial = [g._partial_reduce_output for g in groups if g._partial_reduce_output is not None]
    return {
        "parameters_whole": [tensor for param in params for tensor in param.all_gather_outputs],
        "parameters_shard": [own_tensor(param) for param in sharded],
        "gradients_whole": [grad for param in params for grad in _gradients(param)],
        "gradients_shard": [*(own_tensor(p.grad) for p in sharded if p.grad is not None), *partial],
    }


def _gradients(param: Any) -> list[torch.Tensor]:
    """Whole gradients of a parameter: the last backward's, and the sum of those before."""
    grads = [getattr(getattr(param, "_unsharded_param", None), "grad", None)]
    grads += [param.unsharded_accumulated_grad] if _adds_apart(param) else []
    return [grad for grad in grads if grad is not None]


def before_reduce(root: Any, call: Callable[[Any, torch.Tensor], None]) -> None:
    """Call `call(held, grad)` with each whole gradient, in the precision of the sums, of a unit that is about to be
    reduced; `held.sharded_param` is the parameter. (torch 2.13: `post_backward` adds the last backward's gradient to
    those before, and reduces, in one method; the addition is made here, and its own then finds nothing to add.)"""

    def show(unit: Any) -> None:
        for held in unit.fsdp_params:
            _add_up(held)
            for grad in _gradients(held):
                call(held, grad)

    _before_reductions(root, show)


def _before_reductions(root: Any, call: Callable[[Any], None]) -> None:
    """Call `call(unit)` before each reduction of the gradients of a unit of a fully sharded chunk. Raises FlushError in
    a backward whose own graph is kept, which holds weights that are released after it."""

    def reduce(unit: Any, post_backward: Callable[..., None], *args: Any) -> None:
        if pytorch.in_backward() and torch.is_grad_enabled():
            raise FlushError("backend fsdp2 takes no create_graph inside a forward: set backend to ddp")
        if unit.reduce_grads:
            call(unit)
        post_backward(*args)

    for unit in units(root):
        unit.post_backward = partial(reduce, unit, unit.post_backward)


def forget_forwards_alone(root: Any) -> None:
    """Have a fully sharded chunk forget a forward without a graph when it ends. FSDP2 notes the units that each forward
    has run, for its backward, at whose end it forgets all: a model that is only evaluated would note them for ever."""
    comm, begun = root._get_fsdp_state()._comm_ctx, list[int]()

    def end(*_: Any) -> None:
        first = begun.pop()
        if not torch.is_grad_enabled():
            del comm.post_forward_order[first:]
            for unit in units(root):
                unit._post_forward_indices[:] = [at for at in unit._post_forward_indices if at < first]

    root.register_forward_pre_hook(lambda *_: begun.append(len(comm.post_forward_order)))
    root.register_forward_hook(end)


def watch(roots: Iterable[Any], note: Callable[[str, int], None]) -> None:
    """Have units call `note(kind, bytes)` for the parameters that all of them have gathered, when they gather, and for
    their own and their root's whole gradients, when these are about to be reduced."""
    gathered: dict[int, int] = {}

    def watch(group: Any) -> None:
        to_unsharded, to_sharded = group._to_unsharded, group._to_sharded

        def gather() -> None:
            gathered[id(group)] = sum(
                out.untyped_storage().nbytes() for p in group.fsdp_params for out in p.all_gather_outputs
            )
            note("parameters_whole", sum(gathered.values()))
            to_unsharded()

        def release() -> None:
            gathered[id(group)] = 0
            to_sharded()
            note("parameters_whole", sum(gathered.values()))

        group._to_unsharded, group._to_sharded = gather, release

    def note_gradients(last: list[Any], group: Any) -> None:
        params = {id(param): param for each in (group, *last) for param in each.fsdp_params}
        note("gradients_whole", sum(grad.nbytes for param in params.values() for grad in _gradients(param)))

    for each in roots:
        _before_reductions(each, partial(note_gradients, _own_units(each)))
        for unit in units(each):
            watch(unit)
