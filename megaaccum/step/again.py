"""The micro-batches of a step once more, after it went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megaaccum.precision.nonfinite import Findings, Probe
from megaaccum.step import short_batch
from megaaccum.step.recovery import Attempt

if TYPE_CHECKING:
    from megaaccum.step.open_step import OpenStep
    from megaaccum.step.train_step import TrainStep


class Again:
    """Those of an open step of `of` (recovery.Again)."""

    def __init__(self, of: TrainStep, opened: OpenStep):
        self._of, self._opened = of, opened

    def look(self) -> Findings | None:
        of, opened = self._of, self._opened
        if not opened.calls or not all(batch.can_run_again for batch in opened.calls):
            return None  # they came from an iterator, or to another loop
        of._backend.discard()
        opened.before.restore(of._fp8)
        tally = opened.tally
        of._begin_attempt(opened, lambda: opened.divisor)
        with Probe(of._chunks, of._groups) as of._probe:
            for batch in opened.calls:
                of._flushes(batch, opened, reduce=False)
            findings = of._probe.gather()
        of._probe = None
        of._backend.begin_step()
        opened.tally = tally
        return findings

    def without(self, findings: Findings) -> Attempt:
        of, opened = self._of, self._opened
        bad = findings.bad_microbatches()
        mine = set(bad.get(of._groups.dp.rank(), []))
        opened.before.restore(of._fp8)
        every = {batch.first + i: each for batch in opened.calls for i, each in enumerate(batch.data)}
        healthy = [each for index, each in every.items() if index not in mine]
        replaced = {index: short_batch.stand_in(every[index], healthy) for index in mine}
        calls = [batch.without(replaced) for batch in opened.calls]
        known = opened.divisor.total is not None
        of._begin_attempt(opened, of._divisor(calls, None, alone=known))
        for number, batch in enumerate(calls):
            of._flushes(batch, opened, reduce=number == len(calls) - 1 or not of._backend.can_defer)
        attempt = of._reduce_and_measure(opened)
        return replace(attempt, num_dropped=sum(map(len, bad.values())))
