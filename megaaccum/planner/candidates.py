"""A plan that is being tried: where a candidate came from, and what to try after an outcome.

The tuning loop asks `after` for the next candidates. A larger micro-batch and recomputation are never moved alone: what
recomputation frees is spent on the micro-batch, and what the micro-batch takes back is paid in accumulation steps, so
that the global batch stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megaaccum.planner.layouts import RECOMPUTE

Outcome = Literal["fits", "roomy", "out_of_memory"]
"""What a trial says: it fits; it leaves so much memory that a larger micro-batch would fit; it does not fit."""
State = Literal["planned", "trying", "accepted", "rejected"]
_NEXT: dict[State, tuple[State, ...]] = {
    "planned": ("trying",),
    "trying": ("accepted", "rejected"),
    "accepted": (),
    "rejected": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout on its way from the plan to a verdict."""

    axes: dict[str, Any]
    """As Ranked.name_of gives it."""
    state: State = "planned"
    came_from: str = "the planner"
    """Who proposed it: 'the planner', or the move that made it."""
    parent: Candidate | None = None
    """The candidate whose outcome led to it."""

    def moved_to(self, state: State) -> Candidate:
        """The same candidate in another state. ValueError if no such step exists."""
        if state not in _NEXT[self.state]:
            raise ValueError(f"a candidate that is {self.state} cannot become {state}")
        return replace(self, state=state)

    def history(self) -> list[str]:
        """Where it came from, first cause first."""
        before = self.parent.history() if self.parent is not None else []
        return [*before, self.came_from]

    @property
    def sequences(self) -> int:
        """Sequences of a step on one data-parallel rank, which no move changes."""
        return self.axes["dbs"] * self.axes["ga"]


def after(candidate: Candidate, outcome: Outcome) -> list[Candidate]:
    """What to try next, the most promising first; empty when nothing is left, or when the outcome ends the search."""
    if outcome == "fits":
        return []
    moves = _relieve(candidate) if outcome == "out_of_memory" else _fill(candidate)
    return [_child(candidate, name, axes) for name, axes in moves]


def _child(candidate: Candidate, name: str, axes: dict[str, Any]) -> Candidate:
    child = Candidate(axes=axes, came_from=name, parent=candidate)
    assert child.sequences == candidate.sequences, "a move keeps the global batch"
    return child


def _relieve(candidate: Candidate) -> list[tuple[str, dict[str, Any]]]:
    """Less memory: a smaller micro-batch and more steps; or more recomputation, at this micro-batch and at twice it."""
    axes, moves = candidate.axes, []
    if (smaller := _micro_batch(axes, 1, 2)) is not None:
        moves.append((f"micro-batch {axes['mbs']} -> {smaller['mbs']}, ga {axes['ga']} -> {smaller['ga']}", smaller))
    if axes["recompute"] != "full":
        more = RECOMPUTE[RECOMPUTE.index(axes["recompute"]) + 1]
        for again in filter(None, (_micro_batch(axes, 2, 1), axes)):
            name = f"recompute {axes['recompute']} -> {more}, ga {axes['ga']} -> {again['ga']}"
            moves.append((name, {**again, "recompute": more}))
    return moves


def _fill(candidate: Candidate) -> list[tuple[str, dict[str, Any]]]:
    """Use what is free: less recomputation, at this micro-batch and at half of it; or a larger micro-batch."""
    axes, moves = candidate.axes, []
    if axes["recompute"] != "none":
        less = RECOMPUTE[RECOMPUTE.index(axes["recompute"]) - 1]
        for again in filter(None, (axes, _micro_batch(axes, 1, 2))):
            name = f"recompute {axes['recompute']} -> {less}, ga {axes['ga']} -> {again['ga']}"
            moves.append((name, {**again, "recompute": less}))
    if (larger := _micro_batch(axes, 2, 1)) is not None:
        moves.append((f"micro-batch {axes['mbs']} -> {larger['mbs']}, ga {axes['ga']} -> {larger['ga']}", larger))
    return moves


def _micro_batch(axes: dict[str, Any], times: int, over: int) -> dict[str, Any] | None:
    """The axes with `times` / `over` the micro-batch and device batch and the inverse of the accumulation steps; None
    where a number would not stay whole."""
    if axes["mbs"] * times % over or axes["dbs"] * times % over or axes["ga"] * over % times:
        return None
    return {
        **axes,
        "mbs": axes["mbs"] * times // over,
        "dbs": axes["dbs"] * times // over,
        "ga": axes["ga"] * over // times,
    }
