"""State of torch's optimizers and of the fused Adams that stand in for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from megaaccum.errors import ConfigError, listed
from megaaccum.upstream import emerging


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of an optimizer of a user's own. tensors: names of its tensors of a parameter's shape, in any group.
    others: what a checkpoint cannot keep. counts: those of `others` that belong to no parameter, and that each call of
    `step` changes. count: the type of its `step` of each parameter, if it has one. cuts: whether steps of the parts of
    a parameter are those of the whole."""

    tensors: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    others: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    count: type | None = None
    cuts: bool = True


_KEPT: WeakKeyDictionary[torch.optim.Optimizer, Kept] = WeakKeyDictionary()
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SIZES = (1.0, 3.0, 0.01, 100.0)
"""Factors on the gradients of four steps: the first step does not show that updates are clipped."""
OWN_LIST = "parameters in a list of its own"
"""In `others`: the parameters of its groups are not those that the optimizer steps."""


def look_at(optimizer: torch.optim.Optimizer) -> Kept:
    """Find out what an optimizer keeps, by steps on parameters made for it; it is as before. Raises what a step
    raises."""
    alike = [repr({**group, "params": 0, "lr": 0, "initial_lr": 0}) for group in optimizer.param_groups]
    run = partial(_run, optimizer, [alike.index(options) for options in dict.fromkeys(alike)])  # one of each kind
    whole, states, changed = run((2, 3))
    if changed:  # a number matters if steps that begin without it are others
        beyond, resumed = run((2, 3), sizes=2 * _SIZES)[0], _again(run, whole, deepcopy(states), values=whole[-1])
        changed = {} if torch.allclose(beyond[len(_SIZES) :], resumed, atol=1e-6) else changed
    count = next((type(state["step"]) for state in states if "step" in state), None)
    states = [{kind: value for kind, value in each.items() if kind != "step" and value is not None} for each in states]
    kinds = [tuple(sorted(kind for kind in each if getattr(each[kind], "shape", None) == (2, 3))) for each in states]
    others = sorted({kind for each, own in zip(states, kinds, strict=True) for kind in each.keys() - {*own}})
    others += [*sorted(changed), *([] if (whole != whole[0]).any() else [OWN_LIST])]
    if [*map(_forms, run((64, 64))[1])] != [*map(_forms, states)]:
        others.append("another state for parameters of 4,096 elements or more")
    first = {"step": _counted(count, 0, _count_device(optimizer, whole))} if count else {}
    zeros = [{kind: torch.zeros((2, 3), device=whole.device) for kind in own} | deepcopy(first) for own in kinds]
    if not others and not torch.allclose(whole, _again(run, whole, zeros), atol=1e-6):
        others.append("a state that does not begin at zero")
    try:
        parts = [run((size,), start) for start, size in ((0, 2), (2, 4))]
        cuts = torch.allclose(whole, torch.cat([values for values, *_ in parts], dim=-1), atol=1e-6)
        cuts = cuts and all(each.get(name) == changed[name] for *_, each in parts for name in changed if "[" in name)
    except Exception:  # of any kind: it takes matrices alone
        cuts = False
    found = dict(zip(dict.fromkeys(alike), kinds, strict=True))
    for options, group in zip(alike, optimizer.param_groups, strict=True):
        for param in group["params"]:
            param.kept_tensors = found[options]
    _KEPT[optimizer] = Kept(tuple(sorted(set().union(*kinds))), tuple(others), tuple(sorted(changed)), count, cuts)
    return _KEPT[optimizer]


def _again(run: Any, like: torch.Tensor, states: Any, **begun: Any) -> torch.Tensor:
    """The values of steps from `states`, not numbers where the optimizer cannot step from these."""
    with suppress(Exception):  # of any kind: it looks for what it keeps beside them
        return cast("torch.Tensor", run((2, 3), states=states, **begun)[0])
    return torch.full_like(like, math.nan)


