"""The micro-batch of a plan that leaves it open: of those that fit, the one with the fastest predicted step. Numbers
alone, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megaaccum.config import resolve
from megaaccum.config.plan import Plan
from megaaccum.config.resolve import PLANNER
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import expected, sync_mode
from megaaccum.lab.planner.candidates import LARGEST_MICRO_BATCH, divisors
from megaaccum.lab.planner.hardware import names
from megaaccum.lab.planner.layouts import SCHEDULES
from megaaccum.pretrain.model.layers import Layers
from megaaccum.units import amount

PRICED_ON = names()[0]
"""The GPU, by its name in the hardware table: micro-batches are compared, not promised."""


def choose_micro_batch(plan: Plan, device_bytes: float | None = None, *, layers: Layers | None = None) -> Plan:
    """`plan` with a micro-batch, if none is given, and a sync mode (sync_mode.choose_sync_mode, whose arguments these
    are). A note gives the reason. Without a limit of memory, the micro-batch stays one sequence.

    Raises:
        ConfigError: not even a micro-batch of one sequence fits.
        DataError: there is a limit, and the vocabulary is not known.
    """
    first = sync_mode.choose_sync_mode(plan, device_bytes, layers=layers)
    limit, larger = sync_mode.limit_of(plan, device_bytes), list(_larger(plan))
    if not larger:
        return first
    if limit is None:
        why = "none is given, and no limit of memory is known; memory_gib sets one"
        return sync_mode.with_note(first, f"micro_batch_size {plan.batch.micro_batch_size}: {why}.")
    fitting, missed = [first], ""
    for option in larger:
        try:
            fitting.append(sync_mode.choose_sync_mode(option, device_bytes, layers=layers))
        except ConfigError:
            missed = f"; {option.batch.micro_batch_size} would not fit into {amount(limit.num_bytes)} ({limit.source})"
            break
    best = min(fitting, key=lambda option: expected.seconds(option, sync_mode.vocab_size_of(option), layers, PRICED_ON))
    sizes = ", ".join(str(option.batch.micro_batch_size) for option in fitting)
    size = best.batch.micro_batch_size
    return sync_mode.with_note(
        best,
        f"micro_batch_size {size}: the fastest predicted of those that fit, {sizes}{missed}. Seconds are those on"
        f" {PRICED_ON}, whichever GPU runs it: set micro_batch_size where `megaaccum plan --gpu NAME` says otherwise.",
    )


def _larger(plan: Plan) -> Iterator[Plan]:
    """Plans of larger micro-batches, where none is given, that keep the other keys, every rule, and the batch of every
    step. With `reproducible: layout` results depend on it, so there are none."""
    assert plan.written is not None
    is_given = plan.written.batch.micro_batch_size is not None
    if is_given or plan.config.sharding.reproducible == "layout" or plan.layout.schedule not in SCHEDULES:
        return
    for size in divisors(plan.batch.device_batch_size * plan.batch.grad_accum_steps):
        if not plan.batch.micro_batch_size < size <= LARGEST_MICRO_BATCH:
            continue
        batch = replace(plan.written.batch, micro_batch_size=size)
        origin = plan.written.origin | {"micro_batch_size": PLANNER}
        try:
            option = resolve(replace(plan.written, batch=batch, origin=origin), world_size=plan.layout.world_size)
        except ConfigError:
            continue
        if option.batch.micro_batch_size == size and option.ramp.intervals == plan.ramp.intervals:
            yield option
