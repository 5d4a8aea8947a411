"""Scaling of learning rates by the batch: the rule, its factor, and the rates that it multiplies."""

from __future__ import annotations

from megaaccum.config.schema import Config
from megaaccum.config.schema.run import OptimizerConfig

RATES = ("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr", "muon_scalar_lr")
"""Every learning rate: scaling multiplies the whole curve and its floor, but not beta2, epsilon and weight decay."""

POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def scale(config: Config) -> None:
    """Multiply the rates of a configuration with a resolved batch, in place. Not to be called twice."""
    factor = batch_factor(config)
    for name in RATES if factor != 1.0 else ():
        rate = getattr(config.optimizer, name)
        setattr(config.optimizer, name, None if rate is None else rate * factor)


def batch_factor(config: Config) -> float:
    """The factor of every rate for the configured batch."""
    batch, reference = _batch_and_reference(config)
    return float((batch / reference) ** POWERS[config.optimizer.lr_scaling])


def step_factor(optimizer: OptimizerConfig, size: int, whole: int) -> float:
    """The factor beside `batch_factor` for a step of `size` sequences, if the configured batch has `whole`: 1 unless
    lr_scaling_follows_rampup."""
    return float((size / whole) ** POWERS[optimizer.lr_scaling]) if optimizer.lr_scaling_follows_rampup else 1.0


def describe(config: Config, written: Config) -> list[str]:
    """The arithmetic, one equation a line; nothing without scaling. written: the rates before it."""
    keys = config.optimizer
    if keys.lr_scaling == "none":
        return []
    batch, reference = _batch_and_reference(config)
    unit = "tokens" if keys.lr_reference_tokens else "sequences"
    key = "lr_reference_tokens" if keys.lr_reference_tokens else "lr_reference_batch_size"
    ratio = f"{batch:,} {unit} / {key} {reference:,}"
    root = f"({ratio}) ^ 0.5" if keys.lr_scaling == "sqrt" else ratio
    lines = [f"lr_scaling {keys.lr_scaling}: factor = {root} = {batch_factor(config):g}"]
    for name in RATES:
        if before := getattr(written.optimizer, name):
            lines.append(f"{name} = {before:g} * {batch_factor(config):g} = {getattr(keys, name):g}")
    if keys.lr_scaling_follows_rampup:
        lines.append("during batch warm-up the factor is that of the step's own batch (lr_scaling_follows_rampup)")
    return lines


def _batch_and_reference(config: Config) -> tuple[int, int]:
    """The configured batch and its reference, both in sequences or both in tokens."""
    size, keys = config.batch.global_batch_size or 1, config.optimizer
    if keys.lr_reference_tokens:
        return size * config.model.seq_length, keys.lr_reference_tokens
    return size, keys.lr_reference_batch_size or size
