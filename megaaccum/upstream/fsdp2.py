"""Internals of torch's fully_shard: what it holds, and what its hooks do (torch 2.13)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from megaaccum.upstream.adam import own_tensor
from megaaccum.upstream.pytorch import on_gradient

_GROUP = ("fsdp_params", "post_backward", "_partial_reduce_output")
_PARAM = (
    "_unsharded_param",
    "unsharded_accumulated_grad",
    "accumulate_unsharded_grad_if_needed",
    "to_accumulated_grad_if_needed",
    "reduce_dtype",
    "sharded_param",
)


def check() -> list[str]:
    """Names that this version of torch's fully_shard lacks, as sentences; empty when all is well."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    methods = ("_get_fsdp_state", "set_reduce_scatter_unused_params")
    problems = [f"FSDPModule.{name} is missing" for name in methods if not hasattr(FSDPModule, name)]
    for cls, names in (
        (_fsdp_state.FSDPState, ("_fsdp_param_groups", "_root_post_backward_final_callback")),
        (_fsdp_param_group.FSDPParamGroup, _GROUP),
        (_fsdp_param.FSDPParam, _PARAM),
    ):
        source = inspect.getsource(cls)
        problems += [f"{cls.__name__}.{name} is missing" for name in names if name not in source]
    return problems


