"""The cost of a schedule: every action gets a duration, every rank does its list as early as it can.

`simulate(schedule, Costs(...))` gives makespan, bubble, utilisation and the span of each action; `held` turns the spans
into memory over time. The model: a rank does one action at a time, sends do not keep it, a message takes `p2p` seconds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Pair, Schedule
from megaaccum.schedule.exchange import Layer, together

Durations = float | Sequence[float]
"""Seconds of one pass of one micro-batch through a stage: one number for all stages, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations in seconds (or any one unit) of one micro-batch's passes through one *stage*.

    A stage is a chunk: at equal devices, two chunks per rank have half the durations of one (`per_rank`).
    """

    forward: Durations
    input_grad: Durations
    weight_grad: Durations
    p2p: float = 0.0
    """From the end of an action until its result can be used on another rank."""
    fused: Durations | None = None
    """A fused forward and backward, both of whose results are there at its end; by the forward's stage. None: forward,
    then backward, each result as soon as it is there."""
    layers: tuple[tuple[Layer, ...], ...] | None = None
    """The layers of each stage, if some exchange tokens between ranks (`schedule.exchange`), which `forward` and
    `input_grad` then include. A fused pair takes as long as its two lanes; both results are there before the weight
    gradient."""

    @classmethod
    def per_rank(cls, forward: float, input_grad: float, weight_grad: float, *, chunks: int, p2p: float = 0.0) -> Costs:
        """Durations of a rank's whole work on one micro-batch, spread evenly over its `chunks`."""
        return cls(forward=forward / chunks, input_grad=input_grad / chunks, weight_grad=weight_grad / chunks, p2p=p2p)

    def computed(self) -> Costs:
        """These costs without exchanges, as if all were hidden."""
        if self.layers is None:
            return self
        hidden = [2 * sum(layer.exchange for layer in layers) for layers in self.layers]
        forward, input_grad, _ = self.by_stage(len(hidden))
        forward, input_grad = ([a - b for a, b in zip(each, hidden, strict=True)] for each in (forward, input_grad))
        return replace(self, forward=forward, input_grad=input_grad, layers=None)

    def by_stage(self, num_stages: int) -> tuple[list[float], list[float], list[float]]:
        """F, I and W of each stage. Raises ScheduleError if they are given for another number of stages."""
        return tuple(_each(each, num_stages) for each in (self.forward, self.input_grad, self.weight_grad))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Start and end of every action. Times are in the unit of the costs, from the start of the flush."""

    makespan: float
    """When the last rank is done."""
    busy: tuple[float, ...]
    """Time in which each rank computes."""
    spans: tuple[tuple[tuple[float, float], ...], ...]
    """(start, end) of each action, in the order of `schedule.actions(rank)`. The two of a fused pair whose cost was
    given have the same span."""

    @property
    def bubble(self) -> float:
        """Time in which the busiest rank waits."""
        return self.makespan - max(self.busy)

    @property
    def utilisation(self) -> float:
        """Share of all ranks' time that is computation, 0 to 1."""
        return sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(schedule: Schedule, costs: Costs, *, early_send: bool | None = None) -> Simulation:
    """Run `schedule` on paper.

    early_send: whether a full backward's input gradient leaves before its weight gradient is computed. Default: as it
    would be run (`Schedule.by_megatron`). The schedule should be valid; raises ScheduleError if it cannot end.
    """
    if early_send is None:
        early_send = not schedule.by_megatron
    return _Run(schedule, costs, early_send).run()


def _each(durations: Durations, stages: int) -> list[float]:
    if not isinstance(durations, Sequence):
        return [float(durations)] * stages
    if len(durations) != stages:
        raise ScheduleError(f"{len(durations)} durations for {stages} stages: give one number, or one per stage")
    return [float(each) for each in durations]


