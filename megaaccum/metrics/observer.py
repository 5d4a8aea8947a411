"""The observer of a step: seconds by phase, what crosses ranks, memory by kind, and where this rank is right now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from megaaccum.distributed import cpu
from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.metrics.memory import Activations, Memory
from megaaccum.metrics.phases import Stopwatch
from megaaccum.metrics.traffic import Count, Meter, Traffic

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend


class Observer:
    """Watches the steps of one model over one backend, on this rank. trace: for the watchdog, when the step hangs.

    Seconds are the host's: on a GPU what is still queued counts for a later phase. stopwatch: also of what happens
    between the steps, as `between` unless the loop enters a phase.
    """

    def __init__(self, groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend):
        self.trace = Trace()
        self.stopwatch = Stopwatch()
        self._backend = backend
        self._meter = Meter(groups)
        self._activations = Activations(chunks)
        self._traffic: Traffic = {}
        self._forwards: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._forward_seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all that the step does in one call; what several calls did until `take` adds up."""
        self.phase("agree")
        with self._meter.counting() as traffic:
            yield
        self.stopwatch.enter("between")
        for lane, count in traffic.items():
            known = self._traffic.setdefault(lane, Count())
            known.calls += count.calls
            known.num_bytes += count.num_bytes
            known.seconds += count.seconds
        self.note_held()
        self._backend.memory.note("p2p", self._meter.most_receiving)

    def phase(self, name: str) -> None:
        """The phase that was entered last ends, and this one begins."""
        self.stopwatch.enter(name)
        self.trace.enter(name)

    def flushing(self) -> AbstractContextManager[None]:
        """Around the flushes of an attempt: what they hold beside the backend's tensors."""
        return self._activations.watching(self._backend.memory)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of this rank, on a GPU by its own clock."""
        if cpu.has_accelerator():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._forwards.append((begin, end))
        else:
            start = self.stopwatch.clock()
            yield
            self._forward_seconds += self.stopwatch.clock() - start

    def forward_seconds(self) -> float:
        """Seconds of the forwards since the last call, which are all done: the step's verdict comes after them."""
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in self._forwards)
        seconds = self._forward_seconds + milliseconds / 1e3
        self._forwards, self._forward_seconds = [], 0.0
        return seconds

    def note_held(self) -> None:
        """Note what the backend holds now."""
        self._backend.memory.look(self._backend.tensors())

    def take(self) -> tuple[dict[str, float], Traffic, Memory]:
        """(seconds by phase, traffic, memory by kind) since the last call."""
        traffic, self._traffic = self._traffic, {}
        return self.stopwatch.take(), traffic, self._backend.memory.take()
