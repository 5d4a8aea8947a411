"""The probability that a step fits, from how far predicted peaks were off."""

from __future__ import annotations

from typing import Any

import numpy as np

MEASURED = (
    0.820, 0.937, 0.971, 0.974, 0.978, 0.984, 0.986, 0.991, 0.993, 0.995, 0.996,
    0.997, 0.999, 1.004, 1.009, 1.011, 1.017, 1.026, 1.055, 1.079, 1.454,
)  # fmt: skip
"""Measured over predicted peaks of 68 published runs whose figures no constant was fitted to: every twentieth of them
(`python -m benchmarks planner_accuracy` prints these)."""


def fit_probability(predicted: Any, capacity: float) -> Any:
    """The share of those runs that would have fitted into `capacity` if `predicted` had been their prediction."""
    return np.interp(capacity / np.asarray(predicted, dtype=float), MEASURED, np.linspace(0, 1, len(MEASURED)))
