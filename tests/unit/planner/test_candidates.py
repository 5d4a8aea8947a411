"""Candidates keep where they came from, and move recomputation and accumulation together."""

from __future__ import annotations

from typing import Any

import pytest

from megaaccum.planner.candidates import Candidate, after

AXES: dict[str, Any] = dict(tp=2, pp=4, mbs=2, dbs=16, ga=4, recompute="none")


def candidate(**axes: Any) -> Candidate:
    return Candidate(axes=AXES | axes)


def test_a_candidate_goes_through_its_states() -> None:
    one = candidate().moved_to("trying").moved_to("accepted")
    assert one.state == "accepted"
    with pytest.raises(ValueError, match="accepted cannot become trying"):
        one.moved_to("trying")
    with pytest.raises(ValueError, match="planned cannot become accepted"):
        candidate().moved_to("accepted")


@pytest.mark.parametrize("outcome", ["out_of_memory", "roomy"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_move_changes_the_global_batch(outcome: Any, recompute: str) -> None:
    for child in after(candidate(recompute=recompute), outcome):
        assert child.sequences == AXES["dbs"] * AXES["ga"]
        assert child.parent is not None
        assert child.axes != child.parent.axes


def test_recompute_that_is_turned_on_is_tried_with_a_larger_micro_batch() -> None:
    moves = {(c.axes["recompute"], c.axes["mbs"], c.axes["ga"]) for c in after(candidate(), "out_of_memory")}
    assert moves == {("none", 1, 8), ("selective", 4, 2), ("selective", 2, 4)}


def test_recompute_that_is_turned_off_is_tried_with_a_smaller_micro_batch() -> None:
    moves = {(c.axes["recompute"], c.axes["mbs"], c.axes["ga"]) for c in after(candidate(recompute="full"), "roomy")}
    assert moves == {("selective", 2, 4), ("selective", 1, 8), ("full", 4, 2)}


def test_nothing_is_left_at_the_end() -> None:
    assert after(candidate(), "fits") == []
    assert after(candidate(mbs=1, dbs=1, ga=1, recompute="full"), "out_of_memory") == []


def test_history_tells_every_move() -> None:
    first = after(candidate(), "out_of_memory")[0]
    second = after(first, "roomy")[0]
    assert second.history() == ["the planner", "micro-batch 2 -> 1, ga 4 -> 8", second.came_from]