def _run(
    optimizer: torch.optim.Optimizer,
    numbers: list[int],
    shape: tuple[int, ...],
    start: int = 0,
    states: Any = (),
    values: torch.Tensor | None = None,
    sizes: tuple[float, ...] = _SIZES,
) -> tuple[torch.Tensor, list[dict[str, Any]], dict[str, list[str]]]:
    """Steps by gradients of `sizes`, without hooks, on a parameter of `shape` in each group of `numbers`, of six values
    those from `start`, or `values`: the values before and after each step, the states, and other numbers that changed.
    The optimizer works with copies of its attributes, in which nothing is a parameter of the user's, at a learning rate
    whose steps FP32 shows."""
    kept, held = dict(vars(optimizer)), [param for group in optimizer.param_groups for param in group["params"]]
    memo: dict[int, Any] = dict.fromkeys(map(id, held), torch.nn.Parameter(torch.empty(0))) | {id(optimizer): optimizer}
    line = torch.linspace(-1.0, 2.0, 6, dtype=torch.float32, device=held[0].device)
    line = line.repeat(-(-math.prod(shape) // 6))[start:][: math.prod(shape)]
    begun = 1.0 + line.expand(len(numbers), -1) / 4 if values is None else values
    params = [torch.nn.Parameter(each.reshape(shape).clone()) for each in begun]
    try:
        for name in kept.keys() - {"state", *_HOOKS}:
            with suppress(Exception):  # what has no copy, such as a module of Python, is shared
                vars(optimizer)[name] = deepcopy(kept[name], memo)
        groups = [optimizer.param_groups[at] | {"params": [param]} for at, param in zip(numbers, params, strict=True)]
        for group in groups:
            if isinstance(lr := group.get("lr"), torch.Tensor | float | int):
                group["lr"] = lr.detach().clamp(min=0.1) if isinstance(lr, torch.Tensor) else max(lr, 0.1)
        optimizer.param_groups, optimizer.state = groups, defaultdict(dict, zip(params, states, strict=False))
        vars(optimizer).update({name: {} for name in _HOOKS})
        before, seen = _numbers_of(optimizer), [torch.stack((*params,)).detach()]
        with torch.random.fork_rng([line.device] if line.is_cuda else []):
            for number, size in enumerate(sizes):
                for param in params:
                    param.grad = size * (line.view(shape) - number % len(_SIZES) / 3).pow(3)
                optimizer.step()
                seen.append(torch.stack((*params,)).detach())
        changed = {name: now for name, now in _numbers_of(optimizer).items() if now != before.get(name, [])}
        return torch.stack(seen).flatten(2), [optimizer.state[param] for param in params], changed
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(kept)


def _forms(state: dict[str, Any]) -> dict[str, tuple[type, torch.dtype | None]]:
    """The types in a parameter's state without its count: what is kept in 8 bits is so of large parameters alone."""
    held = {kind: value for kind, value in state.items() if kind != "step" and value is not None}
    return {kind: (type(value), getattr(value, "dtype", None)) for kind, value in held.items()}


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """The numbers in an optimizer and its groups, of a tensor the sum, beside parameters, states and groups' `step`."""
    held = [(f"self.{name}", vars(optimizer)[name]) for name in vars(optimizer).keys() - {"param_groups", "state"}]
    groups = optimizer.param_groups
    held += [(f'group["{name}"]', group[name]) for group in groups for name in group.keys() - {"params", "step"}]
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in held:
        leaves = (float(each.detach().sum()) if isinstance(each, torch.Tensor) else each for each in tree_leaves(value))
        found[name] += [repr(each) for each in leaves if type(each) in (int, float)]
    return found


def kept_by(optimizer: torch.optim.Optimizer) -> Kept:
    """The state that `look_at` has found, or Adam's."""
    return _KEPT.get(optimizer, Kept())


def moments(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer's tensors for a trained parameter: Muon's of a matrix (optim/muon), unless its owner has
    it, those that `look_at` has found in its group, Lion's, or Adam's."""
    if hasattr(param, "matrix_parts"):
        return () if getattr(param, "momentum_at_owner", False) else ("momentum_buffer",)
    if (kept := _KEPT.get(optimizer)) is not None:
        return () if kept.others else getattr(param, "kept_tensors", kept.tensors)
    return ("exp_avg",) if emerging.is_lion(optimizer) else ("exp_avg", "exp_avg_sq")


def views(
    adam: torch.optim.Optimizer, flat: torch.Tensor, kinds: Iterable[str], position: int = 0, count: int | None = None
) -> dict[str, torch.Tensor]:
    """Flat views of `count` elements (default all) of `flat` ("param") and of its state's `kinds` from `position`."""
    found, length = {"param": flat} | state_of(adam, flat, kinds), flat.numel() if count is None else count
    return {name: tensor.detach().view(-1).narrow(0, position, length) for name, tensor in found.items()}


def state_of(adam: torch.optim.Optimizer, flat: torch.Tensor, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of a parameter, by their `kinds`; those that do not exist yet are made, as zeros."""
    state = adam.state[flat]
    for kind in kinds:
        if kind not in state:
            state[kind] = torch.zeros_like(flat)
    if (count := _count_of(adam)) and "step" not in state:
        # torch does not add to a state that exists: a step after a checkpoint of a run that never stepped needs it.
        state["step"] = _counted(count, 0, _count_device(adam, flat))
    return {kind: state[kind] for kind in kinds}


def begin_state(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """Make Lion's moments, as zeros, where Megatron's distributed optimizer asks for them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state_of(optimizer, param, moments(optimizer, param))


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


def _count_device(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> torch.device | None:
    """The device of a parameter's count of steps. torch's Adam reads it on the host, which would wait for a GPU once
    per parameter and step, unless its kernel reads it."""
    by_kernel = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return flat.device if by_kernel or not isinstance(optimizer, torch.optim.Adam) else None


def _counted(count: type, num_steps: int, device: torch.device | None = None) -> object:
    return num_steps if count is int else torch.tensor(float(num_steps), dtype=torch.float32, device=device)


def set_adam_step(adam: torch.optim.Optimizer, flats: list[torch.Tensor], num_steps: int) -> None:
    """Continue Adam's bias correction from `num_steps`."""
    if count := _count_of(adam):
        for flat in flats:
            adam.state[flat]["step"] = _counted(count, num_steps, _count_device(adam, flat))
    else:
        for group in adam.param_groups:
            group["step"] = num_steps


def check_calls(optimizer: torch.optim.Optimizer, num_calls: int) -> None:
    """Raise ConfigError if a step of DeepSpeed makes `num_calls` calls of an optimizer that counts them under another
    name than `step`."""
    if num_calls > 1 and (counts := kept_by(optimizer).counts):
        raise ConfigError(
            f"each call of the optimizer's step() changes {listed(counts)}, and deepspeed makes {num_calls} calls in a"
            ' step, one per group: give it one group, count in group["step"], or set backend to fsdp2 or ddp'
        )


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
