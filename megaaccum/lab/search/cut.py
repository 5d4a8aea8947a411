"""Which layers to put on which stage: a local search whose every step is priced by the schedule that will run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from megaaccum.errors import ScheduleError
from megaaccum.lab.search.profile import Cut, Profile, even_cut, with_one_head
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.memory import TINY
from megaaccum.schedule.simulate import simulate

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAX_PRICED = 400
"""Cuts that are simulated. A local optimum at 16 stages and 128 layers takes 100 to 300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCut:
    """A cut and what it comes to. excess: by how much each rank is over the limit, most first; empty if it fits."""

    cut: Cut
    seconds: float
    peaks: tuple[float, ...]
    excess: tuple[float, ...]


def tune_cut(profile: Profile, schedule: Schedule, *, limit: float | None = None, p2p: float = 0.0) -> PricedCut:
    """The fastest cut found of `profile`'s layers into the stages of `schedule`, of at least one layer each.

    It starts from the even cut and from one with even work, and moves a layer from one stage to another (those between
    pass one on) while that is faster. limit: of the profile's memory on every rank, all of
    activations, weights and optimizer counted. Raises ScheduleError, with what each rank needs, if no cut found
    fits it. Further tokens are predicted on the last stage alone, with the head.
    """
    joined = with_one_head(profile)
    search = _Search(joined, schedule, limit, p2p)
    even = even_cut(joined, schedule.num_stages)
    best = min((search.descend(start) for start in dict.fromkeys((even, search.level(even)))), key=_rank)
    if best.excess:
        needs = ", ".join(f"rank {rank} needs {peak:.6g}" for rank, peak in enumerate(best.peaks))
        raise ScheduleError(
            f"no cut into {schedule.num_stages} stages fits the memory limit {limit:.6g}: of {MAX_PRICED - search.left}"
            f" the closest is {'-'.join(map(str, best.cut))}, where {needs}: raise the limit, or choose a schedule that"
            " holds less"
        )
    return replace(best, cut=(*best.cut[:-1], best.cut[-1] + len(profile.pattern) - len(joined.pattern)))


def price(profile: Profile, cut: Cut, schedule: Schedule, *, limit: float | None = None, p2p: float = 0.0) -> PricedCut:
    """The price of `cut` under `schedule`."""
    peaks = profile.memory(cut, chunks=schedule.chunks).peaks(schedule)
    excess = sorted((peak - limit for peak in peaks if limit is not None and peak > limit), reverse=True)
    seconds = simulate(schedule, profile.costs(cut, p2p=p2p)).makespan
    return PricedCut(cut=cut, seconds=seconds, peaks=peaks, excess=tuple(excess))


def _rank(priced: PricedCut) -> tuple[tuple[float, ...], float]:
    return priced.excess, priced.seconds


class _Search:
    def __init__(self, profile: Profile, schedule: Schedule, limit: float | None, p2p: float):
        self.profile, self.schedule, self.limit, self.p2p, self.left = profile, schedule, limit, p2p, MAX_PRICED
        self.rank_of = {stage: rank for rank, held in enumerate(schedule.stages) for stage in held}
        self.seconds = [layer.seconds for layer in profile.layers]

    def price(self, cut: Cut) -> PricedCut:
        self.left -= 1
        return price(self.profile, cut, self.schedule, limit=self.limit, p2p=self.p2p)

    def work(self, cut: Cut) -> list[float]:
        """Seconds of each rank's work on one micro-batch, most first."""
        ranks, seconds = [0.0] * self.schedule.pp, iter(self.seconds)
        for stage, count in enumerate(cut):
            ranks[self.rank_of[stage]] += sum(islice(seconds, count))
        return sorted(ranks, reverse=True)

    def level(self, cut: Cut) -> Cut:
        """`cut` with layers moved while the busiest ranks' work falls."""
        while True:
            then = min(_neighbours(cut), key=self.work, default=cut)
            if self.work(then) >= self.work(cut):
                return cut
            cut = then

    def descend(self, cut: Cut) -> PricedCut:
        """To a local optimum, and while that does not fit on from the next best, with half of what is left of the
        budget at most."""
        best, end = self.price(cut), self.left // 2
        seen, ahead = {cut}, [best]
        while ahead and ((here := min(ahead, key=_rank)) is best or best.excess):
            ahead.remove(here)
            # The most promising first; where the rank that works most has more to do than now, seldom any good.
            for then in sorted((each for each in _neighbours(here.cut) if each not in seen), key=self.work):
                if self.left <= end:
                    return best
                seen.add(then)
                ahead.append(self.price(then))
                if _rank(ahead[-1]) < _rank(here):
                    best = min(best, ahead[-1], key=_rank)
                    break
        return best


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """Every cut in which one stage has a layer less and another one more."""
    for giver, count in enumerate(cut):
        if count < 2:
            continue
        for taker in range(len(cut)):
            if taker != giver:
                then = list(cut)
                then[giver] -= 1
                then[taker] += 1
                yield tuple(then)


