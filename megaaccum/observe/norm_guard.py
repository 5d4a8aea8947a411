"""An alarm on a gradient norm that is far above those of the steps before it."""

from __future__ import annotations

import math
from typing import Any

from megaaccum.config.schema import StepConfig

LEAST_DEVIATION = 0.05
"""A standard deviation counts as at least this share of the mean: norms that hardly move make no alarm of nothing."""


class NormGuard:
    """Exponentially weighted mean and variance of the norm, with weight 2 / (window + 1) (T. Finch, Incremental
    calculation of weighted mean and variance, 2009). Fed with the one norm that all ranks have: the same on each."""

    def __init__(self, step: StepConfig):
        self.action = step.grad_norm_guard
        self._deviations, self._window = step.grad_norm_guard_deviations, step.grad_norm_guard_window
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    @property
    def limit(self) -> float:
        """The largest norm that passes; infinite while the guard is off or has not seen `window` steps."""
        if self.action == "off" or self._count < self._window:
            return math.inf
        return self._mean + self._deviations * max(math.sqrt(self._variance), LEAST_DEVIATION * self._mean)

    def judge(self, norm: float) -> str | None:
        """A sentence when `norm` (finite) is above the limit, else None. A norm that is let pass enters the averages,
        so that with `warn` a new level is learnt."""
        limit = self.limit
        text = (
            f"gradient norm {norm:.4g} is above {limit:.4g}: mean {self._mean:.4g} over some {self._window} steps and"
            f" {self._deviations:g} deviations"
        )
        if norm <= limit or self.action == "warn":
            self._learn(norm)
        return text if norm > limit else None

    def _learn(self, norm: float) -> None:
        weight = 1.0 if self._count == 0 else 2.0 / (self._window + 1)
        difference = norm - self._mean
        self._mean += weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference**2)
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._variance = int(state["count"]), float(state["mean"]), float(state["variance"])
