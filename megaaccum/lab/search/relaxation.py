"""A lower bound where memory is tight: the least time that a few ranks need, in the best of all orders of theirs.

The ranks of a run (some neighbours, r to r + k) do one pass at a time and hold no more than their limit; the others
only delay what goes through them, by the time of their passes. Every order of the pipeline is one of these ranks too,
and no slower in this problem, so that its optimum is a bound.

The optimum is found by trying all orders, pass by pass in the order of their starts. Two beginnings of an order with
the same passes differ only in times: of when each rank is free, and of when each micro-batch gets back to the ranks.
One that is nowhere earlier than another is dropped. The less the ranks can hold, the fewer micro-batches are on their
way, and the fewer beginnings are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import gt

from megaaccum.schedule.orders import F, I, Problem, W

LABELS = 300_000
"""Beginnings that are followed: some 3 s of one core."""
WIDEST = 800
"""Beginnings with as many passes above which memory is not tight enough for this bound."""
_UNITS = 1e7
"""Parts of a makespan to which times are rounded down."""
Label = tuple[int, ...]
"""A beginning: until when the flush lasts at least, when each rank is free, when each micro-batch that is on its way
between two passes is there, way by way. Nothing in it is earlier than the last pass started."""


def bound_by_ranks(problem: Problem, makespan: float) -> float:
    """The largest bound of single ranks, then pairs of neighbours and so on while LABELS last, at most `makespan`
    (which some order reaches). 0 without a limit, or where it is not tight."""
    best, left = 0.0, LABELS
    if problem.limit is None:
        return best
    for size in range(1, problem.pp + 1):
        for first in range(problem.pp - size + 1):
            part = _Part(problem, range(first, first + size), makespan / _UNITS)
            seconds, followed = part.least(left)
            left -= followed
            if seconds is None:
                return best
            best = max(best, min(seconds, makespan))
    return best


class _Part:
    """Passes of some ranks, by number: forwards down the pipeline, input gradients back up, then weight gradients in
    the same order as input gradients. Times are in units of `unit` seconds."""

    def __init__(self, problem: Problem, ranks: Sequence[int], unit: float):
        held = sorted(stage for rank in ranks for stage in problem.stages[rank])
        bound, memory = problem.bound(), problem.memory
        self.n, self.m, self.unit = len(held), problem.m, unit
        self.passes = [(F, s) for s in held] + [(kind, s) for kind in (I, W) for s in reversed(held)]
        seconds = [problem.durations[kind][s] for kind, s in self.passes]
        starts = [(bound.enter if kind == F else bound.back)[s] for kind, s in self.passes[: 2 * self.n]]
        ends = [0.0, *(start + each for start, each in zip(starts, seconds, strict=False))]
        self.seconds = [self._units(each) for each in seconds]
        self.apart = [self._units(start - end) for start, end in zip(starts, ends, strict=False)]
        """Before each pass, from the one that it needs."""
        self.follow = [self._units(bound.leave[s]) if kind == I else 0 for kind, s in self.passes]
        """What is left of the flush after each pass, at least."""
        own = {s: at for at, rank in enumerate(ranks) for s in problem.stages[rank]}
        self.rank = [own[s] for _, s in self.passes]
        self.room = [problem.room[rank] for rank in ranks]
        takes = {F: memory.activation, W: [-each for each in memory.deferred]}
        takes[I] = [kept - whole for kept, whole in zip(memory.deferred, memory.activation, strict=True)]
        self.takes = [takes[kind][s] for kind, s in self.passes]

    def _units(self, seconds: float) -> int:
        return max(0, math.floor(seconds / self.unit))

    def least(self, most_labels: int) -> tuple[float | None, int]:
        """(seconds of the best order, labels that were followed); None where these are more than most_labels, or
        memory is not tight."""
        layer = {(0,) * len(self.passes): [(0,) * (1 + len(self.room))]}
        followed = 0
        for _ in range(self.m * len(self.passes)):
            width = sum(map(len, layer.values()))
            followed += width
            if width > WIDEST or followed > most_labels:
                return None, followed
            then: dict[Label, set[Label]] = {}
            for counts, labels in layer.items():
                for this, after in self._next(counts, labels):
                    then.setdefault((*counts[:this], counts[this] + 1, *counts[this + 1 :]), set()).add(after)
            layer = {counts: _earliest(labels) for counts, labels in then.items()}
        (done,) = layer.values()
        return min(map(max, done)) * self.unit, followed

    def _next(self, counts: Label, labels: Sequence[Label]) -> Iterator[tuple[int, Label]]:
        """(pass, label after it) of all that can follow `labels`, which have done `counts` of each pass."""
        places = self._places(counts)
        possible = list(self._possible(counts))
        for label in labels:
            starts = []
            for this in possible:
                free = label[1 + self.rank[this]]
                there = label[places[this]] if 0 < this < 2 * self.n else self.apart[0] if this == 0 else 0
                starts.append(max(free, there))
            # A pass that takes no memory goes into a gap that is long enough for it.
            soon = min((start + self.seconds[this] for this, start in zip(possible, starts, strict=True)
                        if self.takes[this] <= 0), default=math.inf)  # fmt: skip
            for this, start in zip(possible, starts, strict=True):
                if start < soon or (start + self.seconds[this] == soon and self.takes[this] <= 0):
                    yield this, self._after(label, this, start, places)

    def _places(self, counts: Label) -> list[int]:
        """Where in a label the first of the micro-batches is that go to each pass, and the end of all. Micro-batches
        reach the first pass and weight gradients from no other rank."""
        places = [0, 1 + len(self.room)]
        for this in range(1, 2 * self.n):
            places.append(places[-1] + counts[this - 1] - counts[this])
        return places

    def _possible(self, counts: Label) -> Iterator[int]:
        """Passes of which a next one has what it needs of earlier passes, and its memory."""
        held = [0.0] * len(self.room)
        for this, count in enumerate(counts):
            held[self.rank[this]] += self.takes[this] * count
        for this, count in enumerate(counts):
            needed = this - 1 if this < 2 * self.n else this - self.n
            if count < (counts[needed] if this else self.m):
                if self.takes[this] <= 0 or held[self.rank[this]] + self.takes[this] <= self.room[self.rank[this]]:
                    yield this

    def _after(self, label: Label, this: int, start: int, places: Sequence[int]) -> Label:
        end = start + self.seconds[this]
        then = list(label)
        then[0] = max(then[0], end + self.follow[this])
        then[1 + self.rank[this]] = end
        if this < 2 * self.n - 1:
            then.insert(places[this + 2], end + self.apart[this + 1])
        if 0 < this < 2 * self.n:
            del then[places[this]]
        return tuple([each if each > start else start for each in then])


def _earliest(labels: set[Label]) -> list[Label]:
    """Those that no other is as early as in everything."""
    kept: list[Label] = []
    for label in sorted(labels, key=sum):
        if all(any(map(gt, other, label)) for other in kept):
            kept.append(label)
    return kept
