"""The order of trying the planner's layouts: the rules of `megaaccum tune`, without running anything.

Layouts are tried in the planner's order. After a layout that ran out of memory the next one is the best ranked that is
predicted to need less and keeps the recompute setting; only where there is none does recompute change. Device batches
of one sequence are tried when nothing else is left. Knobs are then turned one at a time, from the best so far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaaccum.errors import ConfigError, did_you_mean

OUT_OF_MEMORY, NOT_FINITE, UNSTEADY, HANGS, FAILED = "out of memory", "not finite", "unsteady", "hangs", "failed"
MEASURED = "measured"
CLOSE = 0.1
"""Layouts whose step is longer than the shortest by no more than this share are measured again."""

KNOBS: Mapping[str, frozenset[str]] = {
    "mbs": frozenset({"mbs", "dbs", "ga"}),
    "recompute": frozenset({"recompute"}),
    "schedule": frozenset({"schedule", "vpp"}),
    "vpp": frozenset({"vpp", "schedule"}),
    "sync": frozenset({"sync", "zero"}),
    "tp": frozenset({"tp", "etp", "dp", "mbs", "dbs", "ga"}),
    "pp": frozenset({"pp", "vpp", "schedule", "dp", "mbs", "dbs", "ga"}),
}
"""For each knob the axes of a layout that move with it: the global batch and the number of ranks stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that the planner scored. row: its place in the ranking, from 1. axes: `Layouts.axes`. seconds, bytes: a
    step's, and those of the most loaded rank's tensors, both predicted."""

    row: int
    axes: Mapping[str, Any]
    seconds: float
    bytes: float

    @property
    def name(self) -> str:
        """Its axes as text, the same in every start."""
        return ",".join(f"{axis}={value}" for axis, value in self.axes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of running a candidate. verdict: MEASURED, or why it was dropped. seconds: the median of steps 1 to 3,
    counted from 0; None unless measured. runs: those of each run, where there were several, of which seconds is the
    median. steps: seconds of every step. bytes: held by rank 0 at most, 0 where
    it is not known. text: what it printed when it failed. receipt: the file."""

    verdict: str
    seconds: float | None = None
    steps: list[float] = field(default_factory=list)
    bytes: float = 0.0
    text: str = ""
    receipt: str = ""
    runs: list[float] = field(default_factory=list)

    def then(self, again: Outcome) -> Outcome:
        """Merge the outcome of another run: seconds become the median of all runs."""
        if self.seconds is None or again.seconds is None:
            return again
        runs = [*(self.runs or [self.seconds]), again.seconds]
        return replace(again, seconds=statistics.median(runs), runs=runs)


class Fallbacks:
    """The candidates of one tuning run, and the results of those that were tried."""

    def __init__(self, candidates: Sequence[Candidate], *, top: int):
        """candidates: by rank. top: how many are measured before knobs are turned."""
        self._all, self._top = list(candidates), top
        self.outcomes: dict[str, Outcome] = {}
        self.tried: list[Candidate] = []
        """In the order in which they ran."""
        self.notes: list[str] = []

    def run(self, measure: Callable[[Candidate], Outcome], knobs: Sequence[str] = ()) -> Candidate | None:
        """Try candidates by the rules, each once. Returns the best one, or None if none could be measured. Raises
        ConfigError for an unknown knob, before anything is run."""
        for knob in knobs:
            if knob not in KNOBS:
                raise ConfigError(f"--knob {knob}{did_you_mean(knob, KNOBS)}: the knobs are {', '.join(KNOBS)}.")
        following = next(iter(self._untried()), None)
        while following is not None:
            self._try(following, measure)
            following = None if len(self.measured) >= self._top else self._after(following)
        for knob in knobs:
            for candidate in self._turned(knob):
                self._try(candidate, measure)
        self._note_device_batch_of_one()
        return self.best()

    def _note_device_batch_of_one(self) -> None:
        """Say that a layout was left out for its device batch although it was predicted to be faster than the best."""
        best, left = self.best(), next((each for each in self._all if each.name not in self.outcomes), None)
        if best is not None and left is not None and left.axes["dbs"] == 1 and left.seconds < best.seconds:
            self.notes.append(
                f"row {left.row} is predicted to take {left.seconds:.3g} s, the best {best.seconds:.3g} s, but has a"
                f" device batch of one sequence, which is tried last: --fix dbs=1 measures it"
            )

    def run_again(self, measure: Callable[[Candidate, int], Outcome], rounds: int) -> Candidate | None:
        """Measure the layouts near the best one again, in turns, until each has had `rounds` runs: what else the
        machine did then meets all of them. measure: given the number of the run. Returns the best by the medians."""
        least = min(map(self._first_seconds, self.measured), default=0.0)
        near = [each for each in self.measured if self._first_seconds(each) <= (1 + CLOSE) * least]
        for number in range(2, rounds + 1 if len(near) > 1 else 2):
            for each in near:
                self.outcomes[each.name] = measure(each, number)
        return self.best()

    def _first_seconds(self, candidate: Candidate) -> float:
        runs = self.outcomes[candidate.name].runs
        return runs[0] if runs else self.seconds_of(candidate)

    def best(self) -> Candidate | None:
        """The measured candidate with the shortest step."""
        return min(self.measured, key=self.seconds_of, default=None)

    def seconds_of(self, candidate: Candidate) -> float:
        """Measured seconds of a step; infinite for one that was not measured."""
        seconds = self.outcomes[candidate.name].seconds
        return math.inf if seconds is None else seconds

    @property
    def measured(self) -> list[Candidate]:
        """The candidates that were measured."""
        return [each for each in self.tried if self.outcomes[each.name].verdict == MEASURED]

    def _try(self, candidate: Candidate, measure: Callable[[Candidate], Outcome]) -> None:
        self.outcomes[candidate.name] = measure(candidate)
        self.tried.append(candidate)

    def _untried(self) -> list[Candidate]:
        """By rank, but device batches of one sequence last."""
        left = [each for each in self._all if each.name not in self.outcomes]
        return sorted(left, key=lambda each: each.axes["dbs"] == 1)

    def _after(self, last: Candidate) -> Candidate | None:
        """The next one to try, after `last`."""
        if self.outcomes[last.name].verdict != OUT_OF_MEMORY:
            return next(iter(self._untried()), None)
        smaller = [each for each in self._untried() if each.bytes < last.bytes]
        kept = [each for each in smaller if each.axes["recompute"] == last.axes["recompute"]]
        if kept or not smaller:
            return kept[0] if kept else None
        then = smaller[0]
        moves = [f"{axis} {last.axes[axis]} -> {then.axes[axis]}" for axis in ("recompute", "mbs", "ga")]
        self.notes.append(
            f"row {last.row} ran out of memory, and no layout that needs less keeps its recompute setting: row"
            f" {then.row} is next, where {', '.join(moves)} move together"
        )
        return then

    def _turned(self, knob: str) -> list[Candidate]:
        """The untried layouts that differ from the best one in this knob alone."""
        if (best := self.best()) is None:
            return []
        still = best.axes.keys() - KNOBS[knob]
        return [each for each in self._untried() if all(each.axes[axis] == best.axes[axis] for axis in still)]
