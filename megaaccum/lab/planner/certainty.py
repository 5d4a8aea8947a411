"""The probability that a step fits, from how far predicted peaks were off."""

from __future__ import annotations

from typing import Any

import numpy as np

MEASURED = (
    0.820, 0.938, 0.959, 0.974, 0.976, 0.979, 0.983, 0.988, 0.990, 0.995, 0.996,
    0.997, 1.004, 1.007, 1.010, 1.014, 1.025, 1.050, 1.057, 1.079, 1.454,
)  # fmt: skip
"""Measured over predicted peaks of 68 published runs whose figures no constant was fitted to: every twentieth of them
(`python -m benchmarks planner_accuracy` prints these)."""


def fit_probability(predicted: Any, capacity: float) -> Any:
    """The share of those runs that would have fitted into `capacity` if `predicted` had been their prediction."""
    return np.interp(capacity / np.asarray(predicted, dtype=float), MEASURED, np.linspace(0, 1, len(MEASURED)))
