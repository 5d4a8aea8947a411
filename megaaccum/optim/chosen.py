"""The optimizer of an engine: a user's own, the plan's, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.errors import ConfigError, listed
from megaaccum.model import names
from megaaccum.optim import adamw
from megaaccum.upstream import adam

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes a torch optimizer over this rank's parameters, `torch.optim.AdamW` or a lambda around it."""


def no_optimizer(plan: Plan) -> torch.optim.Optimizer:
    """The optimizer of an engine that trains nothing, over nothing. Raises ConfigError for a backend that wraps one."""
    if plan.config.sharding.backend not in ("ddp", "fsdp2"):
        raise ConfigError(
            f"the model has no trained parameter, and backend {plan.config.sharding.backend} shards by an optimizer:"
            " set backend to fsdp2 (parameters are sharded) or ddp (they are whole)"
        )
    return torch.optim.SGD([{"params": []}], lr=0.0)


def optimizer_of(plan: Plan, chunks: list[torch.nn.Module], factory: OptimizerFactory | None) -> torch.optim.Optimizer:
    """A torch optimizer over the trained parameters, made by `factory`, else AdamW by the plan. Raises ConfigError
    without an lr, and where a rank trains nothing."""
    if factory is None and not plan.config.optimizer.lr:
        raise ConfigError("the plan has no lr: give initialize an optimizer, or Plan.of an optimizer=dict(lr=...)")
    if factory is None:
        return adamw.build(plan, chunks)
    if not callable(factory):
        raise ConfigError(
            f"optimizer is the class {type(factory).__name__}, or a function of a list of parameters such as lambda"
            " params: torch.optim.AdamW(params, lr=1e-4), but an optimizer was given: the parameters are cut first"
        )
    keys = plan.config.optimizer
    if keys.optimizer != "adam":
        raise ConfigError(
            f"optimizer {keys.optimizer} builds its own optimizer: give initialize none, or set optimizer to adam"
        )
    if keys.lr_mult or keys.wd_mult:
        raise ConfigError("lr_mult and wd_mult scale the plan's optimizer: give initialize none, or leave them out")
    optimizer = raise_on_all_ranks(lambda: factory(_trained(chunks)))
    raise_on_all_ranks(_check_own, optimizer, plan, chunks)
    raise_on_all_ranks(_check_rates, optimizer, plan)
    return optimizer


def keep_decays(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Have Megatron's schedule, which sets rate and decay of every group, leave the optimizer's own decays, unless the
    plan gives one. Raises ConfigError for groups with rates of their own that it would make one."""
    groups = optimizer.param_groups
    if len({float(group.get("lr", 0.0)) for group in groups if "max_lr" not in group}) > 1:
        raise ConfigError(
            "lr and train_iters of the plan make a learning-rate schedule, and the optimizer's groups have several"
            " rates: give each group its max_lr and min_lr, or leave lr out of the plan"
        )
    for group in () if plan.config.origin.keys() & {"weight_decay", "start_weight_decay"} else groups:
        group["start_wd"] = group["end_wd"] = group.get("weight_decay", 0.0)


def _check_own(optimizer: torch.optim.Optimizer, plan: Plan, chunks: list[torch.nn.Module]) -> None:
    """Raise ConfigError for an optimizer that a backend cannot drive, or would drive to other weights."""
    name, backend = type(optimizer).__name__, plan.config.sharding.backend
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left = [at for at, param in names.named_parameters(chunks) if param.requires_grad and id(param) not in held]
    if left and backend in ("deepspeed", "megatron"):
        raise ConfigError(
            f"the optimizer has no {listed(left)}, and backend {backend} reduces the gradients of its parameters alone:"
            " set requires_grad of those to False, or give them a group"
        )
    if isinstance(optimizer, torch.optim.Adagrad) and backend == "deepspeed":
        raise ConfigError("deepspeed builds Adagrad again, without its groups: set backend to fsdp2 or ddp")
    if type(optimizer).__module__.startswith("deepspeed.") and backend == "fsdp2":
        raise ConfigError(f"{name} reads plain memory, and fsdp2's parameters are DTensors: use torch.optim.AdamW")
    try:
        kept = adam.look_at(optimizer)
    except Exception as error:
        if "Adam" in name:  # of a library, for tensors on another device
            return
        raise ConfigError(
            f"optimizer {name} cannot step a parameter of its own ({type(error).__name__}: {error}): step() is called"
            " without a closure"
        ) from error
    replaces = backend != "ddp" or any(param.dtype.itemsize == 2 for param in _trained(chunks))  # by FP32 masters
    if adam.OWN_LIST in kept.others and replaces:
        raise ConfigError(
            f"optimizer {name} does not step the parameters of its param_groups, where backend {backend} puts its own:"
            " have step() read self.param_groups, not a list from before, or set backend to ddp, with FP32 parameters"
        )
    if kept.others and plan.config.step.speculative_step:
        raise ConfigError(
            f"speculative_step true: a bad step's update is taken back from copies of tensors, and {name} keeps"
            f" {listed(kept.others)}: set it to false"
        )
    if not kept.cuts and backend != "ddp":
        raise ConfigError(
            f"optimizer {name} steps a parameter as a whole, and backend {backend} gives it pieces: set backend to ddp,"
            " or the plan's optimizer to muon or soap, whose matrices are whole on their owners"
        )


def _check_rates(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Raise ConfigError for a number of the plan that no group of the optimizer has, and that no schedule sets."""
    keys, written = plan.config.optimizer, plan.config.origin.keys()
    scheduled = {"lr", "weight_decay"} if keys.lr and plan.config.run.train_iters else set()
    held = [
        group | dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False)) for group in optimizer.param_groups
    ]
    for key in sorted({"lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"} & written - scheduled):
        name, mine = key.removeprefix("adam_"), getattr(keys, key)
        if mine not in (theirs := {float(group.get(name, mine)) for group in held}):
            raise ConfigError(
                f"{key} is {mine} in the plan, and {name} {listed(sorted(theirs))} in the optimizer that initialize was"
                f" given: give it {mine} there, or leave {key} out of the plan"
            )


def _trained(chunks: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters that an optimizer is given. Raises ConfigError without any."""
    params = [param for _, param in names.named_parameters(chunks)]
    if trained := [param for param in params if param.requires_grad]:
        return trained
    raise adamw.untrained(len(params), "cut the model so that each stage has a trained parameter")
