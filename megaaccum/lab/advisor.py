"""The planner and the proofs, as the training loop takes them (`pretrain.training.training_run.Advisor`)."""

from __future__ import annotations

from typing import Any

from megaaccum.config import Plan
from megaaccum.engine import Engine
from megaaccum.lab.planner import auto_schedule, expected, footprint, sync_mode
from megaaccum.lab.verification import at_start
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.data.shared import SharedLoader
from megaaccum.pretrain.metrics.expected import Expected
from megaaccum.pretrain.model.machine import layer_kind


def resolve(plan: Plan, device_bytes: float | None) -> tuple[Plan, list[str]]:
    """The plan with a schedule (`auto`), a micro-batch and a sync mode that fit, and its notes, those on choices
    only if there were any; the same on every rank. Raises ConfigError if none fits."""
    settled = auto_schedule.choose_schedule(plan, device_bytes, layers_of=layer_kind)
    is_chosen = sync_mode.limit_of(plan, device_bytes) is not None or auto_schedule.is_open(plan)
    return settled, [note for note in settled.notes if is_chosen or note in plan.notes]


def sync_mode_of(plan: Plan) -> str:
    """The sharding mode of a plan, in words."""
    return footprint.mode_name(plan.config.sharding)


def expected_of(plan: Plan, vocab: int) -> list[Expected]:
    """Bytes that ranks move and hold, by pipeline rank; empty if the schedule is not known."""
    return expected.of_plan(plan, vocab, layer_kind(plan))


def predicted(plan: Plan, vocab: int, *, device: str | None, device_bytes: float | None) -> dict[str, Any]:
    """The prediction as a receipt has it. device: its name, None for a CPU."""
    return expected.for_receipt(plan, vocab, layer_kind(plan), device=device, device_bytes=device_bytes)


def verify_start(engine: Engine, data: Datasets, loader: SharedLoader) -> str | None:
    """Verify the next step of a run if that is due, and return a line for the log. Collective over the world. Raises
    StepError on every rank if the gradient depends on how its samples are split."""
    return at_start.verify_start(engine, data, loader) if at_start.is_due(engine) else None