# --- all cuts -------------------------------------------------------------------------------------------------------


def bound_of_cuts(profile: Profile, schedule: Schedule) -> float:
    """The time that no cut of the layers into the stages of `schedule` can be faster than, in any order, however much
    it holds.

    The least, over all cuts, of the busiest rank's work and of how long its first forward has to wait (of a loop of
    several chunks: the average rank's work, and the longest layer's). Stages may be empty in it. Time is halved until
    0.1 % is left, and the lower end is returned.
    """
    import numpy as np  # here: schedules are built and timed without it

    layers, pp, placement = with_one_head(profile).layers, schedule.pp, schedule.placement
    assert placement is not None, "only V and loop can be named"
    # An all-to-all counts as hidden: fused pairs may hide it.
    seconds = np.array([layer.seconds - 4 * layer.exchange for layer in layers]) * schedule.num_microbatches
    low, high = max(seconds.sum() / pp, seconds.max()), seconds.sum()
    if placement == "loop" and schedule.chunks > 1:
        return float(low)
    work = np.concatenate([[0.0], np.cumsum(seconds)])
    enter = np.concatenate([[0.0], np.cumsum([layer.forward - 2 * layer.exchange for layer in layers])])
    fits = _v_fits if placement == "v" else _loop_fits
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if fits(work, enter, pp, middle):
            high = middle
        else:
            low = middle
    return float(low)


def _loop_fits(work: Array, enter: Array, pp: int, seconds: float) -> bool:
    """Whether pp consecutive pieces, each as long as it can be, take all layers in `seconds`. A longer piece only
    leaves less, but makes later ones start later: all ends are followed."""
    import numpy as np

    reached = np.zeros(len(work), dtype=bool)
    reached[0] = True
    for _ in range(pp):
        then = reached.copy()
        for start in np.flatnonzero(reached):
            end = np.searchsorted(work, work[start] + seconds - enter[start] + TINY * seconds, side="right")
            then[start:end] = True
        reached = then
    return bool(reached[-1])


def _v_fits(work: Array, enter: Array, pp: int, seconds: float) -> bool:
    """Whether a V fits, built from both ends: for each number of layers taken from the left, as many as possible are
    taken from the right."""
    import numpy as np

    count, layers = len(work), len(work) - 1
    right = np.full(count, count)  # layers from here on are taken; `count` is unreachable
    right[0] = layers
    for _ in range(pp):
        then = right.copy()
        for left in np.flatnonzero(right <= layers):
            ends = np.arange(left, right[left] + 1)
            rest = seconds - enter[left] - (work[ends] - work[left]) + TINY * seconds
            ends, rest = ends[rest >= 0], rest[rest >= 0]
            taken = np.searchsorted(work, work[right[left]] - rest, side="left")
            then[ends] = np.minimum(then[ends], np.maximum(taken, ends))
        right = then
        if (right <= np.arange(count)).any():
            return True
    return False
