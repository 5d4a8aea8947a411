"""The order in which `megaaccum tune` tries layouts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from rich.console import Console

from megaaccum.errors import ConfigError
from megaaccum.lab.planner.fallbacks import (
    FAILED,
    HANGS,
    MEASURED,
    NOT_FINITE,
    OUT_OF_MEMORY,
    Candidate,
    Fallbacks,
    Outcome,
)
from megaaccum.lab.planner.report import tuning_table

AXES = dict(
    tp=1, cp=1, pp=1, vpp=1, ep=1, etp=1, dp=4, mbs=2, dbs=4, ga=2, recompute="none", schedule="none", sync="resident",
    zero=3,
)  # fmt: skip


def candidate(row: int, *, size: float = 10.0, **axes: object) -> Candidate:
    return Candidate(row=row, axes=AXES | {"pp": row} | axes, seconds=float(row), bytes=size)


class Runs:
    """Gives each row its outcome, and counts what was run."""

    def __init__(self, outcomes: Mapping[int, str | float], default: float = 1.0):
        self.outcomes, self.default, self.rows = outcomes, default, list[int]()

    def __call__(self, at: Candidate) -> Outcome:
        self.rows.append(at.row)
        found = self.outcomes.get(at.row, self.default)
        return Outcome(verdict=found) if isinstance(found, str) else Outcome(verdict=MEASURED, seconds=found)


def test_the_planners_order_and_the_fastest_wins() -> None:
    fallbacks, runs = Fallbacks([candidate(row) for row in range(1, 6)], top=3), Runs({1: 3.0, 2: 1.0, 3: 2.0})
    best = fallbacks.run(runs)
    assert runs.rows == [1, 2, 3]
    assert best is not None
    assert best.row == 2


def test_out_of_memory_keeps_the_recompute_setting() -> None:
    rows = [
        candidate(1, size=10),
        candidate(2, size=11),  # would not fit either
        candidate(3, size=9, recompute="full"),
        candidate(4, size=8),
    ]
    fallbacks, runs = Fallbacks(rows, top=1), Runs({1: OUT_OF_MEMORY})
    fallbacks.run(runs)
    assert runs.rows == [1, 4]
    assert fallbacks.notes == []


def test_recompute_moves_where_nothing_else_is_smaller_and_is_reported() -> None:
    rows = [candidate(1, size=10), candidate(2, size=12), candidate(3, size=5, recompute="full", mbs=4, ga=1)]
    fallbacks, runs = Fallbacks(rows, top=1), Runs({1: OUT_OF_MEMORY})
    fallbacks.run(runs)
    assert runs.rows == [1, 3]
    assert "recompute none -> full, mbs 2 -> 4, ga 2 -> 1 move together" in fallbacks.notes[0]


def test_nothing_smaller_ends_it() -> None:
    fallbacks, runs = Fallbacks([candidate(1, size=10), candidate(2, size=10)], top=2), Runs({1: OUT_OF_MEMORY})
    assert fallbacks.run(runs) is None
    assert runs.rows == [1]


@pytest.mark.parametrize("verdict", [NOT_FINITE, HANGS, FAILED])
def test_other_faults_go_down_the_ranking(verdict: str) -> None:
    fallbacks, runs = Fallbacks([candidate(row) for row in range(1, 6)], top=2), Runs({1: verdict, 3: verdict})
    fallbacks.run(runs)
    assert runs.rows == [1, 2, 3, 4]
    assert [each.row for each in fallbacks.measured] == [2, 4]


def test_a_device_batch_of_one_is_a_fallback() -> None:
    rows = [candidate(1, dbs=1, mbs=1), candidate(2), candidate(3)]
    fallbacks, runs = Fallbacks(rows, top=3), Runs({})
    fallbacks.run(runs)
    assert runs.rows == [2, 3, 1]
    assert not fallbacks.notes
    fallbacks = Fallbacks(rows, top=2)
    fallbacks.run(Runs({}))
    (note,) = fallbacks.notes
    assert note.startswith("row 1 is predicted to take") and note.endswith("--fix dbs=1 measures it")


def test_one_knob_at_a_time_from_the_best() -> None:
    rows = [
        candidate(1, pp=1),
        candidate(2, pp=1, mbs=4, dbs=8, ga=1),
        candidate(3, pp=1, mbs=4, dbs=8, ga=1, recompute="full"),  # two knobs away from row 1, one from row 2
        candidate(4, pp=2, mbs=4, dbs=8, ga=1),
        candidate(5, pp=1, recompute="full"),
    ]
    fallbacks, runs = Fallbacks(rows, top=1), Runs({1: 2.0, 2: 1.0, 3: 3.0})
    best = fallbacks.run(runs, ["mbs", "recompute"])
    assert runs.rows == [1, 2, 3]
    assert best is not None
    assert best.row == 2


def test_layouts_near_the_best_run_again_in_turns() -> None:
    """The first is fastest when it runs alone, and slower than the second in all further runs."""
    fallbacks, runs = Fallbacks([candidate(row) for row in (1, 2, 3)], top=3), Runs({1: 1.0, 2: 1.08, 3: 1.2})
    fallbacks.run(runs)
    again: list[tuple[int, int]] = []

    def measure(at: Candidate, number: int) -> Outcome:
        again.append((at.row, number))
        before = fallbacks.outcomes[at.name]
        return before.then(Outcome(verdict=MEASURED, seconds=1.3 if at.row == 1 else 1.1))

    best = fallbacks.run_again(measure, 3)
    assert again == [(1, 2), (2, 2), (1, 3), (2, 3)]
    assert best is not None
    assert (best.row, fallbacks.seconds_of(best)) == (2, 1.1)
    assert [fallbacks.seconds_of(each) for each in fallbacks.measured] == [1.3, 1.1, 1.2]
    assert fallbacks.run_again(measure, 1) is best
    assert len(again) == 4


def test_an_unknown_knob_is_refused_before_anything_runs() -> None:
    fallbacks, runs = Fallbacks([candidate(1)], top=1), Runs({})
    with pytest.raises(ConfigError, match=r"--knob recompte \(did you mean recompute\?\)"):
        fallbacks.run(runs, ["recompte"])
    assert runs.rows == []


def test_the_table_of_what_was_tried_reads_at_80_columns() -> None:
    wide = dict(tp=8, cp=2, pp=16, vpp=8, dp=64, ep=128, mbs=16, ga=1024, recompute="selective", schedule="interleaved")
    rows = [candidate(1), candidate(2, **wide), candidate(3, **wide)]
    fallbacks = Fallbacks(rows, top=2)
    best = fallbacks.run(Runs({2: OUT_OF_MEMORY}))
    console = Console(width=80)
    with console.capture() as shown:
        console.print(tuning_table(fallbacks, best))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == "1 dp4 2x2 none none 1 1 best".split()
    assert lines[3].split() == "2 tp8cp2pp16x8dp64ep128 16x1024 selective interleaved 2 out of memory".split()
