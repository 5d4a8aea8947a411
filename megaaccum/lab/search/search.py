"""A search for the order of passes: greedy orders and waves, annealing of waves, then of single passes.

Pure Python, with a seed and a budget of orders that are tried, so that every machine finds the same. What leaves the
search is proved by `validate`, keeps the memory limit, and takes as long in the simulator as in the search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.bound import Bound
from megaaccum.lab.search.greedy import greedy_orders
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.memory import TINY
from megaaccum.schedule.pass_numbers import I, Order, Problem, W, Wave, justified, waves, with_moved
from megaaccum.schedule.simulate import Costs, simulate
from megaaccum.schedule.validate import validate

ITERATIONS = 40_000
"""Orders that a search times: at pp 4 with two chunks and 16 micro-batches, some 6 s of one core."""
JITTER, SAMPLES = 0.1, 50
LEAST_GAIN, LEAST_WINS = 0.01, 0.9
"""An order replaces a named one if it is faster by this on average, in this share of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """An order that a search found. seconds: its makespan. bound: no order of these stages within the limit takes less.
    peaks: of memory, per rank. tried: orders that were timed."""

    schedule: Schedule
    seconds: float
    bound: float
    peaks: tuple[float, ...]
    tried: int

    @property
    def gap(self) -> float:
        """How far above the bound it is, as a share of it."""
        return self.seconds / self.bound - 1


def search_order(
    problem: Problem,
    *,
    start: Sequence[Schedule] = (),
    iterations: int = ITERATIONS,
    seed: int = 0,
    name: str = "searched",
) -> SearchResult:
    """The fastest order found for a problem.

    start: orders to start from too, if they are within the limit: the result is no slower than any of them, run by
    megaaccum's executor. Raises ScheduleError if no order is found within the limit.
    """
    search = _Search(problem, random.Random(seed), iterations)
    order = search.run([problem.order_of(each) for each in start])
    found = proved(problem, order, name=name, tried=search.tried)
    for each in start if problem.pairs else ():  # an order fuses what follows each other, which a start may not
        seconds, peaks = simulate(each, problem.costs, early_send=True).makespan, problem.memory.peaks(each)
        if seconds < found.seconds and (problem.limit is None or max(peaks) <= problem.limit * (1 + TINY)):
            found = replace(found, schedule=replace(each, name=name), seconds=seconds, peaks=peaks)
    return found


def proved(problem: Problem, order: Order, *, name: str, tried: int = 1) -> SearchResult:
    """`order` as a schedule that `validate` has proved, that holds no more than the limit, and that the simulator gives
    the same makespan. Raises ScheduleError if one of these does not hold."""
    schedule = problem.schedule_of(order, name)
    validate(schedule)
    peaks = problem.memory.peaks(schedule)
    if problem.limit is not None and max(peaks) > problem.limit * (1 + TINY):
        raise ScheduleError(f"the order found holds {max(peaks):.6g}, which is over the limit {problem.limit:.6g}")
    mine, simulated = problem.time(order), simulate(schedule, problem.costs, early_send=True).makespan
    if not math.isclose(mine, simulated, rel_tol=1e-9):
        raise ScheduleError(f"the search timed its order at {mine:.9g}, and the simulator at {simulated:.9g}")
    bound = min(Bound(problem).seconds, simulated)  # floating-point sums may exceed a bound that is reached
    return SearchResult(schedule=schedule, seconds=simulated, bound=bound, peaks=peaks, tried=tried)


