"""The bytes and seconds of a plan's step by the planner: for receipts, and for alarms when a run leaves them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megaaccum.config.plan import Plan
from megaaccum.lab.planner import footprint, matrices
from megaaccum.lab.planner.hardware import entry_of, load_hardware
from megaaccum.lab.planner.layouts import SCHEDULES, Layouts
from megaaccum.lab.planner.sync_mode import Forecast
from megaaccum.lab.planner.time import TimeModel
from megaaccum.lab.planner.workload import Workload
from megaaccum.optim.owners import COSTS
from megaaccum.pretrain.metrics.expected import Expected
from megaaccum.pretrain.model.layers import Layers

OF_THE_DEVICE = ("runtime", "margin")
"""Kinds of planner/memory.py that are no tensors."""


def of_plan(plan: Plan, vocab: int, layers: Layers) -> list[Expected]:
    """By pipeline rank; empty if the planner does not know the schedule (a table of the user's). vocab: entries of
    the vocabulary before padding. layers: those that the machine trains."""
    if plan.layout.schedule not in SCHEDULES:
        return []
    forecast, mode = Forecast(plan, vocab, layers), plan.config.sharding
    model, at = forecast.model(mode), forecast.layout(mode)
    m, ranks = plan.batch.num_microbatches, plan.layout.dp * plan.layout.cp
    one = footprint.moved(mode, 1, ranks, microbatches=m, cp=plan.layout.cp).total
    others = footprint.sums_of_others(mode, ranks, m, plan.layout.cp)
    least = min(others) / max(*others, 1)
    found = []
    for pp_rank in range(plan.layout.pp):
        moved = forecast.moved(mode, pp_rank)
        kinds = {kind: float(size[0]) for kind, size in model.on_rank(at, pp_rank).items()}
        tensors = {kind: size for kind, size in kinds.items() if kind not in OF_THE_DEVICE}
        found.append(Expected(pp_rank, moved.gathered, moved.reduced, one, tensors, least))
    return found


def seconds(plan: Plan, vocab: int, layers: Layers | None, hardware: str) -> float:
    """Predicted seconds of a step on that entry of the hardware table. The planner has to know the schedule."""
    model, at = time_model(plan, vocab, layers, hardware)
    return float(model.step(at).total[0])


def time_model(plan: Plan, vocab: int, layers: Layers | None, hardware: str) -> tuple[TimeModel, Layouts]:
    """The planner's model of time for a plan on that entry of the hardware table, and the plan's layout as its one
    row."""
    forecast, mode = Forecast(plan, vocab, layers), plan.config.sharding
    workload = Workload(
        config=plan.config, model=plan.config.model, sharding=plan.config.sharding, vocab_size=vocab,
        world_size=plan.layout.world_size, hardware=load_hardware(hardware),
        global_batch_size=plan.batch.global_batch_size,
    )  # fmt: skip
    return workload.time_model(forecast.model(mode)), forecast.layout(mode)


def for_receipt(
    plan: Plan, vocab: int, layers: Layers, *, device: str | None, device_bytes: float | None
) -> dict[str, Any]:
    """The prediction as a receipt has it. device: its name, None for a CPU, of which the hardware table has
    no entry."""
    stages = of_plan(plan, vocab, layers)
    hardware = entry_of(device, device_bytes) if stages and device is not None else None
    return {
        "stages": [asdict(each) for each in stages],
        "muon": asdict(matrices.forecast(plan)) if stages and plan.config.optimizer.optimizer in COSTS else None,
        "hardware": hardware,
        "seconds_per_step": None if hardware is None else seconds(plan, vocab, layers, hardware),
    }
