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
from collections.abc import Iterator, Sequence

from megaaccum.schedule.pass_numbers import Problem, earliest_starts


class Bound:
    """Lower bounds of the makespan of any order of a problem, in seconds (or the unit of its costs). An all-to-all
    counts as hidden."""

    def __init__(self, problem: Problem):
        assert problem.costs.fused is None, "a fused pair is faster than its passes, by which the bound counts"
        costs = problem.costs.computed()
        self.problem = problem
        self.durations = costs.by_stage(problem.num_stages)
        """F, I, W of each stage."""
        hops, self.enter, self.back = earliest_starts(problem.stages, costs)
        _, input_grad, weight_grad = self.durations
        self.leave = [weight_grad[0]]
        """From the end of a stage's input gradient to the end of the flush, at least: it travels on to the first stage,
        and every stage on the way has its weight gradient to do."""
        for stage in range(1, problem.num_stages):
            travels = hops[stage - 1] + input_grad[stage - 1] + self.leave[-1]
            self.leave.append(max(weight_grad[stage], travels))

    @property
    def seconds(self) -> float:
        """The largest of all."""
        return max(max(self.by_work(rank), self.by_area(rank)) for rank in range(self.problem.pp))

    def by_work(self, rank: int) -> float:
        """The rank's work, and its idle time while the pipeline fills and drains."""
        forward, input_grad, weight_grad = self.durations
        held = self.problem.stages[rank]
        work = self.problem.m * sum(forward[s] + input_grad[s] + weight_grad[s] for s in held)
        fill, drain = self._fill(rank), self._drain(rank)
        # Both may count the same time only where a flush is shorter than the two windows together.
        return work + fill[1] + drain[1] if fill[0] + drain[0] <= work else work + max(fill[1], drain[1])

    def _fill(self, rank: int) -> tuple[float, float]:
        """(end of a window that starts at 0, the least idle time in it), for the window with the most."""
        m, held = self.problem.m, self.problem.stages[rank]
        forward, input_grad, weight_grad = self.durations
        passes = [(self.enter[s], "F", s, forward[s]) for s in held]
        passes += [(self.back[s], "I", s, input_grad[s]) for s in held]
        passes += [(self.back[s] + input_grad[s], "W", s, weight_grad[s]) for s in held]
        first_back = min(self.back[s] for s in held)
        windows = []
        for end in sorted({at for at, *_ in passes}):
            possible = [(kind, s, seconds) for at, kind, s, seconds in passes if at < end]
            # Until the first input gradient is done nothing is let go.
            room = self.problem.room[rank] if end <= first_back else math.inf
            sizes = [(seconds, self.problem.memory.activation[s]) for kind, s, seconds in possible if kind == "F"]
            forwards = _knapsack(sizes, room, m)
            others = m * sum(seconds for kind, _, seconds in possible if kind != "F")
            # Nor can a pass start before its own time.
            windows.append((end, max(0.0, end - forwards - others)))
        return max(windows, key=lambda window: window[1])

    def _drain(self, rank: int) -> tuple[float, float]:
        """(length of a window that ends with the flush, the least idle time in it), for the window with the most.

        No forward is in any of these windows: what follows one is longer than what follows an input gradient.
        """
        m, held = self.problem.m, self.problem.stages[rank]
        _, input_grad, weight_grad = self.durations
        windows = []
        for length in sorted({self.leave[s] for s in held}):
            inside = [s for s in held if self.leave[s] < length]
            grads = m * sum(input_grad[s] + weight_grad[s] for s in inside)
            waiting = [s for s in held if s not in inside]
            # Their input gradients are all done when the window begins: the rank holds what is deferred at once.
            sizes = [(weight_grad[s], self.problem.memory.deferred[s]) for s in waiting]
            weights = _knapsack(sizes, self.problem.room[rank], m)
            windows.append((length, max(0.0, length - grads - weights)))
        return max(windows, key=lambda window: window[1])

    def by_area(self, rank: int) -> float:
        """How long the rank's memory needs; 0 without a limit."""
        held, room, memory = self.problem.stages[rank], self.problem.room[rank], self.problem.memory
        if math.isinf(room):
            return 0.0
        if room <= 0:
            return math.inf
        weight_grad, start = self.durations[2], min(self.enter[s] for s in held)
        passing = sum(memory.activation[s] * self._way(s) for s in held)
        waiting = sum(memory.deferred[s] * weight_grad[s] for s in held)
        # Activations are gone when the last input gradient is done; what is deferred may stay to the end.
        bounds = [
            start + self.problem.m * passing / room + min(self.leave[s] for s in held),
            start + self.problem.m * (passing + waiting) / room,
        ]
        if len(held) == 1:
            bounds += self._by_places(rank)
        return max(bounds)

    def _way(self, stage: int) -> float:
        """From the start of a micro-batch's forward to the end of its input gradient, at least."""
        return self.back[stage] + self.durations[1][stage] - self.enter[stage]

    def _by_places(self, rank: int) -> Iterator[float]:
        """With one chunk, places for whole micro-batches can be counted, which they take one by one and give back one
        by one: when the input gradient is done, or (a little less each) when the weight gradient is."""
        (s,), memory = self.problem.stages[rank], self.problem.memory
        forward, input_grad, weight_grad = (each[s] for each in self.durations)
        activation = memory.activation[s]
        kept = min(activation, memory.deferred[s])
        # The last input gradient has the way to the first stage to go; weight gradients may all be done after it.
        for size, stay, apart, after in (
            (activation, self._way(s), input_grad, self.leave[s]),
            (kept, self._way(s) + weight_grad, weight_grad, 0.0),
        ):
            if size <= 0:
                continue
            m, places = self.problem.m, math.floor(self.problem.room[rank] / size)
            if places < 1:
                yield math.inf
                return
            places = min(places, m)
            window = math.ceil(m / places) * stay
            ramps = (places - 1) * (forward + apart)
            if ramps <= m * stay / places:
                window = max(window, m * stay / places + ramps / 2)
            yield self.enter[s] + window + after


def _knapsack(items: Sequence[tuple[float, float]], room: float, most: int) -> float:
    """The most value of up to `most` of each item (value, size) in `room`; items can be cut, so it is no less."""
    total = 0.0
    for value, size in sorted(items, key=lambda item: item[1] / item[0] if item[0] > 0 else math.inf):
        count = most if size <= 0 else min(most, max(0.0, room) / size)
        total += count * value
        room -= count * size
    return total
