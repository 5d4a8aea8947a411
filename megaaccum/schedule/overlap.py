"""Flushes that follow each other without a barrier: where a rank may begin the next one, and what that gains.

In a schedule whose ranks end one after the other, a rank that is done can begin the next step's forwards while others
still work (`speculative_step`). Its verdict on the step is there before its first backward: in any pipeline a backward
comes after a forward of every stage, so after the end of the flush before on every rank.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import takewhile

from megaaccum.schedule.actions import Item, Schedule, changed
from megaaccum.schedule.simulate import Costs, simulate
from megaaccum.schedule.validate import in_order


@lru_cache
def warm_up(schedule: Schedule) -> tuple[int, ...]:
    """By rank, the number of its first items that are forwards and need nothing but those of other ranks: all ranks can
    come that far and stop."""
    heads = [[*takewhile(lambda item: len(item) == 3 and item.kind == "F", items)] for items in schedule.items]
    counts = Counter(rank for rank, _ in in_order(schedule, heads))
    return tuple(counts[rank] for rank in range(schedule.pp))


def seconds_without_barrier(schedule: Schedule, costs: Costs) -> float:
    """Time from one flush to the next where no rank waits for the others' end, in the unit of `costs`."""
    first, last = (simulate(_repeated(schedule, times), costs).makespan for times in (2, 4))
    return (last - first) / 2


def _repeated(schedule: Schedule, times: int) -> Schedule:
    """`times` flushes as one."""
    m = schedule.num_microbatches

    def shifted(item: Item, by: int) -> Item:
        return changed(item, lambda action: action._replace(microbatch=action.microbatch + by))

    items = tuple(tuple(shifted(item, n * m) for n in range(times) for item in rank) for rank in schedule.items)
    return Schedule(name=schedule.name, pp=schedule.pp, num_microbatches=times * m, stages=schedule.stages, items=items)
