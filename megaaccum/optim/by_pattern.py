"""Parameters that are frozen, or have a learning rate or weight decay of their own, by patterns of their names."""

from __future__ import annotations

import math
from contextlib import suppress
from fnmatch import fnmatchcase

import torch

from megaaccum.config import Plan
from megaaccum.distributed.agreement import gathered, raise_on_all_ranks
from megaaccum.errors import ConfigError
from megaaccum.model import names
from megaaccum.optim.lr_schedule import ParamGroup

Factors = dict[str, float]
"""A factor by pattern; of a name that several patterns fit, the last holds."""


def factors(key: str, texts: list[str]) -> Factors:
    """The factors of `PATTERN=FACTOR` texts. Raises ConfigError for another text, and for a factor below 0."""
    found: Factors = {}
    for text in texts:
        pattern, equals, number = text.rpartition("=")
        found.pop(pattern, None)  # a pattern that is given again moves to the end: the last that fits holds
        with suppress(ValueError):
            found[pattern] = float(number)
        if not equals or not 0 <= found.get(pattern, -1.0) < math.inf:
            raise ConfigError(f"{key} {text!r}: write PATTERN=FACTOR, a factor of at least 0, as in embedding.*=0.1")
    return found


def freeze(plan: Plan, chunks: list[torch.nn.Module]) -> None:
    """Freeze the parameters that `freeze` names. Collective over the world; raises ConfigError on every rank for a
    pattern of freeze, lr_mult or wd_mult that fits no parameter of the model, and for a text that is no factor."""
    keys = plan.config.optimizer
    asked = raise_on_all_ranks(
        lambda: {*keys.freeze, *factors("lr_mult", keys.lr_mult), *factors("wd_mult", keys.wd_mult)}
    )
    if not asked:
        return
    named = list(names.named_parameters(chunks))
    for name, param in named:
        if any(fnmatchcase(name, pattern) for pattern in keys.freeze):
            param.requires_grad_(False)
    fitting = {pattern for pattern in asked if any(fnmatchcase(name, pattern) for name, _ in named)}
    if unused := sorted(asked.difference(*gathered(fitting))):
        example = named[0][0] if named else ""
        raise ConfigError(f"freeze, lr_mult, wd_mult: {', '.join(unused)} fits no parameter; one is named {example}")


def split_groups(plan: Plan, groups: list[ParamGroup]) -> list[ParamGroup]:
    """The groups with the plan's factors on learning rates and weight decay: one for each pair of factors."""
    keys = plan.config.optimizer
    lr, wd = factors("lr_mult", keys.lr_mult), factors("wd_mult", keys.wd_mult)
    return [each for group in groups for each in _split(group, lr, wd, (keys.lr, keys.min_lr))] if lr or wd else groups


def _split(group: ParamGroup, lr: Factors, wd: Factors, rates: tuple[float, float]) -> list[ParamGroup]:
    """The group as one for each pair of factors that its members have. rates: peak and end of groups without their
    own."""
    members: dict[tuple[float, float], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in zip(group["param_names"], group["params"], strict=True):
        members.setdefault((factor_of(name, lr), factor_of(name, wd)), []).append((name, param))
    made = []
    for (by_lr, by_wd), named in members.items():
        peak, end = group.get("max_lr", rates[0]) * by_lr, group.get("min_lr", rates[1]) * by_lr
        decay = {"wd_mult": group["wd_mult"] * by_wd, "weight_decay": group["weight_decay"] * by_wd}
        own = {"lr": group.get("lr", rates[0]) * by_lr, "max_lr": peak, "min_lr": end} if by_lr != 1.0 else {}
        lists = {"params": [param for _, param in named], "param_names": [name for name, _ in named]}
        made.append(group | decay | own | lists)
    return made


def factor_of(name: str, by_pattern: Factors) -> float:
    """The factor of a parameter: that of the last pattern that fits its name, else 1."""
    return next((each for pattern, each in reversed(by_pattern.items()) if fnmatchcase(name, pattern)), 1.0)
