"""Sums that wait on a rank, from the order of its backwards."""

from __future__ import annotations

import numpy as np
import pytest

from megaaccum.lab.planner.partial_sums import Passes, Waiting, sums_of_runs


def passes(schedule: str, *, vpp: int = 2, rank: int = 0, flushes: int = 1) -> Passes:
    return Passes(schedule=schedule, pp=2, vpp=vpp, rank=rank, flushes=flushes)


def most(order: Passes, microbatches: int, *, totals: float = 0.0, ranks: int = 1, in_runs: bool = False) -> float:
    """Partial sums of chunks of one element, of one byte each."""
    sizes = [np.ones(1)] * order.vpp + [np.zeros(1)] * order.vpp
    waiting = Waiting(sizes=sizes, units=[[(0.0, 0.0)]] * 2 * order.vpp, per_sum=1.0, totals=totals)
    return float(waiting.most(order.changes(microbatches, ranks, in_runs=in_runs))[0])


@pytest.mark.parametrize(
    ("each", "ranks", "sums"),
    [(4, 1, (1,)), (4, 4, (1, 1, 1, 1)), (4, 3, (2, 3, 2)), (16, 3, (3, 5, 3)), (4, 6, (2, 3, 2, 2, 3, 2))],
)
def test_sums_of_a_run(each, ranks, sums):
    """One where ranks are a power of two; both halves of six ranks are like three."""
    assert sums_of_runs(each, ranks) == sums


def test_the_rank_with_the_most_sums_is_predicted():
    """Of three ranks with four micro-batches each the second one ends with three sums, the first of them in FP32."""
    order = passes("1f1b", vpp=1)
    assert most(order, 4, ranks=3, in_runs=True) == 3  # of the third, before its last micro-batch
    assert most(order, 4, ranks=3, in_runs=True, totals=np.inf) == 4 + 2


@pytest.mark.parametrize(
    ("order", "together"),
    [
        (passes("1f1b", vpp=1), 2),
        (passes("interleaved"), 3),  # when a chunk has two sums, the other has one: after all backwards of pp
        (passes("zbv"), 3),
        (passes("zbv", rank=1), 4),  # both chunks wait for their last weight gradient
        (passes("interleaved", flushes=2), 5),
        (passes("1f1b", vpp=1, flushes=2), 3),
    ],
)
def test_chunks_have_the_most_sums_together_where_the_schedule_says_so(order: Passes, together: int) -> None:
    """Four micro-batches a flush: a chunk's own most are 2, of two flushes 3."""
    assert most(order, 4) == together


def test_finished_sums_that_stay_count_in_fp32() -> None:
    assert most(passes("1f1b", vpp=1), 2) == 1
    assert most(passes("1f1b", vpp=1), 2, totals=0.5) == 2
    assert most(passes("1f1b", vpp=1), 2, totals=np.inf) == 4


def test_sums_of_a_unit_change_when_its_gradients_go() -> None:
    """Of two halves of a chunk, the second goes when the first one's two sums are one already."""
    units = [[(0.0, 0.0), (10.0, 0.5)]]
    waiting = Waiting(sizes=[np.ones(1)], units=units, per_sum=1.0, totals=0.0)
    before, after = ((2, False),), ((1, False),)
    assert waiting.most({(before, after, (True,))}) == 10 + 0.5 * 1 + 0.5 * 2
