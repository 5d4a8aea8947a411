"""What happens to a step whose gradient is not finite: the policies of `nonfinite`, and the limits on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.errors import StepError

if TYPE_CHECKING:
    from megaaccum.config.schema import StepConfig
    from megaaccum.sharding import ShardingBackend

MOST_SHOWN = 6
"""Parameters that a message names."""


class ZeroNonFinite:
    """`nonfinite: zero`. Replaces by 0, in place, what is not finite in a rank's own gradients before they are reduced.

    Called by the backend with each whole local gradient. Counts stay on the device: nothing waits in a good step.
    """

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, grad: torch.Tensor) -> None:
        count = torch.isfinite(grad).logical_not_().sum()
        self._counts[name] = self._counts[name] + count if name in self._counts else count
        torch.nan_to_num_(grad, nan=0.0, posinf=0.0, neginf=0.0)

    def total(self) -> torch.Tensor:
        """Elements replaced on this rank since `clear`, float64 scalar on the gradients' device."""
        counts = list(self._counts.values())
        return torch.stack(counts).sum().double() if counts else torch.zeros((), dtype=torch.float64)

    def names(self) -> dict[str, int]:
        """{parameter: elements replaced on this rank since `clear`}, those with some."""
        return {name: int(count) for name, count in self._counts.items() if count}

    def clear(self) -> None:
        self._counts.clear()


class BadSteps:
    """Counts bad steps and ends the run at a limit; the same on every rank.

    Bad is a step that was not finite, whatever was done about it, and one that the guard of the norm skipped. An
    overflow by which an FP16 run finds its loss scale is not.
    """

    def __init__(self, step: StepConfig):
        self._limits = {"max_bad_steps_in_a_row": step.max_bad_steps_in_a_row, "max_bad_steps": step.max_bad_steps}
        self.in_a_row = 0
        self.total = 0

    def count(self, bad: bool, *, step: int, why: str) -> None:
        """Take note of step `step`. Raises StepError at a limit; `why` goes into its text."""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        self.total += bad
        if not bad:
            return
        for (key, limit), count in zip(self._limits.items(), (self.in_a_row, self.total), strict=True):
            if 0 < limit <= count:
                raise StepError(
                    f"step {step} brings the bad steps {'in a row' if key.endswith('row') else 'of the run'} to {count}"
                    f" ({key} {limit}). {why}. Resume with a lower lr or other data, or raise {key}."
                )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])


def describe(zero: ZeroNonFinite) -> str:
    """What was replaced where on all ranks, the same text on each; collective over the world."""
    everyone: list[dict[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, zero.names())
    places = [f"{n} of {name} on rank {r}" for r, names in enumerate(everyone) for name, n in (names or {}).items()]
    return ", ".join(places[:MOST_SHOWN]) + (
        f" and {len(places) - MOST_SHOWN} more" if len(places) > MOST_SHOWN else ""
    )


def install(backend: ShardingBackend, step: StepConfig) -> ZeroNonFinite | None:
    """Give the backend the sanitizer that `nonfinite: zero` asks for; None, and nothing is done, for every other."""
    if step.nonfinite != "zero":
        return None
    zero = ZeroNonFinite()
    backend.before_reduce = zero
    return zero
