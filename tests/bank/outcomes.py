"""Whether a mistake is caught by a number, and whether its place is found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megaaccum.lab.verification import localise
from megaaccum.lab.verification.verdict import Verdict, Verifier
from tests.bank import on_ranks
from tests.bank.cases import CASES
from tests.bank.entries import BANK, Mistake


@dataclass(slots=True)
class Outcome:
    """The end of one mistake.

    caught: a compared number is wrong; a rank that raises is no catch. found: the diagnosis names its axes and its
    parameter. how: the first wrong number, and the relation of the gradient to the right one."""

    mistake: Mistake
    caught: bool
    found: bool
    axes: list[str] = field(default_factory=list)
    parameter: str = ""
    how: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        return "localised" if self.caught and self.found else "caught" if self.caught else "missed"

    def line(self) -> str:
        """A row of the table."""
        axes = ", ".join(self.axes) or "none"
        return f"{self.word:<10} {self.seconds:5.1f} s  {self.mistake.name:<44} {axes:<30} {self.how}"


def outcomes(verifier: Verifier, names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Make the named mistakes, or all, each in the precision of its case, which is verified without it first."""
    healthy: dict[str, Verdict] = {}
    for name in names or BANK:
        case = CASES[BANK[name].base]
        if BANK[name].base not in healthy:
            healthy[BANK[name].base] = verifier.verify(case, [case.lane])
        begun = time.monotonic()
        observed = replace(verifier, observing=on_ranks.observing(name))
        outcome = _outcome(observed, BANK[name], healthy[BANK[name].base])
        outcome.seconds = time.monotonic() - begun
        yield outcome


def _outcome(verifier: Verifier, mistake: Mistake, healthy: Verdict) -> Outcome:
    """verifier: makes the mistake."""
    if not healthy.ok:
        return Outcome(mistake, caught=False, found=False, how=f"{mistake.base} fails without the mistake")
    case = CASES[mistake.base]
    verdict: Verdict = verifier.verify(case, [case.lane])
    if verdict.ok or verdict.failure or verdict.problem:
        return Outcome(mistake, caught=False, found=False, how=verdict.failure or verdict.problem)
    found = localise.diagnose(verifier, verdict)
    assert found is not None
    how = found.first + (f"; {found.relation}" if found.relation else "")
    return Outcome(mistake, True, mistake.is_at(found.axes, found.parameter), found.axes, found.parameter, how)


def summary(found: Sequence[Outcome]) -> str:
    """The last line of the table."""
    caught, localised = sum(each.caught for each in found), sum(each.caught and each.found for each in found)
    slowest = max((each.seconds for each in found), default=0.0)
    return f"{len(found)} mistakes: {caught} caught, {localised} localised; the slowest took {slowest:.0f} s"
