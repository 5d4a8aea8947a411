"""Orders by a constraint solver (OR-Tools' CP-SAT; the extra `search`): the best order, with proof, and the order with
the shortest period, for flushes of many micro-batches.

Durations and amounts are rounded down to whole units, so that a bound that the solver proves holds for the real ones.
What it finds is timed with the real ones and proved as every order is. Budgets are in the solver's deterministic time,
on one worker, with a seed: every machine finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.search import Found, proved
from megaaccum.schedule.orders import F, I, Order, Problem, W, Wave

BUDGET = 20.0
"""Deterministic time of a proof: some 20 s of one core."""
ROUNDING = 1e-4
"""The gap that rounding may leave of a proof, as a share."""
_UNITS = 1e7
"""Parts of a makespan that durations are counted in."""
_PARTS = 1_000_000
"""Parts of a limit that memory is counted in, and of a period that offsets are."""
_SHARES = 100_000
"""Parts of the busiest rank's work that durations are counted in beside a period, which is not known before."""
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


# --- many micro-batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """wave: the order in which every micro-batch does what the one before it did, a period later. least: seconds; no
    such order within the limit has a period that is shorter by more than ROUNDING."""

    wave: Wave
    least: float


def shortest_period(problem: Problem, *, budget: float = BUDGET, seed: int = 0) -> Periodic:
    """The order of `problem` with the shortest period: the busiest rank's work, or what the limit makes of it. Its size
    does not depend on how many micro-batches there are. `wave.order(problem)` unrolls it with fill and drain, and never
    holds more than the repeated order.

    Raises ScheduleError where OR-Tools is not installed, and where its budget does not suffice for any order.
    """
    cp = _solver()
    model = _PeriodModel(cp, problem)
    solver = _new_solver(cp, budget, seed)
    if solver.Solve(model.model) not in (cp.OPTIMAL, cp.FEASIBLE):
        raise ScheduleError("no order that repeats was found within the solver's budget: leave --periodic out")
    wave = model.wave(solver)
    if not problem.fits(wave.order(problem)):
        raise ScheduleError("the order that repeats is over the memory limit by a rounding: lower the limit a little")
    return Periodic(wave=wave, least=model.work * _PARTS / solver.BestObjectiveBound())


class _PeriodModel:
    """Offsets of a micro-batch's passes in parts of the period, and the period's inverse, as large as possible.

    For passes a and b of a rank, turns[a, b] counts how many times more a has started than b when b starts: the period
    in which a is shortly before b. What the rank holds at any pass is a sum of such counts.
    """

    def __init__(self, cp: Any, problem: Problem):
        self.problem, self.model = problem, cp.CpModel()
        self.work = max(problem.work_of_ranks())
        self.longest = 4 * problem.pp + 8
        """Periods that a micro-batch is on its way, at most."""
        new, stages = self.model.new_int_var, range(problem.num_stages)
        self.at = {(kind, s): new(0, self.longest * _PARTS, "") for kind in _KINDS for s in stages}
        self.rate = new(1, _PARTS, "")
        """The busiest rank's work, in parts of the period."""
        self.model.add(self.at[F, 0] == 0)
        way = [(F, s) for s in stages] + [(I, s) for s in reversed(stages)]
        for before, after in [*pairwise(way), *(((I, s), (W, s)) for s in stages)]:
            hop = 0.0 if after[0] == W else problem.hop[problem.number(*after, 0)]
            self.model.add(_SHARES * (self.at[after] - self.at[before]) >= self._share(before, hop) * self.rate)
        for rank, held in enumerate(problem.stages):
            passes = [(kind, s) for s in held for kind in _KINDS]
            self.model.add(sum(map(self._share, passes)) * self.rate <= _SHARES * _PARTS)
            turns = dict(self._turns(passes))
            if problem.limit is not None:
                self._room(held, turns, problem.room[rank] / _PARTS)
        self.model.maximize(self.rate)

    def _share(self, this: tuple[int, int], hop: float = 0.0) -> int:
        kind, stage = this
        return math.ceil((self.problem.durations[kind][stage] + hop) / self.work * _SHARES)

    def _turns(self, passes: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[Any, Any], Any]]:
        """A rank does one pass at a time: between two starts of a there is place for b after a, and before the next."""
        for a, b in combinations(passes, 2):
            turn = self.model.new_int_var(-self.longest, self.longest, "")
            yield (a, b), turn
            yield (b, a), -1 - turn
            apart = self.at[b] - self.at[a] - _PARTS * turn
            self.model.add(_SHARES * apart >= self._share(a) * self.rate)
            self.model.add(_SHARES * (_PARTS - apart) >= self._share(b) * self.rate)

    def _room(self, held: Sequence[int], turns: dict[tuple[Any, Any], Any], part: float) -> None:
        """Keep the rank's limit when a forward has started; and when an input gradient has, if more is kept from it."""
        memory = self.problem.memory
        activation, deferred = ([math.floor(each / part) for each in amounts]
                                for amounts in (memory.activation, memory.deferred))  # fmt: skip
        points = [(F, s) for s in held] + [(I, s) for s in held if deferred[s] > activation[s]]
        for point in points:
            begun = {(kind, s): 0 if (kind, s) == point else turns[(kind, s), point] for kind in _KINDS for s in held}
            amounts = (
                activation[s] * (begun[F, s] - begun[I, s]) + deferred[s] * (begun[I, s] - begun[W, s]) for s in held
            )
            self.model.add(sum(amounts) <= _PARTS)

    def wave(self, solver: Any) -> Wave:
        period = self.work * _PARTS / solver.Value(self.rate)
        stages = range(self.problem.num_stages)
        offsets = tuple(tuple(solver.Value(self.at[kind, s]) / _PARTS * period for s in stages) for kind in _KINDS)
        return Wave(offsets=offsets, period=period)
