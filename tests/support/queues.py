"""A GPU's hardware queues, simulated: what the executor launches on every rank, worked off in order.

A rank launches without waiting. Its kernels go to streams, streams to queues in turn, and a queue does its kernels one
after another: each starts when what it depends on is done, and holds its queue until it has ended (or, if `lenient`,
until it has started, as CUDA does while there is room on the device). A send and its receive end when both have
started. NCCL gives every pair of ranks a stream for each of its groups.

What is launched comes from the executor's own `Mail`, over channels that only note it.

    python -m tests.support.queues [PP]

prints, for every built-in schedule, at how many passes a host that waits for its device would hang the flush.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from megaaccum.executor import p2p
from megaaccum.executor.p2p import Mail
from megaaccum.schedule import build
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.validate import sends, sends_needed

COMPUTE = "compute"


@dataclass(frozen=True)
class Kernel:
    """needs: kernels of this rank, by number, that have to have ended. message: of a send or receive."""

    text: str
    stream: Hashable
    needs: tuple[int, ...]
    message: Hashable = None


@dataclass
class Launched:
    """Takes the place of PipelineChannels and notes what a rank launches."""

    rank: int
    members: list[int]
    on_nccl: bool = True
    kernels: list[Kernel] = field(default_factory=list)
    _awaited: list[int] = field(default_factory=list)
    _computed: list[int] = field(default_factory=list)
    _count: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def compute(self, text: str) -> None:
        """A pass, which begins when every message that was waited for has come."""
        self._computed = [self._launch(text, COMPUTE)]
        self._awaited = []

    def send(self, tensor: Any, target: int, kind: str) -> _Work:
        return self._exchange("send", (self.rank, target, kind))

    def receive(self, buffer: Any, source: int, kind: str) -> _Work:
        return self._exchange("receive", (source, self.rank, kind))

    def _exchange(self, way: str, channel: tuple[int, int, str]) -> _Work:
        source, target, kind = channel
        number = self._count[way, channel]
        self._count[way, channel] += 1
        text = f"rank {self.rank}: {way} {kind} {source}->{target} number {number}"
        return _Work(self, self._launch(text, stream_of(channel), (channel, number)))

    def _launch(self, text: str, stream: Hashable, message: Hashable = None) -> int:
        self.kernels.append(Kernel(text, stream, (*self._awaited, *self._computed), message))
        return len(self.kernels) - 1


@dataclass
class _Work:
    on: Launched
    kernel: int

    def wait(self) -> None:
        self.on._awaited.append(self.kernel)

    def is_completed(self) -> bool:
        return True


def stream_of(channel: tuple[int, int, str]) -> Hashable:
    source, target, kind = channel
    return kind, target > source, frozenset((source, target))


def launched(schedule: Schedule, rank: int, *, at_once: bool = False) -> list[Kernel]:
    """The kernels that `rank` launches in one flush, in order. at_once: receives are posted ahead whatever
    their messages wait for."""
    return _launched(schedule, rank, at_once, p2p.AHEAD_ON_NCCL)


@cache
def _launched(schedule: Schedule, rank: int, at_once: bool, ahead: int) -> list[Kernel]:
    """Hundreds of simulations share a flush. ahead: what `Mail` reads for itself."""
    on = Launched(rank, list(range(schedule.pp)))
    with patch.object(torch.cuda, "current_stream", lambda: None):  # there is no GPU
        needs = {} if at_once else sends_needed(schedule, rank)
        mail = Mail(schedule, on, lambda _message: torch.empty(0), needs)  # type: ignore[arg-type]
    owner, last = schedule.rank_of_stage, schedule.num_stages - 1
    for action in schedule.actions(rank):
        stage, kind = schedule.stage(rank, action), "F" if action.kind == "F" else "B"
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        travels = action.kind != "W"
        if travels and 0 <= before <= last and owner[before] != rank:
            mail.receive(owner[before], kind, (before, action.microbatch))
        on.compute(f"rank {rank}: {action}")
        if travels and 0 <= after <= last and owner[after] != rank:
            mail.send(torch.empty(0), owner[after], kind)
    mail.finish()
    return on.kernels


Place = tuple[int, int]
"""A rank, and the number of one of its kernels."""


def passes(schedule: Schedule, *, at_once: bool = False) -> list[Place]:
    """Every pass of a flush."""
    kernels = [launched(schedule, rank, at_once=at_once) for rank in range(schedule.pp)]
    return [
        (rank, at) for rank, each in enumerate(kernels) for at, kernel in enumerate(each) if kernel.stream == COMPUTE
    ]


def stuck(
    schedule: Schedule,
    queues: int,
    offset: int = 0,
    *,
    lenient: bool = False,
    at_once: bool = False,
    waits: Collection[Place] = (),
) -> list[str]:
    """The kernels at which queues wait for ever, empty where the flush ends. Compute has queue 0; streams of messages
    share the others (or queue 0 where it is the only one) in the order in which they are connected, from `offset`.
    waits: kernels before whose launch the rank's host waits until its device has nothing left to do."""
    channels = _channels(schedule)
    ranks = [
        _Rank(
            launched(schedule, rank, at_once=at_once),
            _queue_of(channels, rank, queues, offset),
            lenient,
            sorted(at for where, at in waits if where == rank),
        )
        for rank in range(schedule.pp)
    ]
    begun: dict[Hashable, tuple[_Rank, int]] = {}
    while any(rank.go_on(begun) for rank in ranks):
        pass
    return [rank.kernels[waiting[0]].text for rank in ranks for waiting in rank.waiting.values() if waiting]


