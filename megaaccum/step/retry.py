"""The micro-batches of a step once more, after it went wrong: to find those that were not finite, or without them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megaaccum.observe.nonfinite import Findings, Probe
from megaaccum.step import short_batch, world_sums

if TYPE_CHECKING:
    from megaaccum.step.microbatches import OpenStep
    from megaaccum.step.recovery import Attempt
    from megaaccum.step.train_step import TrainStep


def find_nonfinite(steps: TrainStep, opened: OpenStep) -> Findings | None:
    """Run the micro-batches of `opened` unreduced, from the random states of before it, and look at each; leaves no
    gradient. None if they cannot be run again. Collective over the world."""
    if not opened.calls or not all(batch.can_run_again for batch in opened.calls):
        return None  # they came from an iterator, or to another loop
    steps.backend.discard()
    opened.restore()
    tally = opened.tally
    steps.begin_attempt(opened, lambda: opened.divisor)
    with Probe(steps.chunks, steps.groups) as steps.probe:
        for batch in opened.calls:
            steps.flush(opened, batch, reduce=False)
        findings = steps.probe.gather()
    steps.probe = None
    steps.backend.begin_step()
    opened.tally = tally
    return findings


def without_nonfinite(steps: TrainStep, opened: OpenStep, findings: Findings) -> Attempt:
    """The gradient of the micro-batches that `findings` does not name, divided by their weight. Collective over the
    world."""
    bad = findings.bad_microbatches()
    mine = set(bad.get(steps.groups.dp.rank(), []))
    opened.restore()
    every = {batch.first + i: each for batch in opened.calls for i, each in enumerate(batch.data)}
    lengths = {batch.first + i: length for batch in opened.calls for i, length in enumerate(batch.lengths or ())}
    healthy = next((index for index in range(opened.num_microbatches) if index not in mine), -1)
    # A stage in the middle may have an empty list.
    replaced = {index: short_batch.stand_in(every.get(index), every.get(healthy)) for index in mine}
    others = [index for index, each in replaced.items() if healthy in lengths and each is every.get(healthy)]
    other_length = dict.fromkeys(others, lengths.get(healthy, 0))
    calls = [replace(batch.without(replaced, other_length), total_weight=None) for batch in opened.calls]
    steps.begin_attempt(opened, world_sums.divisor_of(steps, calls, alone=opened.divisor.total is not None))
    for number, batch in enumerate(calls):
        steps.flush(opened, batch, reduce=number == len(calls) - 1 or not steps.backend.can_defer)
    return replace(steps.reduce_and_measure(opened), num_dropped=sum(map(len, bad.values())))
