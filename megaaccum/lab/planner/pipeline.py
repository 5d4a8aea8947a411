"""The effect of a schedule on memory and time: micro-batches in flight, cost of filling and draining.

F is a forward, B a backward, I and W its two halves (input, weight); m the micro-batches of a flush, p the pipeline
ranks, v the chunks per rank. A schedule without `Formulas` is priced by its table. Sources of the formulas: GPipe and
1F1B: arXiv 2104.04473, section 2.2; interleaved: the same, and megatron.core.pipeline_parallel.schedules (warm-up
count); ZB-H1 and ZB-V: arXiv 2401.10241, table 2 and section 6; DualPipeV: simulation of its table, less than its
README's bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from megaaccum.lab.planner.layouts import SCHEDULES
from megaaccum.schedule.actions import Item, Schedule, changed
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.registry import build, by_executor, entry, is_v_shaped, names
from megaaccum.schedule.simulate import Costs, simulate


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch in one layer, stage or rank: forward, input gradient, weight gradient."""

    forward: Any
    input_grad: Any
    weight_grad: Any
    exposed: Any = 0.0
    """Seconds of these that are spent in communication that nothing hides."""

    @property
    def whole(self) -> Any:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Pass)))

    def __mul__(self, times: float) -> Pass:
        return Pass(*(getattr(self, f.name) * times for f in fields(Pass)))


@dataclass(frozen=True, slots=True)
class Formulas:
    """Closed forms of a schedule.

    in_flight: (p, v, rank, m, group) -> micro-batches that each chunk of the rank holds at its peak; group:
    microbatch_group_size_per_vp_stage. fill: (work, v) -> seconds that each rank but one adds to the flush, hops aside.
    fill_open: the same if a step does not wait for the slowest rank of the one before (`speculative_step`); None if
    that gains nothing.
    """

    in_flight: Callable[[int, int, int, Any, int], list[Any]]
    fill: Callable[[Pass, int], Any]
    fill_open: Callable[[Pass, int], Any] | None = None


_FORMULAS: dict[str, Formulas] = {}


def add_formulas(name: str, formulas: Formulas) -> None:
    """Price the schedule `name` by closed forms. It need not be one that can be built."""
    _FORMULAS[name] = formulas
    if name not in SCHEDULES:
        SCHEDULES.append(name)


def is_simulated(name: str) -> bool:
    """Whether the schedule has no closed forms, so that each layout is simulated."""
    return name not in _FORMULAS


def in_flight(
    name: str, *, pp: int, vpp: int, rank: int, microbatches: Any, group_size: int | None = None
) -> list[Any]:
    """Micro-batches whose activations rank `rank` holds at its peak, for each of its chunks; one per entry of
    `microbatches` (m). group_size: microbatch_group_size_per_vp_stage of the interleaved schedule, default pp.

    Chunks of one rank are held at the same moment: the first backward of the rank's steady phase. A table's passes are
    shared out evenly over the chunks, and more than 4 pp micro-batches hold no more.
    """
    m = np.asarray(microbatches)
    if name in _FORMULAS:
        return _FORMULAS[name].in_flight(pp, vpp, rank, m, group_size or pp)
    counts = np.minimum(m, 4 * pp)
    most = {int(count): _most_held(name, pp, int(count)) / vpp for count in np.unique(counts)}
    return [np.array([most[int(count)] for count in np.atleast_1d(counts)]).reshape(counts.shape)] * vpp


@cache
def _most_held(name: str, pp: int, microbatches: int) -> float:
    """Passes through a chunk that the fullest rank holds until their weight gradients."""
    schedule = build(name, pp=pp, num_microbatches=microbatches, short=True)
    return max(Memory.counted(schedule.num_stages).peaks(schedule))


def owed(name: str, *, pp: int, rank: int, microbatches: Any) -> Any:
    """Passes through a chunk of rank `rank` whose weight gradient is not computed yet, at most; one per entry of
    `microbatches`. Counted in the schedule's table, where more than 2 pp micro-batches owe no more (one more in
    a few of V-Min's)."""
    if not (name in names() and by_executor(name)):
        return np.zeros(len(microbatches))
    m = np.minimum(np.asarray(microbatches), 2 * pp).astype(int)
    most = {count: _owed(name, pp, int(count))[rank] for count in np.unique(m)}
    return np.array([most[count] for count in m])


@cache
def _owed(name: str, pp: int, microbatches: int) -> tuple[float, ...]:
    schedule = build(name, pp=pp, num_microbatches=microbatches, short=True)
    none = (0.0,) * schedule.num_stages
    return Memory(activation=none, deferred=(1.0,) * schedule.num_stages, state=none).peaks(schedule)


