"""A selection of the bank of mistakes (tests/bank), each caught by its number; `make bank` makes all of them."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.compare import Comparison
from tests.bank import on_ranks

MISTAKES = {
    "division per stage": ("pipeline", "gradient"),
    "ranks divided twice": ("pipeline", "gradient"),
    "mean of means": ("pipeline", "gradient"),
    "mean over own tokens": ("pipeline", "gradient"),
    "rounds not divided": ("micro-batch means", "gradient"),
    "weight gradient left out": ("zb-h1", "gradient"),
    "tied copy not summed": ("pipeline, tied and clipped", "gradient"),
    "tied copy counted twice": ("pipeline, tied and clipped", "norm"),
    "norm per stage": ("pipeline, tied and clipped", "norm"),
    "sequence parallel norms not summed": ("tensor parallel", "gradient"),
    "reduction in every microbatch": ("ZeRO-3", "gradient"),
    "running sum divided again": ("ZeRO-3", "gradient"),
    "cleared between rounds": ("ZeRO-3, rounds", "gradient"),
    "tied shards not summed": ("ZeRO-2, tied", "gradient"),
}
"""(the case in which it is made, the kind of number that is wrong in the first step) of each."""
HEALTHY = tuple(dict.fromkeys(base for base, _ in MISTAKES.values()))


@pytest.fixture(scope="module")
def compared() -> dict[tuple[str, str], Comparison]:
    """By mistake and case; without a mistake for every case."""
    made = [*(("", base) for base in HEALTHY), *((name, base) for name, (base, _) in MISTAKES.items())]
    return dict(zip(made, on_ranks.compared(made), strict=True))


@pytest.mark.parametrize("base", HEALTHY)
def test_no_number_is_wrong_without_a_mistake(base, compared):
    assert compared["", base].failed == []
    assert any(row.kind == "gradient" for row in compared["", base].rows)


@pytest.mark.parametrize("name", MISTAKES)
def test_its_number_is_wrong(name, compared):
    base, kind = MISTAKES[name]
    wrong = compared[name, base].failed
    assert any(row.kind == kind and row.step == 1 for row in wrong), wrong
