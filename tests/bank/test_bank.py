"""Every mistake of the bank is caught by its number: `make bank`. A rank that raises is no catch.

Mistakes of one base case share a start of ranks, which also takes the steps of the case as it is. If a rank ends in
that start, each mistake has a start of its own.
"""

from __future__ import annotations

import re

import pytest

from megaaccum.distributed import preload

preload.libraries()  # a mistake names what it replaces

from megaaccum.lab.verification import localise  # noqa: E402
from megaaccum.lab.verification.compare import Comparison  # noqa: E402
from megaaccum.lab.verification.testing import RanksFailed  # noqa: E402
from megaaccum.lab.verification.verdict import Verdict, Verifier  # noqa: E402
from tests.bank import on_ranks, outcomes  # noqa: E402
from tests.bank.entries import BANK  # noqa: E402


@pytest.fixture(scope="session")
def _compared() -> dict[tuple[str, str], Comparison]:
    """By mistake (empty: none) and base case."""
    return {}


@pytest.fixture
def compared(request, _compared):
    """Returns the comparison of a mistake; the first one of a base case makes all that were selected."""

    def of(name: str, base: str) -> Comparison:
        if (name, base) not in _compared:
            items = [item for item in request.session.items if item.function is test_it_is_caught_by_its_number]
            names = [item.callspec.params["name"] for item in items]
            made = [("", base), *((each, base) for each in names if BANK[each].base == base)]
            try:
                _compared.update(zip(made, on_ranks.compared(made), strict=True))
            except RanksFailed:
                made = [("", base), (name, base)]
                _compared.update(zip(made, on_ranks.compared(made), strict=True))
        return _compared[name, base]

    return of


@pytest.mark.parametrize("name", BANK, ids=lambda name: name.replace(" ", "-"))
def test_it_is_caught_by_its_number(name, compared):
    mistake = BANK[name]
    wrong = compared(name, mistake.base)
    assert compared("", mistake.base).ok, f"{mistake.base} fails without the mistake"
    assert not wrong.ok, "no number is wrong"
    found = localise.described(wrong)
    assert re.fullmatch(mistake.parameter, found.parameter), f"{found.first} {found.parameter}"


@pytest.mark.parametrize("name", ["mean of means", "tied copy counted twice", "weight gradient left out"])
def test_its_place_is_found(name):
    (outcome,) = outcomes.outcomes(Verifier(), [name])
    assert outcome.word == "localised", outcome.line()


def test_none_is_caught_in_a_case_that_is_wrong_without_it():
    class Failing(Verifier):
        def verify(self, case, lanes=None):
            return Verdict(case, steps=1, failure="it fails")

    (outcome,) = outcomes.outcomes(Failing(), ["norms decay"])
    assert outcome.word == "missed"
    assert "fails without the mistake" in outcome.how


@pytest.mark.parametrize(("missed", "code"), [("", 0), ("norms decay", 1)])
def test_the_benchmark_fails_if_one_is_missed(missed, code, capsys, monkeypatch):
    from benchmarks import verify

    names = ["norms decay", "nothing decays"]
    ends = [outcomes.Outcome(BANK[name], caught=name != missed, found=True, axes=["dp"]) for name in names]
    monkeypatch.setattr(outcomes, "outcomes", lambda verifier, names: iter(ends))
    assert verify.main(["--mistakes", *names]) == code
    printed = capsys.readouterr().out
    assert f"{2 - code} caught, {2 - code} localised" in printed
    assert ("missed" in printed) == bool(missed)
