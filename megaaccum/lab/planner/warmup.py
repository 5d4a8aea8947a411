"""The price of batch warm-up: seconds, bubble and bytes of each batch on the way to the configured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaaccum.config import Plan
from megaaccum.config.batch_ramp import Rung
from megaaccum.lab.planner.layouts import from_rows, row_of
from megaaccum.lab.planner.workload import Workload
from megaaccum.units import GIB, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The steps of one batch size, as predicted."""

    rung: Rung
    seconds: float
    """Of one step."""
    bubble: float
    """Share of a flush in which the slowest rank waits."""
    num_bytes: float
    """Held by the most loaded rank at its peak."""


def price(workload: Workload, plan: Plan) -> list[Priced]:
    """Every batch of the plan's ramp, the configured one last; one entry without batch warm-up."""
    rungs = [*plan.ramp.rungs()]
    at = from_rows(row_of(replace(plan, batch=plan.ramp.batches[rung.size])) for rung in rungs)
    model = workload.memory_model()
    time, held = workload.time_model(model).step(at), model.peak(at).total
    return [
        Priced(
            rung=rung, seconds=float(time.total[i]), bubble=float(time.bubble[i]), num_bytes=float(held[i])
        )
        for i, rung in enumerate(rungs)
    ]  # fmt: skip


def lines(priced: Sequence[Priced]) -> list[str]:
    """A table of the batches, and what the steps before the configured one cost together."""
    table = [f"{'first step':>10}{'sequences':>11}{'s/step':>10}{'bubble':>9}{'GiB':>8}"]
    table += [
        f"{each.rung.first_step:>10,}{each.rung.size:>11,}{each.seconds:>10.3g}{each.bubble:>9.1%}"
        f"{each.num_bytes / GIB:>8.1f}"
        for each in priced
    ]
    rise, whole = priced[:-1], priced[-1]
    seconds = sum(each.seconds * (each.rung.num_steps or 0) for each in rise)
    as_fast = whole.rung.consumed_samples / whole.rung.size * whole.seconds
    return [
        *table,
        f"{whole.rung.first_step - 1:,} steps of warm-up take {duration(seconds)}, where whole batches would take"
        f" {duration(as_fast)} for the same {whole.rung.consumed_samples:,} sequences",
    ]
