"""Greedy orders: every rank runs the most urgent of the passes that are ready."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megaaccum.schedule.pass_numbers import F, I, Order, Problem, W


def greedy_orders(problem: Problem) -> Iterator[Order]:
    """The greedy orders that a search tries."""
    for kinds, patience in product([(I, F, W), (F, I, W), (I, W, F)], (0.0, 0.5, 1.0)):
        for last_chunk_first in (True, False) if len(problem.stages[0]) > 1 else (True,):
            yield _Greedy(problem, kinds, patience, last_chunk_first=last_chunk_first).run()


class _Greedy:
    """One greedy order: every rank does what it finds most urgent, earliest first. Ranks choose in the order of time,
    so that they know of others what has begun by then.

    kinds: F, I and W from the most to the least urgent. patience: how long a rank waits for a pass that is more urgent
    than one that it could do now, as a share of the latter's time. last_chunk_first: whether the last chunk's passes go
    before the first's.
    """

    def __init__(self, problem: Problem, kinds: tuple[int, int, int], patience: float, *, last_chunk_first: bool):
        self.problem, self.patience = problem, patience
        self.next = [[0] * problem.num_stages for _ in range(3)]
        self.free, self.held = [0.0] * problem.pp, [0.0] * problem.pp
        self.ends = [-1.0] * len(problem.seconds)
        self.order: Order = [[] for _ in range(problem.pp)]
        # A forward leaves room for the rest of its rank's part of its micro-batch, or that could not get through.
        memory = problem.memory
        self.reserve = {
            s: memory.least(held) - sum(memory.activation[t] for t in held if t <= s)
            for held in problem.stages
            for s in held
        }
        self.urgency = {
            (kind, s): kinds.index(kind) * len(held) + (len(held) - 1 - at if last_chunk_first else at)
            for held in problem.stages
            for at, s in enumerate(held)
            for kind in (F, I, W)
        }

    def run(self) -> Order:
        p = self.problem
        options = [self._choose(rank) for rank in range(p.pp)]
        for _ in range(len(p.seconds)):
            start, this = min((option for option in options if option), key=lambda option: option[0])
            rank = p.rank_of[this]
            self._do(rank, this, start)
            options[rank] = self._choose(rank)
            fed = p.target[this]
            if fed >= 0 and p.rank_of[fed] != rank:
                options[p.rank_of[fed]] = self._choose(p.rank_of[fed])
        return self.order

    def _do(self, rank: int, this: int, start: float) -> None:
        p = self.problem
        self.order[rank].append(this)
        self.free[rank] = self.ends[this] = start + p.seconds[this]
        self.held[rank] += p.change[this]
        kind, rest = divmod(this, p.per_kind)
        self.next[kind][rest // p.m] += 1

    def _choose(self, rank: int) -> tuple[float, int] | None:
        """(start, pass) of what the rank does next, as far as it knows; None while it has to wait."""
        found = list(self._possible(rank))
        if not found:
            return None
        first = min(found)
        latest = first[0] + self.patience * self.problem.seconds[first[2]]
        start, _, this = min((option for option in found if option[0] <= latest), key=lambda option: option[1])
        return start, this

    def _possible(self, rank: int) -> Iterator[tuple[float, int, int]]:
        """(start, urgency, pass) of all that the rank could do next."""
        p = self.problem
        for stage, kind in product(p.stages[rank], (F, I, W)):
            mb = self.next[kind][stage]
            if mb == p.m or (kind and mb == self.next[kind - 1][stage]):
                continue
            this, start = p.number(kind, stage, mb), self.free[rank]
            if self.held[rank] + p.change[this] + self.reserve[stage] * (kind == F) > p.room[rank]:
                continue
            needed = p.source[this]
            if needed >= 0:
                if self.ends[needed] < 0:
                    continue
                start = max(start, self.ends[needed] + p.hop[this])
            yield start, self.urgency[kind, stage], this
