"""The batch keys: which of them count if the command line and a file contradict each other."""

from __future__ import annotations

import math
from dataclasses import replace

from megaaccum.config.batch import DEEPSPEED_SIZES, SIZES, BatchPlan, check_sizes, given_sizes
from megaaccum.config.schema import BatchConfig, Config
from megaaccum.config.source import COMMAND_LINE
from megaaccum.errors import ConfigError, either, equation, nearest_multiples, problems_of

CUTS = ("global_batch_size", "micro_batch_size", "device_batch_size", "pp_microbatches", "grad_accum_steps")
"""The order in which a file's sizes are kept if the command line only cuts the batch; `SIZES` if it resizes it."""


_FIXING = (set(SIZES) - {"micro_batch_size", "pp_microbatches"}, set(SIZES) - {"device_batch_size"})
"""Sizes that together fix the number of data-parallel ranks."""


def resolve_batch(config: Config, data_parallel_size: int, notes: list[str]) -> BatchPlan:
    """The batch plan of a configuration whose other keys are derived.

    All sizes of the command line count. A size of the file counts if it fits with those and with the file's sizes kept
    before it; otherwise it is recomputed, with a note. device_batch_size, grad_accum_steps and global_batch_size on the
    command line resize the batch; micro_batch_size and pp_microbatches alone cut it, and the file's global_batch_size
    stays.

    Raises:
        ConfigError: sizes of one source contradict each other, or a rule of the batch is broken.
    """
    sizes = given_sizes(config.batch)
    _check_total(config, sizes, data_parallel_size)
    if not sizes:
        raise ConfigError(
            "no batch size is given: set micro_batch_size and global_batch_size, or device_batch_size and"
            " grad_accum_steps."
        )
    # The device batch of the file alone must be consistent. Its global batch may fit another number of ranks.
    cuts = {name: sizes[name] for name in SIZES[:3] if name in sizes and config.origin.get(name) != COMMAND_LINE}
    check_sizes(_with_sizes(config, cuts), data_parallel_size)
    kept = kept_sizes(config, data_parallel_size)
    plan = BatchPlan.solve(
        _with_sizes(config, kept),
        data_parallel_size=data_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        seq_length=config.model.seq_length,
    )
    overrides = ", ".join(f"{name} {kept[name]}" for name in kept if config.origin.get(name) == COMMAND_LINE)
    notes += [
        f"{name} {sizes[name]} of the file is recomputed to {getattr(plan, name)}: the command line gives {overrides}."
        for name in sizes
        if name not in kept
    ]
    return plan


def kept_sizes(config: Config, data_parallel_size: int | None = None) -> dict[str, int]:
    """The batch sizes that count (see `resolve_batch`). data_parallel_size None: it is not known; then no size of the
    file is kept that would fix it."""
    sizes = given_sizes(config.batch)
    kept = {name: size for name, size in sizes.items() if config.origin.get(name) == COMMAND_LINE}
    if not kept:
        return sizes
    for name in sorted(sizes.keys() - kept.keys(), key=(SIZES if kept.keys() & set(SIZES[2:]) else CUTS).index):
        more = kept | {name: sizes[name]}
        fixes = data_parallel_size is None and any(fixing <= more.keys() for fixing in _FIXING)
        if not fixes and not problems_of(check_sizes, _with_sizes(config, more), data_parallel_size or 1):
            kept = more
    return kept


def _with_sizes(config: Config, sizes: dict[str, int]) -> BatchConfig:
    """The batch keys with `sizes` alone."""
    return replace(config.batch, **{name: sizes.get(name) for name in SIZES})  # type: ignore[arg-type]


def _check_total(config: Config, sizes: dict[str, int], dp: int) -> None:
    """Check that total_batch_size is whole accumulation steps of the sizes from its own source or the command line."""
    total, seq_length, origin = config.batch.total_batch_size, config.model.seq_length, config.origin
    places = (COMMAND_LINE, origin.get("total_batch_size"))
    known: dict[str, int] = {name: size for name, size in sizes.items() if origin.get(name) in places}
    parts = ("device_batch_size",) if "device_batch_size" in known else ("micro_batch_size", "pp_microbatches")
    factors = {name: known[name] for name in parts if name in known}
    factors |= {"seq_length": seq_length, "data_parallel_size": dp}
    unit = math.prod(factors.values())
    if total is None or min(factors.values()) < 1:
        return
    if total % unit:
        raise ConfigError(
            f"total_batch_size {total} tokens are not a whole number of accumulation steps of {equation(factors)}: set"
            f" total_batch_size to {either(nearest_multiples(total, unit))}."
        )
    if sizes["global_batch_size"] * seq_length != total:
        raise ConfigError(
            f"total_batch_size {total} tokens / seq_length {seq_length} = {total // seq_length} sequences contradicts"
            f" global_batch_size {sizes['global_batch_size']}: leave one of them out."
        )


def deepspeed_problems(config: Config, batch: BatchPlan, notes: list[str]) -> list[str]:
    """One text if the DeepSpeed block's batch sizes are not those of `batch`; a note if the command line wins.

    DeepSpeed multiplies train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp. The first two may be what
    its pipeline engine, its plain engine or megaaccum itself call so: see `readings`.
    """
    theirs = {name: value for name in DEEPSPEED_SIZES if (value := config.deepspeed.get(name)) not in (None, "auto")}
    whole, micro, steps = (theirs.get(name) for name in DEEPSPEED_SIZES)
    readings = [
        (batch.micro_batch_size, batch.num_microbatches),
        (batch.device_batch_size, batch.grad_accum_steps),
        (batch.micro_batch_size * batch.num_microbatches, 1),
    ]
    agrees = any((micro in (None, m)) and (steps in (None, s)) for m, s in readings)
    if agrees and whole in (None, batch.global_batch_size):
        return []
    said = ", ".join(f"{name} {value}" for name, value in theirs.items())
    ours = ", ".join(f"{name} {getattr(batch, name)}" for name in SIZES)
    if any(config.origin.get(name) == COMMAND_LINE for name in SIZES):
        notes.append(f"deepspeed's {said} is set aside: with the command line the batch is {ours}.")
        return []
    pairs = " or ".join(f"{m} with {s}" for m, s in dict.fromkeys(readings))
    return [
        f"deepspeed.{said} disagrees with {ours}: set train_batch_size to {batch.global_batch_size} and"
        f" train_micro_batch_size_per_gpu with gradient_accumulation_steps to {pairs}, or leave them out of the JSON."
    ]
