"""Each mistake of the bank replaces what is there; a self-test counts none whose case is wrong without it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any, cast
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks


def enter_all() -> list[str]:
    """The names of all mistakes, each made and taken back once."""
    from megaaccum.lab.verification.bank import BANK, made
    from megaaccum.lab.verification.bank.cases import CASES

    for name, mistake in BANK.items():
        with made(name, CASES[mistake.base].plan()):
            pass
    return list(BANK)


def outcome_in_a_wrong_case() -> tuple[bool, str]:
    """Of a mistake whose case fails as it is."""
    from megaaccum.lab.verification import self_test
    from megaaccum.lab.verification.verdict import Verdict

    class Failing:
        def verify(self, case: Any, lanes: Any) -> Verdict:
            return Verdict(case, steps=1, failure="it fails")

    (outcome,) = self_test.outcomes(cast(Any, Failing()), ["norms decay"])
    return outcome.caught, outcome.how


def test_each_can_be_made():
    (names,) = run_ranks(enter_all, 1, init=False)
    assert len(names) >= 60


def test_none_is_caught_in_a_case_that_is_wrong_without_it():
    ((caught, how),) = run_ranks(outcome_in_a_wrong_case, 1, init=False)
    assert not caught
    assert "fails without the mistake" in how


def the_command(missed: str) -> tuple[int, str]:
    """Exit code and output of `megaaccum verify --bank` where one of two mistakes is missed."""
    from megaaccum import cli
    from megaaccum.lab.verification import self_test
    from megaaccum.lab.verification.bank import BANK

    names = ("norms decay", "nothing decays")
    ends = [self_test.Outcome(BANK[name], caught=name != missed, found=True, axes=["dp"]) for name in names]
    printed = io.StringIO()
    with patch.object(self_test, "outcomes", lambda verifier: iter(ends)), redirect_stdout(printed):
        return cli.main(["verify", "--bank"]), printed.getvalue()


@pytest.mark.parametrize(("missed", "code", "words"), [("", 0, "2 caught, 2 localised"), ("norms decay", 1, "missed")])
def test_the_command_prints_each_and_fails_where_one_is_missed(missed, code, words):
    ((ended, printed),) = run_ranks(the_command, 1, missed, init=False)
    assert ended == code
    assert words in printed
    assert "norms decay" in printed
