"""A mistake made around the steps of a verification. The process that starts ranks imports no library for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from megaaccum.lab.verification import on_ranks
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.compare import Comparison, compare
from megaaccum.lab.verification.records import Observed, Reference
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.lab.verification.verdict import Observe
from tests.bank.cases import CASES

STEPS = 2
"""The second step shows what the first one left: rates, moments, histories."""


def observed(name: str, case: Case, steps: int, at_borders: bool = False) -> Observed:
    """Take this rank's steps with a mistake made; `name` is empty for none."""
    from tests.bank.entries import made

    with made(name, case.plan()) if name else nullcontext():
        return on_ranks.observed(case, steps, at_borders)


def observing(name: str) -> Observe:
    """A function that starts the ranks of a case and takes its steps with a mistake made."""
    return partial(_start_and_observe, name)


def _start_and_observe(name: str, case: Case, steps: int, at_borders: bool) -> list[Observed]:
    seconds = on_ranks.SECONDS
    found: list[Observed] = run_ranks(observed, case.world_size, name, case, steps, at_borders, timeout=seconds)
    return found


def compared(made: Sequence[tuple[str, str]]) -> list[Comparison]:
    """The steps of each (mistake, base case) beside one process, in the precision of the case. All cases have one
    number of ranks, and share one start of them. Raises RanksFailed if a rank raises."""
    bases = list(dict.fromkeys(base for _, base in made))
    (found,) = run_ranks(_references, 1, [CASES[base] for base in bases], timeout=60 + 20 * len(bases))
    references: dict[str, tuple[Reference, Reference]] = dict(zip(bases, found, strict=True))
    (world_size,) = {CASES[base].world_size for base in bases}
    by_rank = run_ranks(_observed_each, world_size, made, timeout=60 + 20 * len(made))
    comparisons = []
    for (_, base), ranks in zip(made, zip(*by_rank, strict=True), strict=True):
        case, (exact, near) = CASES[base], references[base]
        assert not exact.problem and not near.problem, exact.problem or near.problem
        plan = case.plan()
        summands = plan.batch.num_microbatches * plan.layout.dp
        comparisons.append(compare(case.lane, list(ranks), exact, near, summands=summands))
    return comparisons


def _references(cases: list[Case]) -> list[tuple[Reference, Reference]]:
    """(in float64, in its own precision) of each case."""
    found = []
    for case in cases:
        exact, *near = on_ranks.references(case, list(dict.fromkeys(("fp64", case.lane))), STEPS)
        found.append((exact, near[0] if near else exact))
    return found


def _observed_each(made: Sequence[tuple[str, str]]) -> list[Observed]:
    return [observed(name, CASES[base], STEPS) for name, base in made]