def fill_seconds(name: str, work: Pass, *, pp: int, vpp: int, m: Any, hop: Any = 0.0, barrier: bool = True) -> Any:
    """Seconds by which a flush is longer than the slowest rank's own work: filling and draining.

    work: seconds of one micro-batch on a pipeline rank on average, all its chunks together. m: micro-batches, each of
    which a simulated schedule may make wait if passes are unequal. hop: seconds from rank to rank, of one activation.
    barrier: a step waits for the slowest rank of the one before; without one (`speculative_step`) ZB-V alone gains.
    Megatron's own schedules send a gradient when the whole backward is done, the others when its first half is.
    V-shaped schedules have no published formula for unequal halves: theirs are what simulation gives.
    """
    if name not in _FORMULAS:
        rows = np.broadcast(m, hop, work.forward, work.input_grad, work.weight_grad)
        return np.array([_simulated_fill(name, pp, *row) for row in rows])
    formulas = _FORMULAS[name]
    fill = formulas.fill if barrier else formulas.fill_open or formulas.fill
    return (pp - 1) * fill(work, vpp) + 2 * (pp - 1) * hop


def _simulated_fill(name: str, pp: int, m: int, hop: float, *passes: float) -> float:
    costs = Costs.per_rank(*passes, chunks=entry(name).chunks or 2, p2p=hop)
    return simulate(build(name, pp=pp, num_microbatches=int(m)), costs).makespan - int(m) * sum(passes)


def exposed_hops(name: str, *, pp: int, vpp: int) -> float:
    """Messages per micro-batch that a rank waits for in its steady phase.

    1F1B sends an activation and receives a gradient in one exchange, twice per micro-batch, and computes nothing
    meanwhile. The schedules with chunks post their messages ahead; a fifth of their time is taken as seen.
    """
    if pp == 1:
        return 0.0
    return 2.0 if name in ("gpipe", "1f1b") else 0.2 * 2 * (2 if is_v_shaped(name) else vpp)


# --- closed forms ----------------------------------------------------------------------------------------------------


def _interleaved_in_flight(pp: int, vpp: int, rank: int, m: Any, group: int) -> list[Any]:
    """Megatron runs groups of g micro-batches (the last one may have fewer) through chunk 0, then chunk 1, and so on; a
    rank has done 2 (p - rank - 1) + (v - 1) g + 1 forwards when its first backward begins."""
    forwards = np.minimum(2 * (pp - rank - 1) + (vpp - 1) * group + 1, vpp * m)
    rounds, rest = forwards // (group * vpp), forwards % (group * vpp)
    size = np.clip(m - group * rounds, 0, group)
    return [group * rounds + np.clip(rest - chunk * size, 0, size) for chunk in range(vpp)]


HALF = 0.5
"""Share of a rank's time that each chunk of a V takes."""


def _zbv_fill(work: Pass, vpp: int) -> Any:
    """The optimizer waits for the slowest rank, so that the first pass is not hidden."""
    f, i, w = work.forward, work.input_grad, work.weight_grad
    return HALF * np.maximum(np.maximum(f, i), f + 2 * i - 3 * w)


def _zbv_fill_open(work: Pass, vpp: int) -> Any:
    f, i, w = work.forward, work.input_grad, work.weight_grad
    return HALF * np.maximum.reduce(np.broadcast_arrays(0.0, f - i, 2 * f - i - w, 2 * (i - w)))


def _dualpipev_fill(work: Pass, vpp: int) -> Any:
    f, i, w = work.forward, work.input_grad, work.weight_grad
    return HALF * np.maximum(f, f + 2 * (i - w))


add_formulas("none", Formulas(lambda p, v, rank, m, group: [np.minimum(m, 1)], lambda work, v: work.whole))
add_formulas("gpipe", Formulas(lambda p, v, rank, m, group: [m], lambda work, v: work.forward + work.input_grad))
add_formulas("1f1b", Formulas(lambda p, v, rank, m, group: [np.minimum(m, p - rank)], lambda work, v: work.whole))
add_formulas("interleaved", Formulas(_interleaved_in_flight, lambda work, v: work.whole / v))
add_formulas(
    "zb-h1",
    Formulas(
        # Rank r still holds weight-gradient inputs of r micro-batches, which are nearly as large as activations.
        lambda p, v, rank, m, group: [np.minimum(m, p)],
        lambda work, v: np.maximum(0, work.forward + work.input_grad - work.weight_grad),
    ),
)
add_formulas("zbv", Formulas(lambda p, v, rank, m, group: [np.minimum(m, p)] * 2, _zbv_fill, _zbv_fill_open))
add_formulas(
    "dualpipev", Formulas(lambda p, v, rank, m, group: [np.minimum(m, p + 1), np.minimum(m, p)], _dualpipev_fill)
)


def seconds_without_barrier(schedule: Schedule, costs: Costs) -> float:
    """Time from one flush to the next where no rank waits for the others' end (`speculative_step`), in the unit of
    `costs`."""
    first, last = (simulate(_repeated(schedule, times), costs).makespan for times in (2, 4))
    return (last - first) / 2


def _repeated(schedule: Schedule, times: int) -> Schedule:
    """`times` flushes as one."""
    m = schedule.num_microbatches

    def shifted(item: Item, by: int) -> Item:
        return changed(item, lambda action: action._replace(microbatch=action.microbatch + by))

    items = tuple(tuple(shifted(item, n * m) for n in range(times) for item in rank) for rank in schedule.items)
    return Schedule(name=schedule.name, pp=schedule.pp, num_microbatches=times * m, stages=schedule.stages, items=items)
