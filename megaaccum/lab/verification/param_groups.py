"""The groups of an optimizer in one process: rates and decay of each master, by the configuration's keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megaaccum.config import Plan
from megaaccum.optim import by_pattern


def param_groups(named: Iterable[tuple[str, Any]], plan: Plan, *, matrices: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a group of each master, as Megatron's schedule reads it: norms and biases do not decay, and `decoupled_lr`,
    `lr_mult` and `wd_mult` hold; matrices: `muon_scalar_lr` and `muon_scalar_weight_decay` do not."""
    keys = plan.config.optimizer
    by_lr, by_wd = (by_pattern.factors(key, getattr(keys, key)) for key in ("lr_mult", "wd_mult"))
    own, share = None if matrices else keys.muon_scalar_lr, None if matrices else keys.muon_scalar_weight_decay
    usual = (keys.lr, keys.min_lr) if own is None else (own, keys.min_lr * own / keys.lr)
    decay = 1.0 if share is None or not keys.weight_decay else share / keys.weight_decay
    ends = keys.decoupled_lr, keys.min_lr if keys.decoupled_min_lr is None else keys.decoupled_min_lr
    for name, master in named:
        is_end = ends[0] is not None and name.startswith(("embedding.word_embeddings.", "output_layer."))
        peak, least = (each * by_pattern.factor_of(name, by_lr) for each in (ends if is_end else usual))  # type: ignore[operator]
        wd = decay * by_pattern.factor_of(name, by_wd) * (master.dim() > 1)
        decays = {"wd_mult": wd, "weight_decay": keys.weight_decay * wd}
        yield {"params": [master], "lr": peak, "max_lr": peak, "min_lr": least, **decays}
