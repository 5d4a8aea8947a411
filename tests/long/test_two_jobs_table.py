"""Twenty pairs of jobs in one folder, 0 to 5 seconds apart, of which the suite has two."""

from __future__ import annotations

import pytest

from tests.multiproc.test_run_folder import two_jobs
from tests.support.whole_runs import losses, make_data, train

STEPS = 16
"""A run that takes a second more for each outlasts the other's start and its wait for the folder."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """The losses of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder)
    assert train(folder, train_iters=STEPS).code == 0
    return losses(folder)


@pytest.mark.parametrize("seconds", [number * 5 / 19 for number in range(20)])
def test_of_two_jobs_one_runs_and_one_ends_with_one_message(expected, tmp_path, seconds):
    two_jobs(tmp_path, seconds, expected)