def units(root: torch.nn.Module) -> list[Any]:
    """Parameters that FSDP2 gathers and reduces at once in a fully sharded chunk, in the order of a backward: the last
    layer first, the root (embedding, final norm, head), whose own gradients come both first and last, at the end."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return [unit for module in reversed(modules) for unit in _own_units(module)]


def _own_units(module: Any) -> list[Any]:
    """The parameters of a fully sharded module that are in no other inside it: of a chunk in the middle, none."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def even_out(unit: Any) -> None:
    """Give the parameters of a unit that have no gradient yet zeros in the precision of the others' sums.

    FSDP2 (torch 2.13: `unsharded_zero_grad_data`) makes them in the parameter's, and then refuses to reduce both.
    """
    params = [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    # Only then: it has no `reduce_dtype` before its first forward.
    if any(param.unsharded_accumulated_grad is not None for param in params):
        for param in params:
            if param.unsharded_accumulated_grad is None and param.reduce_dtype is not None:
                param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


class WeightGrads:
    """The weight gradients (W) of one fully sharded chunk whose backward is split.

    FSDP2 takes a unit's backward for over when its input's gradient is there, and reduces then. Its hooks do not see a
    W, so what they would do after it is done here, by what they call (torch 2.13; torch.distributed.pipelining calls
    the same after a stage's last W): `post_backward` of a unit, and `_root_post_backward_final_callback`.
    """

    def __init__(self, root: torch.nn.Module):
        self._root, self._units, self._last = root, units(root), _own_units(root)
        self._left: list[Any] = []

    def begin(self, *, reduce: bool) -> None:
        """A W begins. reduce: all gradients that its units have by then are reduced."""
        self._reduces, self._left = reduce, list(self._units)
        self._of = {
            id(param._unsharded_param): (unit, param)
            for unit in self._units
            for param in unit.fsdp_params
            if hasattr(param, "_unsharded_param")
        }

    def add(self, weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add `grad`, in the precision in which gradients are reduced; reduce the units before the weight's."""
        unit, param = self._of[id(weight)]
        while self._reduces and unit not in self._last and self._left[0] is not unit:
            self._reduce(self._left.pop(0))
        torch.autograd.backward(weight, grad)  # of a released weight FSDP2 keeps the shape
        param.accumulate_unsharded_grad_if_needed()
        param.to_accumulated_grad_if_needed()

    def finish(self) -> None:
        """Reduce the units that are left, on every rank in one order, and end this backward for torch."""
        if self._reduces:
            for unit in self._left:
                self._reduce(unit)
            self._root._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]

    @staticmethod
    def _reduce(unit: Any) -> None:
        even_out(unit)
        unit.post_backward()


def drop_unreduced(root: torch.nn.Module) -> None:
    """Forget the gradients that a fully sharded module has added up and not reduced (of backwards inside
    set_requires_gradient_sync(False), and of HSDP before its all-reduce). torch 2.13's FSDPModule has no method for it,
    and `zero_grad` knows of the reduced ones only."""
    for unit in units(root):
        unit._partial_reduce_output = None
        for param in unit.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def on_unit_gradient(root: torch.nn.Module, call: Callable[[Any, torch.nn.Parameter], None]) -> None:
    """Call `call(held, param)` when a backward has given `param.grad` of a whole parameter; `held` is what
    `give_gradient` takes. Collective: FSDP2 makes the whole parameters when it first gathers them (torch 2.13)."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for unit in module._get_fsdp_state()._fsdp_param_groups:
                for held in unit.fsdp_params:
                    if held.sharded_param.requires_grad:
                        on_gradient(held._unsharded_param, partial(call, held))
            module.reshard()


def reduced(module: Any) -> list[torch.nn.Parameter]:
    """The whole parameters of a fully sharded module's own unit, in the order in which a reduction lays them out, once
    FSDP2 has gathered them."""
    params = [param for unit in _own_units(module) for param in unit.fsdp_params]
    return [param._unsharded_param for param in params if param.sharded_param.requires_grad]


def give_gradient(held: Any, grad: torch.Tensor | None) -> None:
    """Let the next reduction take `grad`, in the precision of the reduction, as the sum of all backwards."""
    held.unsharded_accumulated_grad = grad


def first_element(param: torch.nn.Parameter) -> int:
    """Offset of this rank's shard in the flattened parameter, in elements; `param` is a DTensor cut by rows.

    torch.distributed.tensor has the shard's offset in a module that is not public (read in torch 2.13).
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return offset[0] * (param.numel() // max(param.shape[0], 1))


def tensors(roots) -> dict[str, Iterable[torch.Tensor]]:
    """Bytes that fully sharded modules hold now, by kind (observe/memory.py), but for the optimizer's state."""
    groups = [unit for root in roots for unit in units(root)]
    params = [param for group in groups for param in group.fsdp_params]
    sharded = [param.sharded_param for param in params]
    partial = [g._partial_reduce_output for g in groups if g._partial_reduce_output is not None]
    return {
        "parameters_whole": [tensor for param in params for tensor in param.all_gather_outputs],
        "parameters_shard": [own_tensor(param) for param in sharded],
        "gradients_whole": [grad for param in params for grad in _fsdp2_gradients(param)],
        "gradients_shard": [*(own_tensor(p.grad) for p in sharded if p.grad is not None), *partial],
    }


def _fsdp2_gradients(param) -> list[torch.Tensor]:
    """Whole gradients of a parameter: what the last backward made, and the sum of those before."""
    grads = [getattr(getattr(param, "_unsharded_param", None), "grad", None), param.unsharded_accumulated_grad]
    return [grad for grad in grads if grad is not None]


def before_reduce(root: torch.nn.Module, call: Callable[[Any, torch.Tensor], None]) -> None:
    """Call `call(held, grad)` with each whole gradient, in the precision of the sums, of a unit that is about to be
    reduced; `held.sharded_param` is the parameter. (torch 2.13: `post_backward` adds the last backward's gradient to
    those before, and reduces, in one method; the addition is made here, and its own then finds nothing to add.)"""

    def watch(unit: Any) -> None:
        post_backward = unit.post_backward

        def reduce(*args: Any) -> None:
            for held in unit.fsdp_params if unit.reduce_grads else ():
                held.accumulate_unsharded_grad_if_needed()
                for grad in _fsdp2_gradients(held):
                    call(held, grad)
            post_backward(*args)

        unit.post_backward = reduce

    for unit in units(root):
        watch(unit)


def watch(roots, memory) -> None:
    """Have units note in `memory` (a HighWater) what all of them have gathered, when they gather, and their own and
    their root's whole gradients, when these are about to be reduced."""
    gathered: dict[int, int] = {}

    def watch(group, last) -> None:
        to_unsharded, to_sharded, post_backward = group._to_unsharded, group._to_sharded, group.post_backward

        def gather() -> None:
            gathered[id(group)] = sum(
                out.untyped_storage().nbytes() for p in group.fsdp_params for out in p.all_gather_outputs
            )
            memory.note("parameters_whole", sum(gathered.values()))
            to_unsharded()

        def release() -> None:
            gathered[id(group)] = 0
            to_sharded()
            memory.note("parameters_whole", sum(gathered.values()))

        def reduce(*args) -> None:
            if group.reduce_grads:
                params = {id(param): param for each in (group, *last) for param in each.fsdp_params}
                grads = [grad for param in params.values() for grad in _fsdp2_gradients(param)]
                memory.note("gradients_whole", sum(grad.nbytes for grad in grads))
            post_backward(*args)

        group._to_unsharded, group._to_sharded, group.post_backward = gather, release, reduce

    for each in roots:
        for unit in units(each):
            watch(unit, _own_units(each))