@cache
def _channels(schedule: Schedule) -> list[tuple[int, int, str]]:
    return sorted({channel for rank in range(schedule.pp) for channel in sends(schedule, rank)})


def _queue_of(channels: list[tuple[int, int, str]], rank: int, queues: int, offset: int) -> dict[Hashable, int]:
    mine = dict.fromkeys(stream_of(channel) for channel in channels if rank in channel[:2])
    others = max(queues - 1, 1)
    return {COMPUTE: 0} | {stream: (1 + (offset + at) % others) % queues for at, stream in enumerate(mine)}


class _Rank:
    def __init__(self, kernels: list[Kernel], queue_of: dict[Hashable, int], lenient: bool, waits: list[int]):
        self._lenient, self._waits = lenient, waits
        self.kernels, self.ended, self._started = kernels, set[int](), set[int]()
        self.waiting: dict[int, list[int]] = defaultdict(list)
        self._before: list[int | None] = []
        newest: dict[Hashable, int] = {}
        for number, kernel in enumerate(kernels):
            self.waiting[queue_of[kernel.stream]].append(number)
            self._before.append(newest.get(kernel.stream))
            newest[kernel.stream] = number

    def go_on(self, begun: dict[Hashable, tuple[_Rank, int]]) -> bool:
        """Do what can be done now; whether that was anything. begun: messages of which one side has started."""
        progress = False
        for queue in self.waiting.values():
            while queue and self._try(queue[0], begun):
                queue.pop(0)
                progress = True
        return progress

    def _try(self, number: int, begun: dict[Hashable, tuple[_Rank, int]]) -> bool:
        """Start the kernel if it can start; whether its queue can go on."""
        while self._waits and len(self.ended) == self._waits[0]:  # none after it has been launched
            self._waits.pop(0)
        if self._waits and number >= self._waits[0]:
            return False
        kernel, before = self.kernels[number], self._before[number]
        needs = {*kernel.needs, *([] if before is None else [before])}
        if number not in self._started and needs <= self.ended:
            self._started.add(number)
            if kernel.message is None:
                self.ended.add(number)
            elif kernel.message in begun:
                other, its = begun.pop(kernel.message)
                other.ended.add(its)
                self.ended.add(number)
            else:
                begun[kernel.message] = self, number
        return number in (self._started if self._lenient else self.ended)


OWN = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "v-half", "v-min"]
"""Schedules that the executor runs."""


def schedule(name: str, pp: int) -> Schedule:
    """A built-in schedule with 3 * pp micro-batches."""
    return build(name, pp=pp, num_microbatches=3 * pp, chunks=2 if name == "interleaved" else None)


def stuck_places(made: Schedule, *, at_once: bool = False) -> list[Place]:
    """Passes before which a host that waits for its device hangs the flush, with 32 hardware queues."""
    return [at for at in passes(made, at_once=at_once) if stuck(made, 32, waits=[at], at_once=at_once)]


def main(argv: list[str]) -> int:
    """Returns 1 if some flush of the executor can hang."""
    pp, some = int(argv[0]) if argv else 4, 0
    print(f"passes before which a host that waits for its device hangs the flush, pp {pp}, {3 * pp} micro-batches:")
    print(f"{'schedule':12} {'passes':>6} {'stuck':>6}  if every receive were posted at once")
    for name in OWN:
        made = schedule(name, pp)
        found = len(stuck_places(made))
        some += found
        print(f"{name:12} {len(passes(made)):6} {found:6}  {len(stuck_places(made, at_once=True))}")
    return int(some > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
