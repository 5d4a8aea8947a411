"""Sixteen cells of the fuzz that are not among those of tests/multiproc/test_fuzz.py."""

from __future__ import annotations

from tests.multiproc.test_fuzz import problems_of_cells


def test_sixteen_cells():
    assert problems_of_cells(2, 16) == []
