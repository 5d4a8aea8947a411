"""Partial sums of gradients that wait for others on a rank (`reproducible: layout`), through the flushes of a step. The
trees are those of sharding/sum_tree.py."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from megaaccum.lab.planner import pipeline
from megaaccum.lab.planner.gather_units import max_of

Moment = tuple[tuple[int, bool], ...]
"""Of the matrices of each chunk of a rank, and then of the rest of each, how many sums there are, and whether all
micro-batches are in them."""
Change = tuple[Moment, Moment, tuple[bool, ...]]
"""Before and after a micro-batch brings gradients, and to which entries it does."""


@cache
def partial_sums(leaves: int, start: int, stop: int) -> int:
    """How many sums there are of the leaves from `start` up to `stop`, when all that can be added is."""
    if start <= 0 and stop >= leaves:
        return 1
    if stop <= 0 or start >= leaves:
        return 0
    half = leaves // 2
    return partial_sums(half, start, stop) + partial_sums(leaves - half, start - half, stop - half)


def odd_part(ranks: Any) -> Any:
    """Ranks that are left when they are halved while that goes; a tree of their runs is halved alike."""
    return ranks // (ranks & -ranks)


@cache
def sums_of_runs(each: int, ranks: int) -> tuple[int, ...]:
    """How many sums the run of `each` leaves of each of `ranks` ranks comes to: one where they are a power of two."""
    odd: int = odd_part(ranks)
    return tuple(partial_sums(odd * each, rank * each, (rank + 1) * each) for rank in range(odd)) * (ranks // odd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The backwards of a step on pipeline rank `rank`."""

    schedule: str
    pp: int
    vpp: int
    rank: int
    flushes: int = 1

    def changes(self, microbatches: int, ranks: int, *, in_runs: bool = False) -> set[Change]:
        """Every change that differs. microbatches: of a flush; of each, those of `ranks` ranks come at once, or
        (in_runs) one of them has those of its own, which are a run of the step's."""
        return _changes(self, microbatches, ranks, in_runs)

    def done(self, microbatches: int) -> Iterator[tuple[int, ...]]:
        """Micro-batches that each chunk has the gradients of, from none to all, as pipeline.gradients_done has them."""
        flush = pipeline.gradients_done(
            self.schedule, pp=self.pp, vpp=self.vpp, rank=self.rank, microbatches=microbatches
        )
        for before in range(0, self.flushes * microbatches, microbatches):
            for counts in flush:
                yield tuple(before + count for count in counts)


@cache
def _changes(passes: Passes, microbatches: int, ranks: int, in_runs: bool) -> set[Change]:
    count = passes.flushes * microbatches
    runs = [(rank * count, 1) for rank in range(ranks)] if in_runs else [(0, ranks)]
    found: set[Change] = set()
    for start, step in runs:
        sums = [partial_sums(count * ranks, start, start + done * step) for done in range(count + 1)]
        for before, after in itertools.pairwise(passes.done(microbatches)):
            old, new = (tuple((sums[done], done == count) for done in counts) for counts in (before, after))
            found.add((old, new, tuple(map(operator.lt, before, after))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Sums that wait. sizes: elements of the matrices of each chunk, and of the rest of each. units: of each of these,
    (bytes of whole gradients, elements before it) of its units in the order of a backward; one of nothing where all
    come at once. per_sum: bytes of an element of a partial sum. totals: elements whose finished sums stay. per_total:
    bytes of an element of the first of them."""

    sizes: Sequence[Any]
    units: Sequence[Sequence[tuple[Any, Any]]]
    per_sum: float
    totals: float
    per_total: float = 4.0

    def most(self, changes: set[Change]) -> Any:
        """Bytes when they are most."""
        return max_of(each for change in changes for each in self._through(*change))

    def _through(self, before: Moment, after: Moment, brought: tuple[bool, ...]) -> Iterator[Any]:
        """From one moment to the next: a unit's sums change when its gradients go."""
        yield self._at(after)
        for old, new, units, comes in zip(before, after, self.units, brought, strict=True):
            if comes:
                change = self._per_element(new) - self._per_element(old)
                yield from (unit + self._at(before) + change * gone for unit, gone in units)

    def _at(self, moment: Moment) -> Any:
        sums = list(zip(moment, self.sizes, strict=True))
        waiting = sum(self._per_element(each) * size for each, size in sums if not each[1])
        totals = sum(size for (_, is_whole), size in sums if is_whole)
        per_total = max((self._per_element(each) for each in moment if each[1]), default=0.0)
        return waiting + per_total * np.minimum(totals, self.totals)

    def _per_element(self, sums: tuple[int, bool]) -> float:
        count, is_whole = sums
        if is_whole:
            return self.per_total + self.per_sum * (count - 1) if self.totals else 0.0
        return self.per_sum * count
