"""Muon on every backend and layout: weights and momenta after ten steps are those of emerging-optimizers on whole
matrices in one process."""

from __future__ import annotations

import pytest

from tests.support.muon import BACKENDS, cells, problems


def test_the_table_has_48_cells_or_more():
    assert len(cells()) >= 48


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_momenta_equal_one_process(backend):
    found = problems([each for each in cells() if each.name.startswith(f"{backend},")], steps=10)
    assert not found, "\n".join(found)
