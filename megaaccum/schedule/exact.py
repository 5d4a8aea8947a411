"""Orders by a constraint solver (OR-Tools' CP-SAT; the extra `search`): the best order, with proof.

Durations and amounts are rounded down to whole units, so that a bound that the solver proves holds for the real ones.
What it finds is timed with the real ones and proved as every order is. Budgets are in the solver's deterministic time,
on one worker, with a seed: every machine finds the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megaaccum.errors import ScheduleError
from megaaccum.schedule.orders import F, I, Order, Problem, W
from megaaccum.schedule.search import Found, proved

BUDGET = 20.0
"""Deterministic time of a proof: some 20 s of one core."""
ROUNDING = 1e-4
"""The gap that rounding may leave of a proof, as a share."""
_UNITS = 1e7
"""Parts of a makespan that durations are counted in."""
_PARTS = 1_000_000
"""Parts of a limit that memory is counted in."""
_KINDS = (F, I, W)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """found: the best order known. optimal: whether none is faster by more than ROUNDING."""

    found: Found
    optimal: bool


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ScheduleError(
            "proving an order needs OR-Tools: pip install 'megaaccum[search]', or leave --exact out"
        ) from error
    return cp_model


def prove(problem: Problem, start: Found, *, budget: float = BUDGET, seed: int = 0) -> Exact:
    """Improve `start`, an order of `problem`, until it is proved that none is faster or the budget is spent.

    Raises ScheduleError where OR-Tools is not installed.
    """
    cp = _solver()
    if start.gap <= ROUNDING:
        return Exact(found=start, optimal=True)
    order = problem.order_of(start.schedule)
    unit = start.seconds / _UNITS
    model = _Model(cp, problem, unit, start)
    model.hint(order)
    solver = _new_solver(cp, budget, seed)
    status = solver.Solve(model.model)
    bound = max(start.bound, solver.BestObjectiveBound() * unit)
    best = start
    if status in (cp.OPTIMAL, cp.FEASIBLE):
        then = model.order(solver)
        if problem.fits(then) and problem.time(then) < start.seconds:
            best = proved(problem, then, name=start.schedule.name, tried=start.tried)
    best = replace(best, bound=min(max(bound, best.bound), best.seconds))
    return Exact(found=best, optimal=best.gap <= ROUNDING)


def _new_solver(cp: Any, budget: float, seed: int) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = budget
    return solver


class _Model:
    """Starts of all passes in units. Passes of one kind and stage are alike, and so come in order."""

    def __init__(self, cp: Any, problem: Problem, unit: float, start: Found):
        self.cp, self.problem, self.unit = cp, problem, unit
        self.model = cp.CpModel()
        self.lengths = [math.floor(seconds / unit) for seconds in problem.seconds]
        self.hops = [math.floor(seconds / unit) for seconds in problem.hop]
        horizon = math.ceil(start.seconds / unit)
        new = self.model.new_int_var
        self.starts = [new(0, horizon - length, "") for length in self.lengths]
        self.end = new(math.floor(start.bound / unit * (1 - 1e-9)), horizon, "")
        self._needs()
        for rank in range(problem.pp):
            self._one_at_a_time(rank)
            if problem.limit is not None:
                self._room(rank, horizon)
        self.model.minimize(self.end)

    def _needs(self) -> None:
        p = self.problem
        for this, start in enumerate(self.starts):
            for needed, hop in ((p.source[this], self.hops[this]), (this - p.per_kind, 0)):
                if needed >= 0:
                    self._after(this, needed, hop)
            if this % p.m:
                self._after(this, this - 1)
            self.model.add(self.end >= start + self.lengths[this])

    def _after(self, this: int, needed: int, hop: int = 0) -> None:
        self.model.add(self.starts[this] >= self.starts[needed] + self.lengths[needed] + hop)

    def _one_at_a_time(self, rank: int) -> None:
        new = self.model.new_fixed_size_interval_var
        self.model.add_no_overlap(
            [
                new(self.starts[this], self.lengths[this], "")
                for this, at in enumerate(self.problem.rank_of)
                if at == rank
            ]
        )

    def _room(self, rank: int, horizon: int) -> None:
        """Bytes of a micro-batch: from its forward to its input gradient, and from there to its weight gradient."""
        p, memory = self.problem, self.problem.memory
        part = p.room[rank] / _PARTS
        spans: list[Any] = []
        amounts: list[int] = []
        for s in p.stages[rank]:
            activation, deferred = math.floor(memory.activation[s] / part), math.floor(memory.deferred[s] / part)
            places = _PARTS // min(activation, deferred) if min(activation, deferred) else p.m
            for mb in range(p.m):
                f, i, w = (p.number(kind, s, mb) for kind in _KINDS)
                if mb + places < p.m:
                    self._after(p.number(F, s, mb + places), w)
                for first, last, amount in ((f, i, activation), (i, w, deferred)):
                    begin = self.starts[first] if first == f else self.starts[first] + self.lengths[first]
                    size = self.model.new_int_var(0, horizon, "")
                    end = self.starts[last] + self.lengths[last]
                    spans.append(self.model.new_interval_var(begin, size, end, ""))
                    amounts.append(amount)
        if len(p.stages[rank]) > 1 or memory.activation != memory.deferred:
            self.model.add_cumulative(spans, amounts, _PARTS)

    def hint(self, order: Order) -> None:
        ends, _ = self.problem.ends(order)
        for this, start in enumerate(self.starts):
            self.model.add_hint(start, math.floor((ends[this] - self.problem.seconds[this]) / self.unit))

    def order(self, solver: Any) -> Order:
        found = sorted((solver.Value(start), this) for this, start in enumerate(self.starts))
        return [[this for _, this in found if self.problem.rank_of[this] == rank] for rank in range(self.problem.pp)]
