"""Spans of the learning-rate schedule in samples, which Megatron's schedule counts."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.batch_ramp import BatchRamp
from megaaccum.config.schema import Config


def in_samples(config: Config, ramp: BatchRamp) -> tuple[int, float, int | None]:
    """Samples of the decay, the warm-up and the anneal; a span in steps has those that its steps consume."""
    keys = config.optimizer
    decay = keys.lr_decay_samples or ramp.samples_after(keys.lr_decay_iters or config.run.train_iters)
    warmup: float = keys.lr_warmup_samples or ramp.samples_after(keys.lr_warmup_iters or 0)
    if keys.lr_warmup_fraction is not None:
        warmup = keys.lr_warmup_fraction * decay
    if (anneal := keys.lr_wsd_decay_samples) is None and keys.lr_wsd_decay_iters is not None:
        # The anneal is the end of the decay: its steps are the last ones, which may lie inside a ramp.
        last = ramp.steps_within(decay)
        anneal = ramp.samples_after(last) - ramp.samples_after(last - keys.lr_wsd_decay_iters)
    return decay, warmup, anneal


def key_of(config: Config, iters: str) -> str:
    """The key that gives a span: `iters`, which counts steps, or its counterpart in samples if that is set."""
    samples = iters.replace("_iters", "_samples")
    return samples if getattr(config.optimizer, samples, None) else iters


def too_long(config: Config, ramp: BatchRamp) -> Iterator[str]:
    """One text per span that the decay has no room for."""
    keys, decay = config.optimizer, key_of(config, "lr_decay_iters")
    most = keys.lr_decay_samples or ramp.samples_after(keys.lr_decay_iters or 0)
    for iters, words, least in (("lr_warmup_iters", "leaves nothing of", 1), ("lr_wsd_decay_iters", "is more than", 0)):
        name = key_of(config, iters)
        given = getattr(keys, name) or 0
        span = ramp.samples_after(given) if name == iters else given
        if span + least > most > 0:
            legal = ramp.steps_within(most - least) if name == iters else most - least
            other = ramp.steps_within(span + least - 1) + 1 if keys.lr_decay_samples is None else span + least
            yield (
                f"{name} {given} {words} the {most} samples of {decay} {getattr(keys, decay)}: set {name} to at most"
                f" {legal}, or {decay}{' (default train_iters)' * ('iters' in decay)} to at least {other}."
            )
