"""Flushes without a barrier between them: how far ranks may begin the next one, and what that gains."""

from dataclasses import replace

import pytest

from megaaccum.lab.planner.pipeline import seconds_without_barrier
from megaaccum.schedule import Costs, build, simulate
from megaaccum.schedule.actions import Pair
from megaaccum.schedule.validate import warm_up

EVERY = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "v-half", "v-min")


def built(name: str, pp: int, m: int):
    return build(name, pp=pp, num_microbatches=m, chunks=2 if name == "interleaved" else None)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_all_ranks_can_come_as_far_as_their_warm_up_and_stop(name, pp):
    schedule = built(name, pp, 3 * pp)
    heads = [items[:count] for items, count in zip(schedule.items, warm_up(schedule), strict=True)]
    assert all(heads), "every rank begins something"
    done = {(schedule.stage(rank, each), each.microbatch) for rank, head in enumerate(heads) for each in head}
    for rank, (head, items) in enumerate(zip(heads, schedule.items, strict=True)):
        assert all(each.kind == "F" for each in head)
        for each in head:
            stage = schedule.stage(rank, each)
            assert stage == 0 or (stage - 1, each.microbatch) in done
        following = items[len(head)]
        if not isinstance(following, Pair) and following.kind == "F":  # else it is a backward
            assert (schedule.stage(rank, following) - 1, following.microbatch) not in done


def test_a_forward_whose_input_comes_after_a_backward_is_not_of_the_warm_up():
    one, all_at_once = (build(name, pp=2, num_microbatches=4) for name in ("1f1b", "gpipe"))
    assert (warm_up(one), warm_up(all_at_once)) == ((2, 1), (4, 4))
    mixed = replace(one, items=(one.items[0], all_at_once.items[1]))
    assert warm_up(mixed) == (2, 2), "rank 1 would wait for the third, which rank 0 makes after its first backward"


@pytest.mark.parametrize(("name", "with_barrier", "without"), [("zbv", 1.0625, 1.0), ("dualpipev", 1.0625, 1.0625)])
def test_only_ranks_that_end_one_after_the_other_gain(name, with_barrier, without):
    schedule, costs = build(name, pp=4, num_microbatches=8), Costs.per_rank(1, 1, 1, chunks=2)
    assert simulate(schedule, costs).makespan / 24 == pytest.approx(with_barrier)
    assert seconds_without_barrier(schedule, costs) / 24 == pytest.approx(without)
