"""A tighter lower bound: times by which no order can end, found by contradiction.

Assume that all is done at time T. Every pass then has an earliest start and a latest end: from what it needs and what
needs it; from the room of its rank, which makes a forward wait for an earlier micro-batch to leave; and from its rank,
which does one pass at a time: what has to come before a pass takes its time, and of two passes one comes first as soon
as the other way round would end after T (Carlier and Pinson's immediate selection). If some pass has no time left, no
order ends by T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from megaaccum.schedule.memory import TINY
from megaaccum.schedule.orders import F, I, Problem, W

Array = np.ndarray[Any, Any]
STEPS = 10
"""Times that are tried between the plain bound and the best order known: they leave 1/1024 of what is between."""
MOST_PASSES = 600
"""Passes of one rank above which it is not tried: work and memory grow with their square."""


def refuted_until(problem: Problem, makespan: float) -> float:
    """A lower bound of all orders of `problem`, at most `makespan` (which some order reaches). It is the plain bound
    where ranks have more than MOST_PASSES passes."""
    low, high = problem.bound().seconds, makespan
    if max(len(held) for held in problem.stages) * 3 * problem.m > MOST_PASSES or low >= high:
        return min(low, high)
    proof = _Proof(problem)
    if proof.refutes(high * (1 - 1e-6)):
        return max(low, high * (1 - 1e-6))
    for _ in range(STEPS):
        middle = (low + high) / 2
        if proof.refutes(middle):
            low = middle
        else:
            high = middle
    return low


class _Proof:
    """heads: earliest starts; tails: least times from a pass' end to the end of the flush. Arrays [kind, stage,
    micro-batch], in which a rank's passes are also found by flat numbers."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.shape = (3, problem.num_stages, problem.m)
        self.seconds = np.array(problem.seconds)
        self.hop = np.array(problem.hop).reshape(self.shape)
        self.passes = [
            np.array([problem.number(kind, s, mb) for kind in (F, I, W) for s in held for mb in range(problem.m)])
            for held in problem.stages
        ]
        self.before = [self._before(passes) for passes in self.passes]
        self.waits = list(self._waits())

    def _before(self, passes: Array) -> Array:
        """[x, y]: whether pass y of the rank comes before pass x in every order, for what x needs."""
        p = self.problem
        kind, rest = np.divmod(passes, p.per_kind)
        stage, mb = np.divmod(rest, p.m)
        way = np.where(kind == F, stage, 2 * p.num_stages - 1 - stage)  # where it is on a micro-batch's way
        on_way = (kind != W)[None, :] & (way[None, :] <= way[:, None])
        same_stage = (kind == W)[None, :] & (kind == W)[:, None] & (stage[None, :] == stage[:, None])
        found: Array = (on_way | same_stage) & (mb[None, :] <= mb[:, None])
        np.fill_diagonal(found, False)
        return found

    def _waits(self) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
        """(stage of a forward, micro-batches between, what it waits for: one of these (kind, stage))."""
        p, memory = self.problem, self.problem.memory
        if p.limit is None:
            return
        for rank, held in enumerate(p.stages):
            room = p.room[rank]
            for s in held:
                activation, kept = memory.activation[s], min(memory.activation[s], memory.deferred[s])
                for kind, size in ((I, activation), (W, kept)):
                    if size > 0 and (places := math.floor(room / size)) < p.m:
                        yield s, places, ((kind, s),)
                for other in held:
                    if other <= s or activation <= 0:
                        continue
                    # With as many micro-batches on s as leave no room for `other`, the first of them cannot get there;
                    # nor is there room while it is on both.
                    also = min(memory.activation[other], memory.deferred[other])
                    several = max(
                        _above((room - memory.activation[other]) / activation),
                        _above((room - also) / kept) if kept > 0 else p.m,
                    )
                    if 1 <= several <= p.m:
                        yield s, several - 1, ((W, s), (W, other))

    def refutes(self, end: float) -> bool:
        """Whether no order ends by `end`."""
        heads, tails = np.zeros(self.shape), np.zeros(self.shape)
        flat_heads, flat_tails = heads.reshape(-1), tails.reshape(-1)
        before = [each.copy() for each in self.before]
        slack = end * (1 + TINY)
        for _ in range(200):
            was = heads.sum() + tails.sum()
            self._along(heads, tails)
            for passes, first in zip(self.passes, before, strict=True):
                seconds, h, q = self.seconds[passes], flat_heads[passes], flat_tails[passes]
                # x before y would end too late: y comes first.
                first |= (h + seconds)[:, None] + (seconds + q)[None, :] > slack
                np.fill_diagonal(first, False)
                if (first & first.T).any():
                    return True
                flat_heads[passes] = np.maximum(h, _all_before(first, h, seconds))
                flat_tails[passes] = np.maximum(q, _all_before(first.T, q, seconds))
                if _too_full(flat_heads[passes], flat_tails[passes], seconds) > slack:
                    return True
            if heads.sum() + tails.sum() <= was * (1 + 1e-12):
                return False
        return False

    def _along(self, heads: Array, tails: Array) -> None:
        """Needs of each pass, and the passes that need it."""
        p, last = self.problem, self.problem.num_stages - 1
        seconds = self.seconds.reshape(self.shape)
        way = [(F, s) for s in range(last + 1)] + [(I, s) for s in reversed(range(last + 1))]
        for before, after in pairwise(way):
            heads[after] = np.maximum(heads[after], heads[before] + seconds[before] + self.hop[after])
        heads[W] = np.maximum(heads[W], heads[I] + seconds[I])
        tails[I] = np.maximum(tails[I], tails[W] + seconds[W])
        for after, before in pairwise(reversed(way)):
            tails[before] = np.maximum(tails[before], tails[after] + seconds[after] + self.hop[after])
        done = heads + seconds
        for stage, places, options in self.waits:
            soonest = np.min([done[option] for option in options], axis=0)
            heads[F, stage, places:] = np.maximum(heads[F, stage, places:], soonest[: p.m - places])
            if len(options) == 1:
                (option,) = options
                then = tails[F, stage, places:] + seconds[F, stage, places:]
                tails[option][: p.m - places] = np.maximum(tails[option][: p.m - places], then)


def _above(number: float) -> int:
    """The least whole number above `number`."""
    return math.floor(number) + 1


def _all_before(first: Array, heads: Array, seconds: Array) -> Array:
    """For each pass x: until when those that come before it (first[x]) keep the rank busy, at least. Of the ones that
    start at some time or later, all have to be done after that time."""
    late = np.argsort(-heads, kind="stable")
    there = first[:, late]
    busy = np.cumsum(there * seconds[late], axis=1) + heads[late]
    latest: Array = np.max(np.where(there, busy, 0.0), axis=1)
    return latest


def _too_full(heads: Array, tails: Array, seconds: Array) -> float:
    """The latest end of any set of the rank's passes: earliest head, work, least tail."""
    by_head, by_tail = np.argsort(-heads, kind="stable"), np.argsort(-tails, kind="stable")
    place = np.empty(len(heads), dtype=int)
    place[by_tail] = np.arange(len(heads))
    grid = np.zeros((len(heads), len(heads)))
    grid[np.arange(len(heads)), place[by_head]] = seconds[by_head]
    work = grid.cumsum(axis=0).cumsum(axis=1)
    return float(np.max(np.where(work > 0, work + heads[by_head][:, None] + tails[by_tail][None, :], 0.0)))
