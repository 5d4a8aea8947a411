"""Sums over the world at the end of a step, along with the squares of the norm: loss, weight and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megaaccum.distributed.agreement import printed_once, raise_together
from megaaccum.errors import StepError
from megaaccum.platform import cpu
from megaaccum.step.loss import ReportReducer, Tally, sums_over_ranks

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.step.nonfinite import ZeroNonFinite


@dataclass(frozen=True, slots=True)
class Totals:
    """Over all ranks: sums of losses and weights, reports as they are asked for, and elements of gradients that were
    set to 0."""

    loss: float
    weight: float
    reports: dict[str, float]
    num_zeroed: int = 0


class StepTotals:
    """Adds up what the loss functions of a step gave, on ranks of `groups`. zero: what sets elements of gradients to 0,
    if anything does.

    Bad weights, problems, new names of reports and zeroed elements are one flag there: whether any rank has any of
    them. Ranks ask each other for more only where one has.
    """

    def __init__(self, groups: Groups, reports: ReportReducer, zero: ZeroNonFinite | None):
        self._groups, self._reports, self._zero = groups, reports, zero

    def own(self, tally: Tally, weight: float | None) -> list[torch.Tensor]:
        """Parts of this rank of the sums over the world. weight: that of the step, where it is known."""
        sums = tally.sums() if weight is None else [tally.total(tally.losses)]
        return self.counted([*sums, *self._reports.sums(tally)])

    def unusual(self, tally: Tally) -> torch.Tensor:
        """Whether this rank has more to say (not 0), float64 scalar."""
        return torch.stack(self._each_unusual(tally)).sum()

    def counted(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's share of sums over the world: ranks of one tp group have the same, and the first counts."""
        return sums if self._groups.tp.rank() == 0 else [torch.zeros_like(each) for each in sums]

    def _each_unusual(self, tally: Tally) -> list[torch.Tensor]:
        zeroed = torch.zeros((), device=cpu.device()) if self._zero is None else self._zero.total()
        parts = [*self.counted([*tally.faults(), self._reports.news(tally)]), zeroed]
        return [part.to(cpu.device(), torch.float64) for part in parts]

    def read(self, sums: Sequence[float], weight: float | None) -> Totals:
        """Those of the sums over the world of what each rank had as its `own`, without what is unusual."""
        if weight is None:
            loss, weight, *reported = sums
        else:
            loss, *reported = sums
        return Totals(loss, weight, self._reports.reduced(reported))

    def in_full(self, tally: Tally, totals: Totals) -> Totals:
        """`totals` with what was left out of them. Collective over the world. Raises a problem of any rank, and
        StepError for weights that are negative or not numbers."""
        bad, problem, news, zeroed = sums_over_ranks(self._each_unusual(tally))
        if problem:
            raise_together(tally.problem)
        if bad:
            text = f"{bad:.0f} micro-batches have a weight that is negative or not a number: fix the loss function"
            raise printed_once(StepError(text))
        reports = totals.reports
        if news:
            self._reports.learn(tally)
            reports = self._reports.reduced(sums_over_ranks(self.counted(self._reports.sums(tally))))
        return replace(totals, reports=reports, num_zeroed=int(zeroed))
