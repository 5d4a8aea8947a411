"""The interface by which the planner and verification reach the training loop, which imports neither."""

from __future__ import annotations

from typing import Any, Protocol

from megaaccum.config import Plan
from megaaccum.engine import Engine
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.data.shared import SharedLoader
from megaaccum.pretrain.metrics.expected import Expected


class Advisor(Protocol):
    """Decisions and predictions for a run. `megaaccum train` passes `megaaccum.lab.advisor`. vocab: entries of the
    vocabulary before padding."""

    def resolve(self, plan: Plan, device_bytes: float | None) -> tuple[Plan, list[str]]:
        """Choose a schedule (`auto`), micro-batch and sync mode that fit. Returns the plan and the notes of
        `megaaccum check` on it, the same on every rank. Raises ConfigError if nothing fits."""

    def sync_mode_of(self, plan: Plan) -> str:
        """The sharding mode of a plan, as text."""

    def expected_of(self, plan: Plan, vocab: int) -> list[Expected]:
        """The bytes that ranks move and hold, by pipeline rank; empty if the schedule is not known."""

    def predicted(self, plan: Plan, vocab: int, *, device: str | None, device_bytes: float | None) -> dict[str, Any]:
        """The prediction in the form of a receipt. device: its name, None for a CPU."""

    def verify_start(self, engine: Engine, data: Datasets, loader: SharedLoader) -> str | None:
        """Verify the next step of a run if that is due, and return a line for the log. Collective over the world.
        Raises StepError on every rank if the gradient depends on how its samples are split."""
