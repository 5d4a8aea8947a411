"""State of torch's optimizers and of the fused Adams that stand in for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megaaccum.upstream import emerging


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of an optimizer of a user's own. tensors: names of its tensors of a parameter's shape. others: what a
    checkpoint cannot keep. count: the type of its `step` of each parameter, if it has one. cuts: whether a step of the
    parts of a parameter is that of the whole."""

    tensors: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    others: tuple[str, ...] = ()
    count: type | None = None
    cuts: bool = True


_KEPT: WeakKeyDictionary[torch.optim.Optimizer, Kept] = WeakKeyDictionary()


def look_at(optimizer: torch.optim.Optimizer) -> Kept:
    """Find out what an optimizer keeps, by steps on parameters made for it; it is as before. Raises what a step
    raises."""
    whole, state = _one_step(optimizer, (2, 3))
    tensors = tuple(sorted(kind for kind, value in state.items() if getattr(value, "shape", None) == (2, 3)))
    others = sorted(kind for kind in state if kind not in (*tensors, "step") and state[kind] is not None)
    count = type(state["step"]) if "step" in state else None
    zeros = {kind: torch.zeros(2, 3) for kind in tensors} | ({"step": _counted(count, 0)} if count else {})
    if not others and not torch.allclose(whole, _one_step(optimizer, (2, 3), zeros)[0]):
        others.append("a state that does not begin at zero")
    try:
        first, second = (_one_step(optimizer, (size,), start=start)[0] for start, size in ((0, 2), (2, 4)))
        cuts = torch.allclose(torch.cat([first, second]), whole.view(-1))
    except Exception:  # of any kind: it takes matrices alone
        cuts = False
    _KEPT[optimizer] = Kept(tensors, tuple(others), count, cuts)
    return _KEPT[optimizer]


def _one_step(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], state: dict[str, Any] | None = None, start: int = 0
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A parameter of `shape`, of six values those from `start`, after the optimizer's step on it alone; its state."""
    groups, held = optimizer.param_groups, optimizer.state
    device, size = next(param.device for group in groups for param in group["params"]), torch.Size(shape).numel()
    param = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6, device=device)[start:][:size].view(shape).clone())
    param.grad = torch.linspace(-1.0, 2.0, 6, device=device).pow(3)[start:][:size].view(shape).clone()
    try:
        optimizer.param_groups, optimizer.state = [{**groups[0], "params": [param]}], defaultdict(dict)
        for kind, each in (state or {}).items():
            optimizer.state[param][kind] = each.to(device) if isinstance(each, torch.Tensor) else each
        optimizer.step()
        return param.detach(), optimizer.state[param]
    finally:
        optimizer.param_groups, optimizer.state = groups, held


def kept_by(optimizer: torch.optim.Optimizer) -> Kept:
    """The state that `look_at` has found, or Adam's."""
    return _KEPT.get(optimizer, Kept())


def moments(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer's tensors for a trained parameter: Muon's of a matrix (optim/muon), unless its owner has
    it, those that `look_at` has found, Lion's, or Adam's."""
    if hasattr(param, "matrix_parts"):
        return () if getattr(param, "momentum_at_owner", False) else ("momentum_buffer",)
    if (kept := _KEPT.get(optimizer)) is not None:
        return () if kept.others else kept.tensors
    return ("exp_avg",) if emerging.is_lion(optimizer) else ("exp_avg", "exp_avg_sq")


def views(
    adam: torch.optim.Optimizer, flat: torch.Tensor, position: int, count: int, *, kinds: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Flat views of `count` elements of `flat` ("param") and of its state's `kinds` from `position`."""
    found = {"param": flat} | state_of(adam, flat, kinds)
    return {name: tensor.detach().view(-1).narrow(0, position, count) for name, tensor in found.items()}


def state_of(adam: torch.optim.Optimizer, flat: torch.Tensor, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of a parameter, by their `kinds`; those that do not exist yet are made, as zeros."""
    state = adam.state[flat]
    for kind in kinds:
        if kind not in state:
            state[kind] = torch.zeros_like(flat)
    if (count := _count_of(adam)) and "step" not in state:
        # torch does not add to a state that exists: a step after a checkpoint of a run that never stepped needs it.
        state["step"] = _counted(count, 0, flat.device)
    return {kind: state[kind] for kind in kinds}


def begin_state(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Make Lion's moments, as zeros, where Megatron's distributed optimizer asks for them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state_of(optimizer, param, moments(optimizer, param))


def adam_views(adam: torch.optim.Optimizer, param: torch.nn.Parameter, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """Flat views of a whole parameter and its optimizer state."""
    return views(adam, param, 0, param.numel(), kinds=kinds)


def optimizer_tensors(adam: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor of a torch optimizer's state; of one that is sharded, this rank's part."""
    values = (value for state in adam.state.values() for value in state.values())
    return (own_tensor(value) for value in values if isinstance(value, torch.Tensor))


def own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or any other tensor itself. `to_local` would enter autograd, at a multiple of the
    price, and this is called for every tensor several times in a step."""
    return getattr(tensor, "_local_tensor", tensor)


def _count_of(optimizer: torch.optim.Optimizer) -> type | None:
    """The type of an optimizer's count of steps of each parameter: torch's own have a tensor, DeepSpeed's for the host
    a number. The fused Adams of TE and apex have one per group."""
    if isinstance(optimizer, torch.optim.Adam):
        return torch.Tensor
    kept = kept_by(optimizer)
    return None if kept.others else kept.count  # a state that is not made whole is not begun


def _counted(count: type, num_steps: int, device: torch.device | None = None) -> object:
    return num_steps if count is int else torch.tensor(float(num_steps), dtype=torch.float32, device=device)


def set_adam_step(adam: torch.optim.Optimizer, flats: list[torch.Tensor], num_steps: int) -> None:
    """Continue Adam's bias correction from `num_steps`."""
    if count := _count_of(adam):
        for flat in flats:
            adam.state[flat]["step"] = _counted(count, num_steps, flat.device)
    else:
        for group in adam.param_groups:
            group["step"] = num_steps


class UpdateCount:
    """Adam's count of updates in an optimizer that keeps it per group and raises it, of every group, in each call
    (transformer-engine 2.20 and apex: FusedAdam.step; empty groups too). DeepSpeed's ZeRO-3 makes a call for every
    sub-group of every group, so that the count would run ahead, differently on each stage.

    done: updates before this one. torch's own count is per tensor, and right.
    """

    def __init__(self, adam: torch.optim.Optimizer):
        self.done = 0
        if _count_of(adam) is None:
            adam.register_step_pre_hook(self._before_each_call)

    def _before_each_call(self, adam: torch.optim.Optimizer, *_: object) -> None:
        for group in adam.param_groups:
            group["step"] = self.done
