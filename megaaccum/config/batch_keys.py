"""The batch keys: which of them count when the command line and a file say different things."""

from __future__ import annotations

import math

from megaaccum.config.batch import BatchPlan
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE
from megaaccum.errors import ConfigError, either, nearest_multiples

SIZES = ("micro_batch_size", "pp_microbatches", "device_batch_size", "grad_accum_steps", "global_batch_size")
"""The five sizes, in the order in which a file's are kept when the command line changes the size of the batch."""

CUTS = ("global_batch_size", "micro_batch_size", "device_batch_size", "pp_microbatches", "grad_accum_steps")
"""The same, in the order in which a file's are kept when the command line only changes how the batch is cut."""


def settle(config: Config, data_parallel_size: int, notes: list[str]) -> BatchPlan:
    """The batch plan of a configuration whose other keys are derived.

    Command-line sizes all count. A file's size counts as long as it fits with those and with the file's sizes kept
    before it, and is computed afresh where it does not, with a note. device_batch_size, grad_accum_steps and
    global_batch_size on the command line say how large the batch is; micro_batch_size and pp_microbatches alone say how
    it is cut, and the file's global_batch_size stays.

    Raises:
        ConfigError: sizes of one source contradict each other, or a rule of the batch is broken.
    """
    sizes = {name: getattr(config.batch, name) for name in SIZES if getattr(config.batch, name) is not None}
    _check_total(config, sizes, data_parallel_size)
    asked = {name for name in sizes if config.origin.get(name) == COMMAND_LINE}
    if not asked:
        _require_a_size(sizes, config)
        return _solve(config, data_parallel_size, sizes)
    _check_file_alone({name: size for name, size in sizes.items() if name not in asked}, data_parallel_size)
    kept = {name: sizes[name] for name in SIZES if name in asked}
    BatchPlan.check(data_parallel_size=data_parallel_size, **kept)
    dropped = []
    for name in _order(asked):
        if name in sizes and name not in kept:
            if _fits(data_parallel_size, {**kept, name: sizes[name]}):
                kept[name] = sizes[name]
            else:
                dropped.append(name)
    plan = _solve(config, data_parallel_size, kept)
    notes += [_recomputed(name, sizes[name], plan, asked) for name in dropped]
    return plan


def _check_total(config: Config, sizes: dict[str, int], dp: int) -> None:
    """total_batch_size is whole accumulation steps of the sizes that are written where it is, or on the command
    line."""
    total, seq_length, origin = config.batch.total_batch_size, config.model.seq_length, config.origin
    if total is None or seq_length < 1:
        return
    places = (COMMAND_LINE, origin.get("total_batch_size"))
    known: dict[str, int] = {name: size for name, size in sizes.items() if origin.get(name) in places}
    parts = ("device_batch_size",) if "device_batch_size" in known else ("micro_batch_size", "pp_microbatches")
    factors = {name: known[name] for name in parts if name in known}
    factors |= {"seq_length": seq_length, "data_parallel_size": dp}
    unit = math.prod(factors.values())
    if total % unit:
        product = " * ".join(f"{name} {value}" for name, value in factors.items())
        raise ConfigError(
            f"total_batch_size {total} tokens are not a whole number of accumulation steps of {product} = {unit}: set"
            f" total_batch_size to {either(nearest_multiples(total, unit))}."
        )
    if sizes["global_batch_size"] * seq_length != total:
        raise ConfigError(
            f"total_batch_size {total} tokens / seq_length {seq_length} = {total // seq_length} sequences contradicts"
            f" global_batch_size {sizes['global_batch_size']}: leave one of them out."
        )


def _check_file_alone(sizes: dict[str, int], data_parallel_size: int) -> None:
    """A device batch that the file itself contradicts is a mistake, not something that the command line settles.

    The global batch is left out: it may fit another number of ranks, which is what the command line is there for.
    """
    device_sizes = {name: size for name, size in sizes.items() if name not in ("grad_accum_steps", "global_batch_size")}
    BatchPlan.check(data_parallel_size=data_parallel_size, **device_sizes)


def _order(asked: set[str]) -> tuple[str, ...]:
    resizes = asked & {"device_batch_size", "grad_accum_steps", "global_batch_size"}
    return SIZES if resizes else CUTS


def _fits(data_parallel_size: int, sizes: dict[str, int]) -> bool:
    try:
        BatchPlan.check(data_parallel_size=data_parallel_size, **sizes)
    except ConfigError:
        return False
    return True


def _recomputed(name: str, old: int, plan: BatchPlan, asked: set[str]) -> str:
    flags = ", ".join(f"{flag} {getattr(plan, flag)}" for flag in SIZES if flag in asked)
    return f"{name} {old} of the file is recomputed to {getattr(plan, name)}: the command line gives {flags}."


def _require_a_size(sizes: dict[str, int], config: Config) -> None:
    if not sizes:
        raise ConfigError(
            "no batch size is given: set micro_batch_size and global_batch_size, or device_batch_size and"
            " grad_accum_steps."
        )


def _solve(config: Config, data_parallel_size: int, sizes: dict[str, int]) -> BatchPlan:
    return BatchPlan.solve(
        data_parallel_size=data_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        seq_length=config.model.seq_length,
        flush=config.batch.flush,
        loss_norm=config.batch.loss_norm,
        allow_underfilled_pipeline=config.batch.allow_underfilled_pipeline,
        **sizes,
    )


def deepspeed_problems(config: Config, batch: BatchPlan, notes: list[str]) -> list[str]:
    """One text if the DeepSpeed block's batch sizes are not those of `batch`; a note if the command line wins.

    DeepSpeed multiplies train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp. The first two may be what
    its pipeline engine, its plain engine or megaaccum itself would call them: see `readings`.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    theirs = {name: value for name in names if (value := config.deepspeed.get(name)) not in (None, "auto")}
    whole, micro, steps = (theirs.get(name) for name in names)
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
