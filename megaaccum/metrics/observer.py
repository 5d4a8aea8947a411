"""The observer of a step: seconds by phase, what crosses ranks, memory by kind, and where this rank is right now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.metrics.memory import Activations, Memory
from megaaccum.metrics.traffic import Count, Meter, Traffic

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend


class Observer:
    """Watches the steps of one model over one backend, on this rank. trace: for the watchdog, when the step hangs.

    Seconds are the host's: on a GPU what is still queued counts for a later phase.
    """

    def __init__(self, groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend):
        self.trace = Trace()
        self.seconds: dict[str, float] = {}
        self._backend = backend
        self._meter = Meter(groups)
        self._activations = Activations(chunks)
        self._traffic: Traffic = {}
        self._phase, self._since = "", 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all that the step does in one call; what several calls did until `take` adds up."""
        self.phase("agree")
        with self._meter.counting() as traffic:
            yield
        self._lap("")
        for lane, count in traffic.items():
            known = self._traffic.setdefault(lane, Count())
            known.calls += count.calls
            known.num_bytes += count.num_bytes
            known.seconds += count.seconds
        self.note_held()
        self._backend.memory.note("p2p", self._meter.most_receiving)

    def phase(self, name: str) -> None:
        """The phase that was entered last ends, and this one begins."""
        self._lap(name)
        self.trace.enter(name)

    def _lap(self, following: str) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = following, now

    def flushing(self) -> AbstractContextManager[None]:
        """Around the flushes of an attempt: what they hold beside the backend's tensors."""
        return self._activations.watching(self._backend.memory)

    def note_held(self) -> None:
        """Note what the backend holds now."""
        self._backend.memory.look(self._backend.tensors())

    def take(self) -> tuple[dict[str, float], Traffic, Memory]:
        """(seconds by phase, traffic, memory by kind) since the last call."""
        seconds, self.seconds = self.seconds, {}
        traffic, self._traffic = self._traffic, {}
        return seconds, traffic, self._backend.memory.take()
