"""docs/concepts/scale.md: its tables are those of scale.json, whose figures follow from what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale, scale_threads

CONTENT = json.loads(scale.JSON.read_text())


def test_the_page_has_the_tables_of_the_figures():
    page = scale.PAGE.read_text()
    assert scale.written(page, CONTENT) == page


@pytest.mark.parametrize("size", scale.SIZES)
def test_figures_follow_from_what_was_measured(size):
    assert CONTENT["at"][str(size)] == json.loads(json.dumps(scale.at(size, CONTENT["measured"])))


def test_another_figure_is_another_page():
    other = json.loads(json.dumps(CONTENT))
    other["at"]["1024"]["plans"]["bytes"] *= 2
    assert scale.tables(other) != scale.tables(CONTENT)


def test_what_grew_with_the_square_of_the_ranks_does_not():
    """From 1,024 ranks to 16,384, sixteen times as many."""
    few, many = (CONTENT["at"][str(size)] for size in scale.SIZES)
    for name in few:
        for kind in ("messages", "bytes"):
            is_mesh = name == "mesh"
            assert many[name][kind] <= 23 * few[name][kind] or is_mesh, name
    assert many["pairs"]["messages"] == 14 and many["ring"]["messages"] == 32_766


def test_threads_as_ranks_sum_and_agree():
    """The benchmark's own checks hold: every rank has the sum, all agree, and every one that differs is found."""
    (found,) = scale_threads.sums([4])
    assert set(found) == {"ranks", "ring", "pairs"}
    assert 0 < scale_threads.agreement(4)["longest_message"] < 500


def test_a_rank_s_keys_are_pieces():
    keys = scale.keys_of(0)
    assert len(keys) == 8 * 6 * 3 and len(scale.keys_of(1)) == 8 * 4 * 3
    assert len({key for rank in range(scale.TP * scale.PP) for key in scale.keys_of(rank)}) == sum(
        len(scale.keys_of(rank)) for rank in range(scale.TP * scale.PP)
    )
