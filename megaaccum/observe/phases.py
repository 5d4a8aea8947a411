"""Seconds by phase: every moment of a run after its first step belongs to one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


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
