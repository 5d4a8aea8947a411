"""Learning rates that follow the batch: the rule, its factor, and which rates it moves."""

from __future__ import annotations

from megaaccum.config.schema import Config
from megaaccum.config.schema.run import OptimizerConfig

RATES = ("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr")
"""Every learning rate: the whole curve is multiplied, its floor too. Beta2, epsilon and weight decay are left alone."""

POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def scale(config: Config) -> None:
    """Multiply the rates of a configuration whose batch is settled, in place; once."""
    factor = of_batch(config)
    for name in RATES if factor != 1.0 else ():
        rate = getattr(config.optimizer, name)
        setattr(config.optimizer, name, None if rate is None else rate * factor)


def of_batch(config: Config) -> float:
    """The factor of the configured batch."""
    batch, reference = _batch_and_reference(config)
    return float((batch / reference) ** POWERS[config.optimizer.lr_scaling])


def of_step(optimizer: OptimizerConfig, size: int, whole: int) -> float:
    """The factor beside `of_batch` for a step of `size` sequences, where the configured batch has `whole`: 1 unless
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
    lines = [f"lr_scaling {keys.lr_scaling}: factor = {root} = {of_batch(config):g}"]
    for name in RATES:
        before = getattr(written.optimizer, name)
        if before:
            lines.append(f"{name} = {before:g} * {of_batch(config):g} = {getattr(keys, name):g}")
    if keys.lr_scaling_follows_rampup:
        lines.append("during batch warm-up the factor is that of the step's own batch (lr_scaling_follows_rampup)")
    return lines


def _batch_and_reference(config: Config) -> tuple[int, int]:
    """The configured batch and its reference, both in sequences or both in tokens."""
    size, keys = config.batch.global_batch_size or 1, config.optimizer
    if keys.lr_reference_tokens:
        return size * config.model.seq_length, keys.lr_reference_tokens
    return size, keys.lr_reference_batch_size or size
