"""The cost of a schedule: every action gets a duration, every rank does its list as early as it can.

`simulate(schedule, Costs(...))` gives makespan, bubble, utilisation and the span of each action; `held` turns the spans
into memory over time. The model: a rank does one action at a time, sends do not keep it, a message takes `p2p` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Pair, Schedule
from megaaccum.schedule.exchange import Layer, together
from megaaccum.schedule.validate import in_order

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
    early = not schedule.by_megatron if early_send is None else early_send
    count, m, owner = schedule.num_stages, schedule.num_microbatches, schedule.rank_of_stage
    forward, input_grad, weight_grad = costs.by_stage(count)
    fused, layers, p2p = [] if costs.fused is None else _each(costs.fused, count), costs.layers, costs.p2p
    # When the forward / the input gradient of (stage, micro-batch) is done.
    activation, gradient = [0.0] * (count * m), [0.0] * (count * m)
    # What a pass leaves, how long it takes, and to which stage its result goes.
    kinds = {"F": (activation, forward, 1), "I": (gradient, input_grad, -1), "B": (gradient, input_grad, -1)}
    spans: list[list[tuple[float, float]]] = [[] for _ in range(schedule.pp)]
    free, num_left = [0.0] * schedule.pp, sum(map(len, schedule.items))

    def pair(rank: int, item: Pair) -> tuple[float, float]:
        """Start when the inputs of both are there, end both together, with the backward's weight gradient."""
        (_, chunk, ahead), (kind, other, back) = item
        up, down = schedule.stages[rank][chunk], schedule.stages[rank][other]
        inputs = (activation, up - 1, ahead), (gradient, down + 1, back)
        arrived = [done[at * m + mb] + p2p * (owner[at] != rank) for done, at, mb in inputs if 0 <= at < count]
        start = max([free[rank], *arrived])
        end = start + (together(layers[up], layers[down]).seconds if layers is not None else fused[up])
        activation[up * m + ahead] = gradient[down * m + back] = end
        return start, end + weight_grad[down] * (layers is not None and kind == "B")

    for rank, item in in_order(schedule, schedule.items):
        num_left -= 1
        now, stages = free[rank], schedule.stages[rank]
        if len(item) == 2 and (fused or layers is not None):
            spans[rank] += [pair(rank, item)] * 2
            free[rank] = spans[rank][-1][1]
            continue
        for kind, chunk, microbatch in item if len(item) == 2 else (item,):
            start, stage = now, stages[chunk]
            if kind == "W":
                now += weight_grad[stage]
            else:
                done, seconds, step = kinds[kind]
                here, source = stage * m + microbatch, stage - step
                if 0 <= source < count:
                    there = done[here - step * m] + (p2p if owner[source] != rank else 0.0)
                    start = there if there > now else now
                now = done[here] = start + seconds[stage]
                if kind == "B":
                    now += weight_grad[stage]
                    if not early:
                        done[here] = now
            spans[rank].append((start, now))
        free[rank] = now
    if num_left:
        raise ScheduleError(f"schedule {schedule.name} cannot end; `validate` says which ranks wait for whom")
    # A rank's spans are in order and overlap only where they are equal.
    busy = tuple(sum(end - start for start, end in dict.fromkeys(each)) for each in spans)
    return Simulation(makespan=max(free), busy=busy, spans=tuple(tuple(each) for each in spans))


def _each(durations: Durations, stages: int) -> list[float]:
    if not isinstance(durations, Sequence):
        return [float(durations)] * stages
    if len(durations) != stages:
        raise ScheduleError(f"{len(durations)} durations for {stages} stages: give one number, or one per stage")
    return [float(each) for each in durations]


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
