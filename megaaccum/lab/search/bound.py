"""Times that no order can be faster than: lower bounds of the makespan, for one cut and for all cuts.

All of them count one rank's time. Let rank r hold the stages s in S, a flush have m micro-batches, and F, I, W be the
durations of a stage's passes. `enter(s)`, the sum of F of the stages before s (and hops), is the earliest that s can
start; `back(s)` the earliest that its input gradient can; `leave(s)` the least that has to follow a pass of s.

    work    The rank has m (F + I + W) of each of its stages to do.
    fill    Up to a time t only passes whose inputs can be there can run. If they are less than t, the rest is idle.
            Before back(s) for all of its stages a rank with limited memory does only as many forwards as it can hold.
    drain   In the last t seconds only passes can run after which less than t has to follow; weight gradients of those
            only as many as the rank can hold.
    area    A micro-batch on stage s occupies its memory for at least the way from s to the head and back. The rank has
            memory * window of room, of which the first and the last micro-batches, which come one by one, leave a part
            empty. It needs m times the least area.

The bound is the largest over ranks of work + fill + drain and of area. docs/guides/search.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.memory import TINY, Memory
from megaaccum.schedule.pass_numbers import Problem, earliest_starts
from megaaccum.schedule.simulate import Costs


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bounds of the makespan in seconds (or the unit of the costs). limit: of Memory's amounts on each rank."""

    stages: tuple[tuple[int, ...], ...]
    num_microbatches: int
    costs: Costs
    memory: Memory | None = None
    limit: float | None = None

    @property
    def seconds(self) -> float:
        """The largest of all."""
        return max(max(self.by_work(rank), self.by_area(rank)) for rank in range(len(self.stages)))

    # --- ways through the pipeline ---

    @cached_property
    def durations(self) -> tuple[list[float], list[float], list[float]]:
        """F, I, W of each stage."""
        return self.costs.by_stage(sum(map(len, self.stages)))

    @cached_property
    def _starts(self) -> tuple[list[float], list[float], list[float]]:
        """Seconds from stage s to s + 1, and as `enter` and `back`."""
        return earliest_starts(self.stages, self.costs)

    @property
    def enter(self) -> list[float]:
        """When a stage's first forward can start."""
        return self._starts[1]

    @property
    def back(self) -> list[float]:
        """When a stage's first input gradient can start."""
        return self._starts[2]

    @cached_property
    def leave(self) -> list[float]:
        """From the end of a stage's input gradient to the end of the flush, at least: it travels on to the first stage,
        and every stage on the way has its weight gradient to do."""
        _, input_grad, weight_grad = self.durations
        after, hop = [weight_grad[0]], self._starts[0]
        for stage in range(1, len(input_grad)):
            after.append(max(weight_grad[stage], hop[stage - 1] + input_grad[stage - 1] + after[-1]))
        return after

    # --- the bounds ---

    def by_work(self, rank: int) -> float:
        """The rank's work, and its idle time while the pipeline fills and drains."""
        forward, input_grad, weight_grad = self.durations
        held = self.stages[rank]
        work = self.num_microbatches * sum(forward[s] + input_grad[s] + weight_grad[s] for s in held)
        fill, drain = self._fill(rank), self._drain(rank)
        # Both may count the same time only where a flush is shorter than the two windows together.
        return work + fill[1] + drain[1] if fill[0] + drain[0] <= work else work + max(fill[1], drain[1])

    def _fill(self, rank: int) -> tuple[float, float]:
        """(end of a window that starts at 0, the least idle time in it), for the window with the most."""
        m, held = self.num_microbatches, self.stages[rank]
        forward, input_grad, weight_grad = self.durations
        passes = [(self.enter[s], "F", s, forward[s]) for s in held]
        passes += [(self.back[s], "I", s, input_grad[s]) for s in held]
        passes += [(self.back[s] + input_grad[s], "W", s, weight_grad[s]) for s in held]
        first_back = min(self.back[s] for s in held)
        windows = []
        for end in sorted({at for at, *_ in passes}):
            possible = [(kind, s, seconds) for at, kind, s, seconds in passes if at < end]
            # Until the first input gradient is done nothing is let go.
            limited = end <= first_back
            forwards = self._holdable([s for kind, s, _ in possible if kind == "F"], rank, limited=limited)
            others = m * sum(seconds for kind, _, seconds in possible if kind != "F")
            # Nor can a pass start before its own time.
            windows.append((end, max(0.0, end - forwards - others)))
        return max(windows, key=lambda window: window[1])

    def _holdable(self, stages: Sequence[int], rank: int, *, limited: bool) -> float:
        """The most seconds of forwards of `stages` of a rank that holds them all at once."""
        forward, m = self.durations[0], self.num_microbatches
        if not limited or self.memory is None or self.limit is None:
            return m * sum(forward[s] for s in stages)
        return _knapsack([(forward[s], self.memory.activation[s]) for s in stages], self._room(rank), m)

    def _room(self, rank: int) -> float:
        """Bytes that the rank's limit leaves for activations."""
        assert self.memory is not None and self.limit is not None
        return self.limit - sum(self.memory.state[s] for s in self.stages[rank]) + TINY * self.limit

    def _drain(self, rank: int) -> tuple[float, float]:
        """(length of a window that ends with the flush, the least idle time in it), for the window with the most.

        No forward is in any of these windows: what follows one is longer than what follows an input gradient.
        """
        m, held = self.num_microbatches, self.stages[rank]
        _, input_grad, weight_grad = self.durations
        windows = []
        for length in sorted({self.leave[s] for s in held}):
            inside = [s for s in held if self.leave[s] < length]
            grads = m * sum(input_grad[s] + weight_grad[s] for s in inside)
            waiting = [s for s in held if s not in inside]
            if self.memory is None or self.limit is None:
                weights = m * sum(weight_grad[s] for s in waiting)
            else:
                # Their input gradients are all done when the window begins: the rank holds what is deferred at once.
                sizes = [(weight_grad[s], self.memory.deferred[s]) for s in waiting]
                weights = _knapsack(sizes, self._room(rank), m)
            windows.append((length, max(0.0, length - grads - weights)))
        return max(windows, key=lambda window: window[1])

    def by_area(self, rank: int) -> float:
        """How long the rank's memory needs; 0 without a limit."""
        if self.memory is None or self.limit is None:
            return 0.0
        held, room = self.stages[rank], self._room(rank)
        if room <= 0:
            return math.inf
        weight_grad, start = self.durations[2], min(self.enter[s] for s in held)
        passing = sum(self.memory.activation[s] * self._way(s) for s in held)
        waiting = sum(self.memory.deferred[s] * weight_grad[s] for s in held)
        # Activations are gone when the last input gradient is done; what is deferred may stay to the end.
        bounds = [
            start + self.num_microbatches * passing / room + min(self.leave[s] for s in held),
            start + self.num_microbatches * (passing + waiting) / room,
        ]
        if len(held) == 1:
            bounds += self._by_places(rank)
        return max(bounds)

    def _way(self, stage: int) -> float:
        """From the start of a micro-batch's forward to the end of its input gradient, at least."""
        return self.back[stage] + self.durations[1][stage] - self.enter[stage]

    def _by_places(self, rank: int) -> list[float]:
        """With one chunk, places for whole micro-batches can be counted, which they take one by one and give back one
        by one: when the input gradient is done, or (a little less each) when the weight gradient is."""
        assert self.memory is not None
        (s,) = self.stages[rank]
        forward, input_grad, weight_grad = (each[s] for each in self.durations)
        activation = self.memory.activation[s]
        kept = min(activation, self.memory.deferred[s])
        bounds = []
        # The last input gradient has the way to the first stage to go; weight gradients may all be done after it.
        for size, stay, apart, after in (
            (activation, self._way(s), input_grad, self.leave[s]),
            (kept, self._way(s) + weight_grad, weight_grad, 0.0),
        ):
            if size <= 0:
                continue
            m, places = self.num_microbatches, math.floor(self._room(rank) / size)
            if places < 1:
                return [math.inf]
            places = min(places, m)
            window = math.ceil(m / places) * stay
            ramps = (places - 1) * (forward + apart)
            if ramps <= m * stay / places:
                window = max(window, m * stay / places + ramps / 2)
            bounds.append(self.enter[s] + window + after)
        return bounds


