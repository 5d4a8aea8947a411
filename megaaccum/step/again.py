"""The micro-batches of a step once more, after it went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megaaccum.step import short_batch
from megaaccum.step.nonfinite import Findings, Probe

if TYPE_CHECKING:
    from megaaccum.step.attempts import Attempts, OpenStep
    from megaaccum.step.recovery import Attempt


class Again:
    """Those of `opened` in further attempts, from the random states of before; collective over the world."""

    def __init__(self, attempts: Attempts, opened: OpenStep):
        self._attempts, self._opened = attempts, opened

    def look(self) -> Findings | None:
        """Run them unreduced and look at each; leaves no gradient. None where they cannot be run again."""
        attempts, opened = self._attempts, self._opened
        if not opened.calls or not all(batch.can_run_again for batch in opened.calls):
            return None  # they came from an iterator, or to another loop
        attempts.drop(opened)
        tally = opened.tally
        attempts.begin(opened, lambda: opened.divisor)
        with Probe(attempts.chunks, attempts.groups) as attempts.probe:
            for batch in opened.calls:
                attempts.add(batch, opened, reduce=False)
            findings = attempts.probe.gather()
        attempts.probe = None
        attempts.backend.begin_step()
        opened.tally = tally
        return findings

    def without(self, findings: Findings) -> Attempt:
        """The gradient of those that `findings` does not name, divided by their weight."""
        attempts, opened = self._attempts, self._opened
        bad = findings.bad_microbatches()
        mine = set(bad.get(attempts.groups.dp.rank(), []))
        opened.restore()
        every = {batch.first + i: each for batch in opened.calls for i, each in enumerate(batch.data)}
        healthy = [each for index, each in every.items() if index not in mine]
        replaced = {index: short_batch.stand_in(every[index], healthy) for index in mine}
        calls = [batch.without(replaced) for batch in opened.calls]
        known = opened.divisor.total is not None
        attempts.begin(opened, attempts.divisor(calls, None, alone=known))
        for number, batch in enumerate(calls):
            attempts.add(batch, opened, reduce=number == len(calls) - 1 or not attempts.backend.can_defer)
        attempt = attempts.reduce_and_measure(opened)
        return replace(attempt, num_dropped=sum(map(len, bad.values())))
