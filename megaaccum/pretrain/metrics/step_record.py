"""A step's measurements as the log has them: seconds by phase, bytes between ranks, bytes held."""

from __future__ import annotations

from collections.abc import Mapping

from megaaccum.observe.memory import Memory
from megaaccum.observe.traffic import Traffic

OF_A_STEP = ("data", "agree", "gather", "forward_backward", "reduce", "optimizer", "other")
"""Phases of the log that make a step's seconds. data: the wait for micro-batches. agree: ranks compare what they are
about to do, which includes the wait for a late rank. other: the norm, the verdict, the log."""
BETWEEN_STEPS = ("evaluation", "checkpoint")
"""Phases of the log beside the steps, noted with the step after them."""


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """{`seconds_data`: seconds, ...}, for the log: all of `seconds` under the log's phases, and `seconds_per_step`, the
    sum over OF_A_STEP."""
    found = dict.fromkeys(OF_A_STEP, 0.0)
    for name, value in seconds.items():
        phase = name if name in OF_A_STEP + BETWEEN_STEPS else "other"
        found[phase] = found.get(phase, 0.0) + value
    record = {f"seconds_{phase}": value for phase, value in found.items()}
    return {"seconds_per_step": sum(found[phase] for phase in OF_A_STEP)} | record


def between_steps(seconds: Mapping[str, float]) -> dict[str, float]:
    """{`seconds_checkpoint`: seconds, ...}: the phases beside the steps that `seconds` has."""
    return {f"seconds_{phase}": seconds[phase] for phase in BETWEEN_STEPS if phase in seconds}


def bytes_by_collective(traffic: Traffic) -> dict[str, float]:
    """{`bytes_all_gather_dp_cp`: bytes, ...}, for the log: dtypes added up."""
    totals: dict[str, float] = {}
    for lane, count in traffic.items():
        name = "_".join(["bytes", *lane.split("/")[:2]])
        totals[name] = totals.get(name, 0.0) + count.num_bytes
    return totals


def bytes_by_kind(memory: Memory) -> dict[str, int]:
    """{`memory_gradients_whole_bytes`: bytes, ...}, for the log."""
    return {f"memory_{kind}_bytes": count for kind, count in memory.items()}
