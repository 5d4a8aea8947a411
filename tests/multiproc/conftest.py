"""One test id per cell of a parity table, and one start of ranks for all cells of a test that are to run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megaaccum.lab.verification.testing import RanksFailed
from tests.support.distance import measured
from tests.support.parity import Case


@pytest.fixture(scope="session")
def _cells() -> dict[tuple[Callable, int], dict[Case, list[str]]]:
    """Problems of the cells that have run, by test function and number of ranks."""
    return {}


@pytest.fixture
def parity(request, _cells) -> Callable[[Case], None]:
    """Asserts that a cell has the gradient of one process on the whole batch. The first cell of a test has all of its
    selected cells with the same number of ranks measured; if ranks fail in that, each cell runs alone."""
    test = request.function

    def holds(case: Case) -> None:
        key = (test, case.world_size)
        if key not in _cells:
            items = [item for item in request.session.items if getattr(item, "function", None) is test]
            cases = [item.callspec.params["case"] for item in items]
            try:
                _cells[key] = measured([each for each in cases if each.world_size == case.world_size])
            except RanksFailed:
                _cells[key] = {}
        problems = _cells[key].get(case)
        problems = measured([case])[case] if problems is None else problems
        assert not problems, "\n".join([str(case), *problems])

    return holds
