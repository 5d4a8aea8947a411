"""Seconds by phase: every moment of a run after its first step belongs to one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

OF_A_STEP = ("data", "agree", "gather", "forward_backward", "reduce", "optimizer", "other")
"""Phases of the log that make a step's seconds. data: the wait for micro-batches. agree: ranks compare what they are
about to do, which includes the wait for a late rank. other: the norm, the verdict, the log."""
BETWEEN_STEPS = ("evaluation", "checkpoint")
"""Phases of the log beside the steps, noted with the step after them."""


class Stopwatch:
    """Laps of one rank, by phase. clock: returns seconds. Nothing counts before the first phase is entered."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "", 0.0

    def enter(self, phase: str) -> None:
        """End the phase that was entered last, and begin this one; "" begins none."""
        now = self.clock()
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of `phase`; the phase that it interrupts continues afterwards."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count seconds, by phase, that `pop` has returned before."""
        for phase, count in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + count

    def pop(self) -> dict[str, float]:
        """Seconds by phase since the last call, up to this moment; the present phase continues."""
        self.enter(self._phase)
        seconds, self._seconds = self._seconds, {}
        return seconds


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
