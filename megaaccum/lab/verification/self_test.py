"""The self-test of a verification: each documented mistake is made on purpose, and has to be seen and found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megaaccum.lab.verification import localise
from megaaccum.lab.verification.bank import BANK, Mistake
from megaaccum.lab.verification.bank.cases import CASES
from megaaccum.lab.verification.verdict import Verdict, Verifier


@dataclass(slots=True)
class Outcome:
    """The end of one mistake. caught: by a number, not because a rank raised. found: at its axes and parameter.
    how: the first wrong number, and what the gradient is of the right one."""

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
    """Of the mistakes named, or of all. Each in the precision of its case, which is verified without it first."""
    healthy: dict[str, Verdict] = {}
    for name in names or BANK:
        case = CASES[BANK[name].base]
        if BANK[name].base not in healthy:
            healthy[BANK[name].base] = verifier.verify(case, [case.lane])
        begun = time.monotonic()
        outcome = _made(verifier, BANK[name], healthy[BANK[name].base])
        outcome.seconds = time.monotonic() - begun
        yield outcome


def _made(verifier: Verifier, mistake: Mistake, healthy: Verdict) -> Outcome:
    if not healthy.ok:
        return Outcome(mistake, caught=False, found=False, how=f"{mistake.base} fails without the mistake")
    case = replace(CASES[mistake.base], mistake=mistake.name)
    verdict: Verdict = verifier.verify(case, [case.lane])
    if verdict.ok or verdict.failure or verdict.problem:
        return Outcome(mistake, caught=False, found=False, how=verdict.failure or verdict.problem)
    found = localise.diagnose(verifier, verdict, lambda text: None)
    assert found is not None
    how = found.first + (f"; {found.relation}" if found.relation else "")
    return Outcome(mistake, True, mistake.is_at(found.axes, found.parameter), found.axes, found.parameter, how)


def summary(found: Sequence[Outcome]) -> str:
    """The last line of the table."""
    caught, localised = sum(each.caught for each in found), sum(each.caught and each.found for each in found)
    slowest = max((each.seconds for each in found), default=0.0)
    return f"{len(found)} mistakes: {caught} caught, {localised} localised; the slowest took {slowest:.0f} s"
