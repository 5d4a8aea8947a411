"""V-Half and V-Min: a V that holds about a half, or a third, of what 1F1B holds (Qi et al., arXiv 2405.15362).

The less a rank may hold, the straighter a micro-batch has to go down to the head and back. Their paper gives building
blocks, one for each size of memory, that are repeated and then squeezed. Here the block comes out of a search among
straight waves for passes of equal length (`pass_numbers.waves`), which is as fast or faster at the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megaaccum.schedule.actions import Item, stage_map
from megaaccum.schedule.pass_numbers import Problem, Wave, justified, waves
from megaaccum.schedule.simulate import Costs


def v_half(pp: int, num_microbatches: int) -> Sequence[Sequence[Item]]:
    """The table of V-Half."""
    return _fastest(pp, num_microbatches, limit=2 * (pp // 2) + 2)


def v_min(pp: int, num_microbatches: int) -> Sequence[Sequence[Item]]:
    """The table of V-Min."""
    return _fastest(pp, num_microbatches, limit=2 * (pp // 3 + 1 + (pp % 3 == 2)))


def _fastest(pp: int, num_microbatches: int, limit: int) -> Sequence[Sequence[Item]]:
    """The best of the waves. limit: passes of micro-batches through a chunk that a rank holds until their weight
    gradients, of which 1F1B holds 2 * pp. Gaps are closed in the fastest of them only, which takes most of the time."""
    problem = _problem(pp, num_microbatches, limit)
    orders = [wave.order(problem) for wave in _fastest_waves(pp, min(num_microbatches, pp + 4), limit)]
    best = min((justified(problem, order) for order in orders if problem.fits(order)), key=problem.time)
    return problem.schedule_of(best, "").items


@functools.cache
def _fastest_waves(pp: int, num_microbatches: int, limit: int) -> tuple[Wave, ...]:
    """The two waves that are the fastest in a flush of few micro-batches: further ones repeat its middle."""
    small = _problem(pp, num_microbatches, limit)
    straight = waves(small, periods=(1.0, 1.05, 1.2), lags=(0.0, 0.3))
    fitting = [(wave, order) for wave in straight if small.fits(order := wave.order(small))]
    fitting.sort(key=lambda each: small.time(each[1]))
    chosen = sorted(fitting[:6], key=lambda each: small.time(justified(small, each[1])))
    return tuple(wave for wave, _ in chosen[:2])


def _problem(pp: int, num_microbatches: int, limit: int) -> Problem:
    return Problem(
        Costs(forward=1, input_grad=1, weight_grad=1), stages=stage_map("v", pp=pp, chunks=2),
        num_microbatches=num_microbatches, limit=limit,
    )  # fmt: skip
