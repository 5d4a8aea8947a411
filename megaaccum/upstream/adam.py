"""State of torch's optimizers and of the fused Adams that stand in for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megaaccum.upstream import emerging


def moments(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer's tensors for a trained parameter: Muon's of a matrix (optim/muon), unless its owner has
    it, Lion's, or Adam's."""
    if hasattr(param, "matrix_parts"):
        return () if getattr(param, "momentum_at_owner", False) else ("momentum_buffer",)
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
    if isinstance(adam, torch.optim.Adam) and "step" not in state:
        # torch does not add to a state that exists: a step after a checkpoint of a run that never stepped needs it.
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
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


def set_adam_step(adam: torch.optim.Optimizer, flats: list[torch.Tensor], num_steps: int) -> None:
    """Continue Adam's bias correction from `num_steps`: torch keeps it per tensor, the fused Adams of TE and apex per
    group."""
    if isinstance(adam, torch.optim.Adam):
        for flat in flats:
            adam.state[flat]["step"] = torch.tensor(float(num_steps), dtype=torch.float32, device=flat.device)
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
        if not isinstance(adam, torch.optim.Adam):
            adam.register_step_pre_hook(self._before_each_call)

    def _before_each_call(self, adam: torch.optim.Optimizer, *_: object) -> None:
        for group in adam.param_groups:
            group["step"] = self.done
