"""The interface by which planner and proofs reach the training loop, which imports neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.engine import Engine
    from megaaccum.pretrain.data.dataset import Datasets
    from megaaccum.pretrain.data.shared import SharedLoader
    from megaaccum.pretrain.metrics.expected import Expected


class Advisor(Protocol):
    """`megaaccum.lab.advisor` is the one that `megaaccum train` brings. vocab: entries of the vocabulary before
    padding."""

    def resolve(self, plan: Plan, device_bytes: float | None) -> tuple[Plan, list[str]]:
        """The plan with a schedule (`auto`), a micro-batch and a sync mode that fit, and, where there is a choice, why
        these; the same on every rank. Raises ConfigError if none fits."""

    def sync_mode_of(self, plan: Plan) -> str:
        """The sharding mode of a plan, in words."""

    def expected_of(self, plan: Plan, vocab: int) -> list[Expected]:
        """Bytes that ranks move and hold, by pipeline rank; empty if the schedule is not known."""

    def predicted(self, plan: Plan, vocab: int, *, device: str | None, device_bytes: float | None) -> dict[str, Any]:
        """The prediction as a receipt has it. device: its name, None for a CPU."""

    def verify_start(self, engine: Engine, data: Datasets, loader: SharedLoader) -> str | None:
        """Verify the next step of a run if that is due, and return a line for the log. Collective over the world.
        Raises StepError on every rank if the gradient depends on how its samples are split."""
