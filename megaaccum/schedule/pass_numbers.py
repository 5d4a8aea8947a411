"""Orders of passes as flat numbers, the encoding of the search: quick to time, to change and to build by the thousand.

A pass is the number (kind * stages + stage) * micro-batches + micro-batch, with kinds F, I, W = 0, 1, 2; an order is a
list of them per rank. Passes of one kind and stage are always in the order of micro-batches: these are alike, so that
in any order they can be renumbered to be.

If stages exchange tokens (`Costs.layers`), an input gradient with a forward directly after it is a fused pair; the
other way round they are two passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Action, Item, Pair, Schedule
from megaaccum.schedule.exchange import together
from megaaccum.schedule.memory import TINY, Memory
from megaaccum.schedule.simulate import Costs

F, I, W = 0, 1, 2  # noqa: E741 - the literature's names
_KINDS = "FIW"
Order = list[list[int]]
"""Per rank the numbers of its passes."""


class Problem:
    """Stages, durations and room of a search.

    memory: default, 1 for each pass. limit: of memory on every rank, None for none.
    Raises ScheduleError for durations that are no durations, and for a limit that does not hold one micro-batch.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        stages: tuple[tuple[int, ...], ...],
        num_microbatches: int,
        memory: Memory | None = None,
        limit: float | None = None,
    ):
        self.costs, self.stages, self.m, self.pp, self.limit = costs, stages, num_microbatches, len(stages), limit
        owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
        self.num_stages = len(owner)
        self.per_kind = self.num_stages * self.m
        self.memory = memory or Memory.counted(self.num_stages)
        self.durations = costs.by_stage(self.num_stages)
        _check_durations(self.durations, costs.p2p)
        if limit is not None:
            self.memory.check(stages, limit)
        self.room = [
            math.inf if limit is None else (limit - sum(self.memory.state[s] for s in held)) + TINY * limit
            for held in stages
        ]
        layers = costs.layers or ()
        self.pairs = {
            (up, down): together(layers[up], layers[down]).seconds
            for held in (stages if layers else ())
            for up, down in product(held, held)
        }
        """Seconds of a fused pair, by the stage of its forward and that of its gradient; empty without exchanges."""
        self.seconds = [each for kind in self.durations for each in kind for _ in range(self.m)]
        self.rank_of = [owner[stage] for _ in range(3) for stage in range(self.num_stages) for _ in range(self.m)]
        # The pass of another stage that each pass waits for, and the one that waits for it (-1: none); seconds between.
        self.source, self.target = [-1] * (3 * self.per_kind), [-1] * (3 * self.per_kind)
        self.hop = [0.0] * (3 * self.per_kind)
        for stage, mb in product(range(self.num_stages), range(self.m)):
            for kind, other in ((F, stage - 1), (I, stage + 1)):
                if 0 <= other < self.num_stages:
                    this, that = self.number(kind, stage, mb), self.number(kind, other, mb)
                    self.source[this], self.target[that] = that, this
                    self.hop[this] = costs.p2p if owner[other] != owner[stage] else 0.0
        # What a pass takes of its rank's room; below 0, what it gives back at its end.
        held_by = self.memory.activation, self.memory.deferred
        changes = [*held_by[0]], [d - a for a, d in zip(*held_by, strict=True)], [-d for d in held_by[1]]
        self.change = [each for kind in changes for each in kind for _ in range(self.m)]

    def is_pair(self, this: int, then: int) -> bool:
        """Whether pass `then`, directly after `this` on a rank, is fused with it."""
        return bool(self.pairs) and self.per_kind <= this < 2 * self.per_kind and then < self.per_kind

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.num_stages + stage) * self.m + microbatch

    # --- between orders and schedules ---

    def order_of(self, schedule: Schedule) -> Order:
        """The passes of `schedule`; a full backward is its two halves."""
        order: Order = []
        for rank, held in enumerate(self.stages):
            order.append([])
            for item in schedule.items[rank]:
                passes = [
                    self.number(_KINDS.index(half), held[chunk], microbatch)
                    for kind, chunk, microbatch in ((item,) if isinstance(item, Action) else item)
                    for half in ("IW" if kind == "B" else kind)
                ]
                if self.pairs and isinstance(item, Pair):
                    passes[:2] = passes[1::-1]
                order[-1] += passes
        return order

    def paired(self, order: Order) -> Order:
        """`order` with each forward fused with the input gradient that follows it."""
        order = [list(passes) for passes in order]
        for passes in order:
            at = 0
            while at < len(passes) - 1:
                this, then = passes[at : at + 2]
                if self.is_pair(then, this) and this % self.m != then % self.m:
                    passes[at : at + 2] = then, this
                    at += 1
                at += 1
        return order

    def schedule_of(self, order: Order, name: str) -> Schedule:
        """The table of `order`; an input gradient that its weight gradient follows at once is one full backward."""
        items = []
        for held, passes in zip(self.stages, order, strict=True):
            actions: list[Item] = []
            for at, this in enumerate(passes):
                kind, rest = divmod(this, self.per_kind)
                mine = Action(_KINDS[kind], held.index(rest // self.m), rest % self.m)  # type: ignore[arg-type]
                before = actions[-1] if actions else None
                if kind == F and isinstance(before, Action) and self.is_pair(passes[at - 1], this):
                    actions[-1] = Pair(mine, before)
                elif kind == W and before == mine._replace(kind="I"):
                    actions[-1] = mine._replace(kind="B")
                elif kind == W and isinstance(before, Pair) and before.backward == mine._replace(kind="I"):
                    actions[-1] = before._replace(backward=mine._replace(kind="B"))
                else:
                    actions.append(mine)
            items.append(tuple(actions))
        return Schedule(name=name, pp=self.pp, num_microbatches=self.m, stages=self.stages, items=tuple(items))

    # --- what an order comes to ---

    def fits(self, order: Order) -> bool:
        """Whether no rank holds more than its room."""
        return all(self.peak(passes) <= room for passes, room in zip(order, self.room, strict=True))

    def peak(self, passes: Sequence[int]) -> float:
        """The most that a rank with these passes holds at one time, `state` not counted."""
        held = most = 0.0
        for at, this in enumerate(passes):
            if self.pairs and at + 1 < len(passes) and self.is_pair(this, passes[at + 1]):
                most = max(most, held + self.change[passes[at + 1]])  # both at once
            held += self.change[this]
            if held > most:
                most = held
        return most

    def time(self, order: Order, seconds: Sequence[float] | None = None) -> float:
        """The makespan of `order` if passes take `seconds` (default: the problem's); math.inf if it cannot end."""
        return max(self.ends(order, seconds)[0])

    def ends(self, order: Order, seconds: Sequence[float] | None = None) -> tuple[list[float], list[int]]:
        """When each pass ends (math.inf: never), and all passes that do, each after what it waits for."""
        seconds = seconds or self.seconds
        source, hop, target, rank_of = self.source, self.hop, self.target, self.rank_of
        pairs, first, last = self.pairs, I * self.per_kind, W * self.per_kind
        ends, done = [-1.0] * len(seconds), []
        position, free = [0] * self.pp, [0.0] * self.pp
        ready, awaited = list(range(self.pp)), [-1] * self.pp
        while ready:
            rank = ready.pop()
            passes, at, now = order[rank], position[rank], free[rank]
            while at < len(passes):
                this = passes[at]
                needed = source[this]
                if needed >= 0:
                    there = ends[needed]
                    if there < 0:
                        awaited[rank] = needed
                        break
                    there += hop[this]
                    if there > now:
                        now = there
                other = -1
                if pairs and first <= this < last and at + 1 < len(passes) and passes[at + 1] < first:
                    other = passes[at + 1]
                    needed = source[other]
                    if needed >= 0:
                        if ends[needed] < 0:
                            awaited[rank] = needed
                            break
                        now = max(now, ends[needed] + hop[other])
                    jitter = (seconds[this] + seconds[other]) / (self.seconds[this] + self.seconds[other] or 1.0)
                    now += jitter * pairs[other // self.m, (this - first) // self.m]
                    ends[other] = now
                    done.append(other)
                    at += 1
                else:
                    now += seconds[this]
                ends[this] = now
                done.append(this)
                at += 1
                if other >= 0 and target[other] >= 0 and awaited[rank_of[target[other]]] == other:
                    ready.append(rank_of[target[other]])
                fed = target[this]
                if fed >= 0 and awaited[rank_of[fed]] == this:
                    ready.append(rank_of[fed])
            position[rank], free[rank] = at, now
        if len(done) < len(ends):
            ends = [math.inf if end < 0 else end for end in ends]
        return ends, done


def _check_durations(durations: Sequence[Sequence[float]], p2p: float) -> None:
    named = [(f"{kind} of stage {stage}", seconds)
             for kind, each in zip(("forward", "input gradient", "weight gradient"), durations, strict=True)
             for stage, seconds in enumerate(each)]  # fmt: skip
    problems = [
        f"{what} takes {seconds}: give a finite time that is not negative"
        for what, seconds in [*named, ("a message (p2p)", p2p)]
        if not (math.isfinite(seconds) and seconds >= 0)
    ]
    problems += [
        f"stage {stage} takes no time at all: give costs above 0, or a cut with layers in every stage"
        for stage, seconds in enumerate(zip(*durations, strict=True))
        if sum(seconds) == 0
    ]
    if problems:
        raise ScheduleError(problems)


def earliest_starts(stages: tuple[tuple[int, ...], ...], costs: Costs) -> tuple[list[float], list[float], list[float]]:
    """(seconds of a hop from stage s to s + 1, start of each stage's first forward, start of its first input gradient),
    each as early as can be."""
    owners = {stage: rank for rank, held in enumerate(stages) for stage in held}
    forward, input_grad, _ = costs.by_stage(len(owners))
    hops = [costs.p2p if owners[s] != owners[s + 1] else 0.0 for s in range(len(owners) - 1)] + [0.0]
    enter = [0.0, *accumulate(f + hop for f, hop in zip(forward, hops, strict=True))][:-1]
    steps = [i + hop for i, hop in zip(input_grad[1:], hops[:-1], strict=True)]
    down = [*accumulate(reversed(steps), initial=0.0)][::-1]  # from the head's input gradient to each stage's own
    return hops, enter, [enter[-1] + forward[-1] + each for each in down]


# --- waves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """An order in which every micro-batch does what the one before it did, `period` later. offsets[kind][stage]: when
    micro-batch 0 would do it, if no rank were ever busy. Ranks do their passes in the order of these times."""

    offsets: tuple[tuple[float, ...], ...]
    period: float

    def order(self, problem: Problem) -> Order:
        order: Order = []
        for held in problem.stages:
            timed = [
                (self.offsets[kind][stage] + self.period * mb, kind, problem.number(kind, stage, mb))
                for kind, stage, mb in product((F, I, W), held, range(problem.m))
            ]
            order.append([this for _, _, this in sorted(timed)])
        return order


def waves(
    problem: Problem,
    *,
    periods: Sequence[float] = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5),
    lags: Sequence[float] = (0.0, 0.3, 1.0, 2.0),
) -> Iterator[Wave]:
    """Straight ones: micro-batches that go down to the head and back without waiting, or some times slower; a period
    of the busiest rank's work, or more; weight gradients at once, or some periods late.

    The straighter a micro-batch's way, the less it is held in memory; the longer the period, the fewer there are.
    """
    _, enter, back = earliest_starts(problem.stages, problem.costs)
    work = max(sum(kind[s] for kind in problem.durations for s in held) for held in problem.stages)
    done = [at + seconds for at, seconds in zip(back, problem.durations[I], strict=True)]
    for stretch, period, lag in product((1.0, 1.25, 1.5, 2.0), periods, lags):
        yield Wave(
            offsets=(
                tuple(at * stretch for at in enter),
                tuple(at * stretch for at in back),
                tuple(at * stretch + lag * work for at in done),
            ),
            period=period * work,
        )


# --- closing gaps ---------------------------------------------------------------------------------------------------


def justified(problem: Problem, order: Order, rounds: int = 4) -> Order:
    """`order` with passes moved into gaps, the best of a few rounds: weight gradients as late, then forwards and input
    gradients as early, then all as early as a gap has place and the rank has room. No pass delays another."""
    best = order = _earlier(problem, order, (F, I, W))
    least = problem.time(best)
    for _ in range(rounds):
        order = _earlier(problem, _later(problem, order), (F, I))
        order = _earlier(problem, order, (F, I, W))
        if (seconds := problem.time(order)) < least:
            best, least = order, seconds
    return best


def _earlier(problem: Problem, order: Order, kinds: Sequence[int]) -> Order:
    """Passes of `kinds` moved to the first gap that they can be in, from the first to the last, until none moves."""
    p, order = problem, [list(passes) for passes in order]
    for _ in range(8):
        ends, done = p.ends(order)
        at = [{this: i for i, this in enumerate(passes)} for passes in order]
        moved = False
        for this in sorted(done, key=lambda each: ends[each] - p.seconds[each]):
            ready, rank = _ready(p, this, ends), p.rank_of[this]
            passes, here = order[rank], at[rank][this]
            to = _gap_before(p, passes, here, ready, ends) if this // p.per_kind in kinds else None
            if to is not None and p.peak(then := with_moved(passes, here, to)) <= p.room[rank]:
                order[rank], passes, here, moved = then, then, to, True
                at[rank] = {each: i for i, each in enumerate(then)}
            ends[this] = max(ready, ends[passes[here - 1]] if here else 0.0) + p.seconds[this]
        if not moved:
            return order
    return order


def _ready(p: Problem, this: int, ends: Sequence[float]) -> float:
    """When all that `this` needs is done."""
    ready = ends[p.source[this]] + p.hop[this] if p.source[this] >= 0 else 0.0
    if this >= p.per_kind:
        ready = max(ready, ends[this - p.per_kind])
    return max(ready, ends[this - 1]) if this % p.m else ready


def _gap_before(p: Problem, passes: list[int], at: int, ready: float, ends: Sequence[float]) -> int | None:
    """The first position before `at` where that pass fits between two others, not before `ready`."""
    this, found = passes[at], None
    seconds, needed = p.seconds[this], (this - p.per_kind, this - 1 if this % p.m else -1)
    for i in range(at - 1, -1, -1):
        if passes[i] in needed:  # where it takes no time, its start is not before `ready` either
            break
        then = ends[passes[i]] - p.seconds[passes[i]]
        before = ends[passes[i - 1]] if i else 0.0
        if max(before, ready) + seconds <= then + TINY * then:
            found = i
        if before < ready:
            break
    return found


def _later(problem: Problem, order: Order) -> Order:
    """Weight gradients moved to the last gap that they can be in, from the last to the first."""
    p, order = problem, [list(passes) for passes in order]
    ends, done = p.ends(order)
    makespan = max(ends)
    for this in sorted((each for each in done if each >= W * p.per_kind), key=lambda each: -ends[each]):
        rank = p.rank_of[this]
        passes, seconds = order[rank], p.seconds[this]
        last, end = len(passes) - 1, makespan
        if this % p.m != p.m - 1:  # before that of the next micro-batch
            last, end = passes.index(this + 1) - 1, ends[this + 1] - p.seconds[this + 1]
        at = passes.index(this)
        for i in range(last, at, -1):
            if end - seconds >= ends[passes[i]] * (1 - TINY):
                then = with_moved(passes, at, i)
                if p.peak(then) <= p.room[rank]:
                    order[rank], ends[this] = then, end
                break
            end = ends[passes[i]] - p.seconds[passes[i]]
    return order


def with_moved(passes: list[int], source: int, target: int) -> list[int]:
    """The list with the entry at `source` taken out and put in again as entry `target`."""
    then = passes[:source] + passes[source + 1 :]
    then.insert(target, passes[source])
    return then
