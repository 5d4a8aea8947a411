"""Lengths of a run that Megatron's flags give in samples or tokens, as whole optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaaccum.config.batch_ramp import BatchRamp, parse_schedule, requested_intervals
from megaaccum.config.schema import BatchConfig
from megaaccum.errors import ConfigError

if TYPE_CHECKING:
    from megaaccum.pretrain.interop.megatron_args import Given
    from megaaccum.pretrain.interop.megatron_rules import Reading

_SAMPLES = {
    "train_samples": "train_iters",
    "lr_decay_samples": "lr_decay_iters",
    "lr_warmup_samples": "lr_warmup_iters",
    "lr_wsd_decay_samples": "lr_wsd_decay_iters",
    "train_tokens": "train_iters",
    "lr_decay_tokens": "lr_decay_iters",
    "lr_warmup_tokens": "lr_warmup_iters",
}


def _ramp(reading: Reading) -> BatchRamp | None:
    """The batch of each step by the flags, before rounding; None without one, or if `resolve` is going to refuse it."""
    values: dict[str, Any] = reading.values
    size, seq_length = values.get("global_batch_size"), values.get("seq_length") or 1
    ramp, steps = values.get("rampup_batch_size"), values.get("step_batch_size_schedule")
    try:
        if size is None:
            return BatchRamp(tuple(parse_schedule(steps, seq_length)), {}) if steps else None
        if not ramp and not steps:
            return BatchRamp(((0, size),), {})
        keys = BatchConfig(rampup_batch_size=ramp, step_batch_size_schedule=steps)
        return BatchRamp(tuple(requested_intervals(keys, seq_length=seq_length, global_batch_size=size)), {})
    except ConfigError:
        return None


def lengths(given: Given, reading: Reading) -> None:
    """Lengths in samples or tokens become whole optimizer steps."""
    values: dict[str, Any] = reading.values
    for name, key in _SAMPLES.items():
        number = getattr(given.args, name)
        if not given.has(name) or number is None:
            continue
        unit = values.get("seq_length") if name.endswith("tokens") else 1
        ramp = _ramp(reading)
        if ramp is None or not unit:
            needed = "--global-batch-size" + (" and --seq-length" if name.endswith("tokens") else "")
            reading.problems.append(f"{given.written[name]}: {needed} must be given to make steps of it.")
            continue
        steps = ramp.steps_within(number // unit)
        if ramp.samples_after(steps) * unit != number:
            per_step = ramp.size_at(number // unit) * unit
            reading.notes.append(
                f"{given.written[name]}: {key} {steps}, whole batches of {per_step} {name.split('_')[-1]}."
            )
        if key in values:
            values[key] = first = min(steps, values[key])
            reading.notes.append(
                f"{given.written[name]} beside {reading.writers[key]}: {key} {first}, the first to end."
            )
        else:
            reading.put(key, steps, given, name)
