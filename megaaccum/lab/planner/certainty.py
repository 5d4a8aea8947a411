"""The probability that a step fits, from how far predicted peaks were off."""

from __future__ import annotations

from typing import Any

import numpy as np

MEASURED = (
    0.822, 0.950, 0.968, 0.975, 0.977, 0.979, 0.983, 0.987, 0.990, 0.993, 0.996,
    0.998, 1.001, 1.007, 1.014, 1.024, 1.031, 1.053, 1.057, 1.080, 1.482,
)  # fmt: skip
"""Measured over predicted peaks of 68 published runs whose figures no constant was fitted to: every twentieth of them
(`python -m benchmarks planner_accuracy` prints these)."""


def fit_probability(predicted: Any, capacity: float) -> Any:
    """The share of those runs that would have fitted into `capacity` if `predicted` had been their prediction."""
    return np.interp(capacity / np.asarray(predicted, dtype=float), MEASURED, np.linspace(0, 1, len(MEASURED)))
