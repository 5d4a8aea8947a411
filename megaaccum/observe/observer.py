"""The observer of a step: seconds by phase, bytes between ranks, memory by kind, and a trace for the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.distributed.groups import Groups
from megaaccum.observe.memory import Activations, Holder, Memory
from megaaccum.observe.traffic import Count, Meter, Traffic
from megaaccum.platform import cpu


class Stopwatch:
    """Laps of one rank, by phase: every moment of a run after its first step belongs to one. clock: returns seconds.
    Nothing counts before the first phase is entered."""

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


class Measured(NamedTuple):
    """Measurements of one step on this rank: seconds by phase, seconds of its forwards, traffic, memory by kind."""

    seconds: dict[str, float]
    forward_seconds: float
    traffic: Traffic
    memory: Memory


class Observer:
    """Measures the steps of one model over one backend, on this rank. trace: for the watchdog, when the step hangs.

    Seconds are the host's: on a GPU queued work counts for a later phase. stopwatch: also counts the time between the
    steps, as `between` unless the loop enters a phase.
    """

    def __init__(self, groups: Groups, chunks: list[torch.nn.Module], backend: Holder):
        self.trace = Trace()
        self.stopwatch = Stopwatch()
        self._backend = backend
        self._meter = Meter(groups)
        self._activations = Activations(chunks)
        self._traffic: Traffic = {}
        self._ended: Measured | None = None
        self.last_microbatch = 0
        """Index in the step of the last micro-batch of the flush that runs."""
        self._forward_seconds = 0.0
        self._began: Any = None
        self._forwards: list[tuple[Any, Any]] = []
        """Begin and end of each forward, as `_mark` gives them."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of one call of the step; the calls until `pop` add up."""
        self.phase("agree")
        try:
            with self._meter.counting() as traffic:
                yield
        finally:
            self.stopwatch.enter("between")
        self._add(traffic)
        self._backend.memory.note("p2p", self._meter.most_receiving)

    def _add(self, traffic: Traffic) -> None:
        for lane, count in traffic.items():
            self._traffic.setdefault(lane, Count()).add(count.calls, count.num_bytes, count.seconds)

    def phase(self, name: str) -> None:
        """End the phase that was entered last, and begin this one."""
        self.stopwatch.enter(name)
        self.trace.enter(name)

    def flushing(self) -> AbstractContextManager[None]:
        """Context of an attempt's flushes; measures what they hold beside the backend's tensors."""
        return self._activations.watching(self._backend.memory)

    # --- single passes, on a GPU by its own clock ---

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        self._began = self._mark()

    def end_forward(self, chunk: int, microbatch: int, output: object) -> None:
        self._forwards.append((self._began, self._mark()))

    def _mark(self) -> Any:
        """Now: a recorded event on a GPU, else seconds."""
        if not cpu.has_accelerator():
            return self.stopwatch.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Measure the backend's tensors when a chunk's last backward begins: its gradients are all there."""
        if microbatch == self.last_microbatch:
            self._backend.memory.measure(self._backend.tensors)

    def _seconds_in_forwards(self) -> float:
        """Seconds of the forwards since the last call. All have ended: the step's norm comes after them."""
        on_gpu, forwards, self._forwards = cpu.has_accelerator(), self._forwards, []
        spans = [begin.elapsed_time(end) / 1e3 if on_gpu else end - begin for begin, end in forwards]
        seconds, self._forward_seconds = self._forward_seconds + sum(spans), 0.0
        return float(seconds)

    # --- what a step came to ---

    def end_early(self) -> None:
        """Count from here on for the next step, before `pop` is called for this one."""
        self._add(self._meter.pop())
        self._ended = self.pop()

    def undo_end_early(self) -> None:
        """Count what was measured since `end_early` for the step that it ended."""
        ended, self._ended = self._ended, None
        assert ended is not None
        self._add(ended.traffic)
        self._forward_seconds += ended.forward_seconds
        self.stopwatch.add(ended.seconds)
        for kind, num_bytes in ended.memory.items():
            self._backend.memory.raise_to(kind, num_bytes)

    def pop(self) -> Measured:
        """The step's measurements, since the last call."""
        if self._ended is not None:
            ended, self._ended = self._ended, None
            return ended
        traffic, self._traffic = self._traffic, {}
        return Measured(self.stopwatch.pop(), self._seconds_in_forwards(), traffic, self._backend.memory.pop())