def bound(schedule: Schedule, costs: Costs, *, memory: Memory | None = None, limit: float | None = None) -> Bound:
    """The bound of all orders of a schedule's stages and micro-batches, with up to `limit` of `memory` on each rank.
    Costs of fused pairs are not known to it; an all-to-all counts as hidden."""
    assert costs.fused is None, "a fused pair is faster than its passes, by which the bound counts"
    return Bound(
        stages=schedule.stages, num_microbatches=schedule.num_microbatches, costs=costs.computed(), memory=memory,
        limit=limit,
    )  # fmt: skip


def bound_of(problem: Problem) -> Bound:
    """The bound of all orders of a search's problem."""
    return Bound(
        stages=problem.stages, num_microbatches=problem.m, costs=problem.costs.computed(), memory=problem.memory,
        limit=problem.limit,
    )  # fmt: skip


def _knapsack(items: Sequence[tuple[float, float]], room: float, most: int) -> float:
    """The most value of up to `most` of each item (value, size) in `room`; items can be cut, so it is no less."""
    total = 0.0
    for value, size in sorted(items, key=lambda item: item[1] / item[0] if item[0] > 0 else math.inf):
        count = most if size <= 0 else min(most, max(0.0, room) / size)
        total += count * value
        room -= count * size
    return total