class _Run:
    """One simulation. Written for speed: a planner calls it for every candidate, with up to 400,000 actions."""

    def __init__(self, schedule: Schedule, costs: Costs, early_send: bool):
        stages = schedule.num_stages
        self.schedule, self.p2p, self.early_send = schedule, costs.p2p, early_send
        self.forward, self.input_grad, self.weight_grad = costs.by_stage(stages)
        self.fused = None if costs.fused is None else _each(costs.fused, stages)
        self.layers = costs.layers
        slots = stages * schedule.num_microbatches
        # When the forward / the input gradient of (stage, micro-batch) is done; -1 is not yet.
        self.activation, self.gradient = [-1.0] * slots, [-1.0] * slots
        # What a pass leaves, how long it takes, and to which stage its result goes.
        self._passes = {
            "F": (self.activation, self.forward, 1),
            "I": (self.gradient, self.input_grad, -1),
            "B": (self.gradient, self.input_grad, -1),
        }
        self.spans: list[list[tuple[float, float]]] = [[] for _ in range(schedule.pp)]
        self.owner = schedule.rank_of_stage
        self.waiting = [False] * schedule.pp
        self.ready = list(range(schedule.pp))

    def run(self) -> Simulation:
        walks = [self._walk(rank) for rank in range(self.schedule.pp)]
        while self.ready:
            rank = self.ready.pop()
            self.waiting[rank] = next(walks[rank], False)
        if any(self.waiting):
            raise ScheduleError(f"schedule {self.schedule.name} cannot end; `validate` says which ranks wait for whom")
        makespan = max(end for spans in self.spans for _, end in spans[-1:])
        return Simulation(
            makespan=makespan,
            busy=tuple(_covered(spans) for spans in self.spans),
            spans=tuple(tuple(spans) for spans in self.spans),
        )

    def _walk(self, rank: int) -> Iterator[bool]:
        """Do the rank's actions one after the other; yields True whenever it has to wait for another rank."""
        stages, m, last = self.schedule.stages[rank], self.schedule.num_microbatches, self.schedule.num_stages - 1
        spans, early, now = self.spans[rank], self.early_send, 0.0
        for item in self.schedule.items[rank]:
            if len(item) == 2 and (self.fused is not None or self.layers is not None):
                now = yield from self._fused_pair(rank, item, now)
                continue
            for kind, chunk, microbatch in item if len(item) == 2 else (item,):
                start, stage = now, stages[chunk]
                if kind == "W":
                    now += self.weight_grad[stage]
                    spans.append((start, now))
                    continue
                done, seconds, step = self._passes[kind]
                here, source = stage * m + microbatch, stage - step
                if 0 <= source <= last:
                    while done[here - step * m] < 0:
                        yield True
                    start = self._arrival(done[here - step * m], now, source, rank)
                now = sent = start + seconds[stage]
                if kind == "B":
                    now += self.weight_grad[stage]
                done[here] = sent if early else now
                if 0 <= stage + step <= last:
                    self._wake(stage + step)
                spans.append((start, now))

    def _fused_pair(self, rank: int, pair: Pair, now: float) -> Generator[bool, None, float]:
        """Start when the inputs of both are there, end both together, with the backward's weight gradient; returns
        when."""
        schedule = self.schedule
        m, stages = schedule.num_microbatches, schedule.stages[rank]
        up, down = stages[pair.forward.chunk], stages[pair.backward.chunk]
        start = now
        for table, source, at in (
            (self.activation, up - 1, (up - 1) * m + pair.forward.microbatch),
            (self.gradient, down + 1, (down + 1) * m + pair.backward.microbatch),
        ):
            if 0 <= source < schedule.num_stages:
                while table[at] < 0:
                    yield True
                start = self._arrival(table[at], start, source, rank)
        if self.layers is not None:
            end = start + together(self.layers[up], self.layers[down]).seconds
        else:
            assert self.fused is not None
            end = start + self.fused[up]
        self.activation[up * m + pair.forward.microbatch] = self.gradient[down * m + pair.backward.microbatch] = end
        for fed in (up + 1, down - 1):
            if 0 <= fed < schedule.num_stages:
                self._wake(fed)
        if self.layers is not None and pair.backward.kind == "B":
            end += self.weight_grad[down]
        self.spans[rank] += [(start, end), (start, end)]
        return end

    def _arrival(self, done: float, now: float, source: int, rank: int) -> float:
        """The time at which `rank`, free from `now` on, can use the output of stage `source`."""
        if self.p2p and self.owner[source] != rank:
            done += self.p2p
        return done if done > now else now

    def _wake(self, stage: int) -> None:
        rank = self.owner[stage]
        if self.waiting[rank]:
            self.waiting[rank] = False
            self.ready.append(rank)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans that are in order and overlap only where they are equal."""
    return sum(end - start for start, end in dict.fromkeys(spans))


# --- memory ---------------------------------------------------------------------------------------------------------


def held(
    schedule: Schedule, simulation: Simulation, rank: int, *, activation: float = 1.0, deferred: float = 0.0
) -> list[tuple[float, float]]:
    """The rank's holdings over time: [(time, amount from then on)], the first at time 0.

    activation: amount (bytes, or 1) from a pass' forward until its input gradient is done; deferred: from then until
    its weight gradient is done, where the two are apart. `validate` gives the peaks of both counts.
    """
    changes: list[tuple[float, int, float]] = []
    for action, (start, end) in zip(schedule.actions(rank), simulation.spans[rank], strict=True):
        if action.kind == "F":
            changes.append((start, 1, activation))
        elif action.kind == "W":
            changes.append((end, 0, -deferred))
        else:
            changes.append((end, 0, (deferred if action.kind == "I" else 0.0) - activation))
    total, curve = 0.0, [(0.0, 0.0)]
    # What is let go at a time is let go before what begins then is taken.
    for time, _, change in sorted(changes, key=lambda each: each[:2]):
        total += change
        curve.append((time, total))
    return curve