class _Search:
    def __init__(self, problem: Problem, chance: random.Random, iterations: int):
        self.problem, self.chance, self.iterations = problem, chance, iterations
        self.enough = Bound(problem).seconds * (1 + 1e-7)
        self.tried = 0

    def run(self, given: Iterable[Order]) -> Order:
        problem = self.problem
        ways = [(problem.time(order), wave) for wave in waves(problem) if problem.fits(order := wave.order(problem))]
        ways.sort(key=lambda each: each[0])
        orders = [*greedy_orders(problem)]
        orders += [wave.order(problem) for _, wave in ways[:6]]
        if ways:
            orders.append(self.anneal_wave(ways[0][1], self.iterations // 4))
        orders = self._distinct(orders)
        orders = [*orders, *(justified(problem, order) for order in orders[:8]), *given]
        orders = self._distinct([*orders, *(problem.paired(order) for order in (orders if problem.pairs else ()))])
        best = orders[0]
        starts, runs = orders[:4], 4
        for run in range(runs):
            if problem.time(best) <= self.enough:
                break
            start = starts[run] if run < len(starts) else best
            best = min(best, self.anneal(start, self.iterations * 3 // 4 // runs), key=problem.time)
        return best

    def _distinct(self, orders: Iterable[Order]) -> list[Order]:
        """The orders within the limit, fastest first, and of several equally fast ones the first."""
        timed: dict[float, Order] = {}
        for order in orders:
            self.tried += 1
            if self.problem.fits(order):
                timed.setdefault(round(self.problem.time(order), 12), order)
        if not timed:
            raise ScheduleError(f"no order was found within the memory limit {self.problem.limit:.6g}: raise it")
        return [timed[seconds] for seconds in sorted(timed) if math.isfinite(seconds)]

    # --- waves ---

    def anneal_wave(self, wave: Wave, iterations: int) -> Order:
        """The best order of waves near `wave`: some of its offsets moved, or the period changed. Waves over the limit
        are passed through, at a price."""
        problem, chance = self.problem, self.chance
        best = wave.order(problem)
        now = least = problem.time(best)
        hot, unit = 0.01 * now, wave.period
        for i in range(iterations):
            then = self._other_wave(wave, unit)
            order = then.order(problem)
            seconds, over = problem.time(order), self._over(order)
            self.tried += 1
            cost = seconds * (1 + (0.05 + 2 * over if over else 0))
            if cost <= now or chance.random() < math.exp((now - cost) / (hot * (1 - i / iterations) ** 2)):
                wave, now = then, cost
                if not over and seconds < least:
                    best, least = order, seconds
        return best

    def _over(self, order: Order) -> float:
        """By how much the ranks are over their rooms, as a share of them."""
        problem = self.problem
        peaks = [problem.peak(passes) for passes in order]
        return sum(max(0.0, peak / room - 1) for peak, room in zip(peaks, problem.room, strict=True))

    def _other_wave(self, wave: Wave, unit: float) -> Wave:
        """A neighbour of `wave`, whose passes are still in the order in which they need each other."""
        chance, last = self.chance, self.problem.num_stages - 1
        forward, back, weight = (list(each) for each in wave.offsets)
        what = chance.random()
        if what < 0.1:
            return Wave(offsets=wave.offsets, period=wave.period * (1 + chance.gauss(0, 0.03)))
        if what < 0.3:  # all of a micro-batch's way from some stage on
            late, at = chance.gauss(0, 0.15) * unit, chance.randrange(1, 2 * last + 2)
            for stage in range(at, last + 1):
                forward[stage] += late
            for stage in range(min(last, 2 * last + 1 - at) + 1):
                back[stage] += late
                weight[stage] += late
        else:
            kind = (forward, back, weight)[chance.randrange(3)]
            kind[chance.randrange(last + 1)] += chance.gauss(0, 0.2) * unit
        apart = 1e-7 * unit
        for stage in range(1, last + 1):
            forward[stage] = max(forward[stage], forward[stage - 1] + apart)
        back[last] = max(back[last], forward[last] + apart)
        for stage in reversed(range(last)):
            back[stage] = max(back[stage], back[stage + 1] + apart)
        weight = [max(w, b + apart) for w, b in zip(weight, back, strict=True)]
        return Wave(offsets=(tuple(forward), tuple(back), tuple(weight)), period=wave.period)

    # --- single passes ---

    def anneal(self, order: Order, iterations: int) -> Order:
        """The best order found by moving passes along their ranks, half of the time at the edges of what is on the
        critical path. Beside the makespan a tenth of the mean end counts, which tells apart orders of one makespan."""
        problem, chance = self.problem, self.chance
        order = [list(passes) for passes in order]
        ends, _ = problem.ends(order)
        best, least = [list(passes) for passes in order], max(ends)
        now, blocks = _cost(ends), self._blocks(order, ends)
        hot = 0.003 * now
        for i in range(iterations):
            self.tried += 1
            moved = self._moved_at_edge(order, blocks) if chance.random() < 0.5 else self._moved_anywhere(order)
            if moved is None:
                continue
            rank, passes = moved
            before, order[rank] = order[rank], passes
            ends, _ = problem.ends(order)
            cost = _cost(ends)
            if cost <= now or chance.random() < math.exp((now - cost) / (hot * (1 - i / iterations) ** 2)):
                now, blocks = cost, self._blocks(order, ends)
                if max(ends) < least * (1 - 1e-12):
                    best, least = [list(each) for each in order], max(ends)
                    if least <= self.enough:
                        return best
            else:
                order[rank] = before
        return best

    def _blocks(self, order: Order, ends: Sequence[float]) -> list[tuple[int, int, int]]:
        """(rank, first, last) of each run of passes on a critical path that follow each other on a rank without a gap,
        from the end of the flush back to its start. Empty for an order that cannot end."""
        problem, blocks = self.problem, []
        rank = max(range(problem.pp), key=lambda each: ends[order[each][-1]])
        if math.isinf(ends[order[rank][-1]]):
            return []
        i = high = len(order[rank]) - 1
        while True:
            this = order[rank][i]
            start = ends[this] - problem.seconds[this]
            if i and ends[order[rank][i - 1]] >= start * (1 - 1e-12):
                i -= 1
                continue
            blocks.append((rank, i, high))
            needed = problem.source[this]
            if needed < 0 or start <= 0:
                return blocks
            rank = problem.rank_of[needed]
            i = high = order[rank].index(needed)

    def _moved_at_edge(self, order: Order, blocks: Sequence[tuple[int, int, int]]) -> tuple[int, list[int]] | None:
        """A pass of a block goes before its first, or after its last or a little later."""
        chance = self.chance
        rank, first, last = blocks[int(chance.random() * len(blocks))]
        source = first + int(chance.random() * (last - first + 2))
        if chance.random() < 0.5:
            target = first
        else:
            target = last + (int(chance.random() * 8) if chance.random() < 0.5 else 0)
        return self._moved(order, rank, source, target)

    def _moved_anywhere(self, order: Order) -> tuple[int, list[int]] | None:
        chance = self.chance
        rank = int(chance.random() * self.problem.pp)
        source = int(chance.random() * len(order[rank]))
        return self._moved(order, rank, source, source + int((chance.random() - 0.5) * 16))

    def _moved(self, order: Order, rank: int, source: int, target: int) -> tuple[int, list[int]] | None:
        """The rank and its passes with the one at `source` at `target`, or as near as what it needs and what needs it
        allow. None if it stays, or the rank would hold too much."""
        problem, passes = self.problem, order[rank]
        if source >= len(passes):
            return None
        target = max(0, min(target, len(passes) - 1))
        this, mb = passes[source], passes[source] % problem.m
        if target < source:
            bounds = (this - 1 if mb else -1, this - problem.per_kind)
            while target < source and any(each in bounds for each in passes[target:source]):
                target += 1
        else:
            bounds = (this + 1 if mb < problem.m - 1 else -1, this + problem.per_kind)
            while target > source and any(each in bounds for each in passes[source + 1 : target + 1]):
                target -= 1
        if target == source:
            return None
        then = with_moved(passes, source, target)
        return (rank, then) if problem.limit is None or problem.peak(then) <= problem.room[rank] else None


def _cost(ends: Sequence[float]) -> float:
    return max(ends) + 0.1 * sum(ends) / len(ends)


# --- whether it is worth it -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A searched order against a named one over samples of jittered durations. gain: mean of named / searched - 1.
    wins: share of the samples in which it is faster."""

    gain: float
    wins: float

    @property
    def adopted(self) -> bool:
        return self.gain >= LEAST_GAIN and self.wins >= LEAST_WINS


def compare(searched: Schedule, named: Schedule, costs: Costs, *, seed: int = 0) -> Comparison:
    """Simulate two orders of the same stages 50 times, each time with the duration of every pass drawn within +-10 % of
    its stage's, the same in both."""
    times = []
    for schedule in (searched, named):
        chance = random.Random(seed)
        mine = costs if schedule.has_pairs else replace(costs, layers=None)  # nothing is fused, whatever follows
        problem = Problem(mine, stages=schedule.stages, num_microbatches=schedule.num_microbatches)
        order = problem.order_of(schedule)
        times.append([problem.time(order, _jittered(problem, schedule, chance)) for _ in range(SAMPLES)])
    ratios = [named / searched for searched, named in zip(*times, strict=True)]
    return Comparison(gain=sum(ratios) / SAMPLES - 1, wins=sum(ratio > 1 for ratio in ratios) / SAMPLES)


def _jittered(problem: Problem, schedule: Schedule, chance: random.Random) -> list[float]:
    seconds = [each * chance.uniform(1 - JITTER, 1 + JITTER) for each in problem.seconds]
    if schedule.by_megatron:
        # Nothing leaves before the weight gradient is done, as if the input gradient took the time of both.
        for at in range(I * problem.per_kind, W * problem.per_kind):
            seconds[at] += seconds[at + problem.per_kind]
            seconds[at + problem.per_kind] = 0.0
    return seconds
