"""Diagnosis of a wrong step: the axes that the failure needs, the first wrong number and parameter, and the relation of
the wrong gradient to the right one.

Axes are removed one at a time from a case that fails; an axis without which it does not fail stays. The result is a
smallest layout that fails: each of its axes is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megaaccum.errors import ConfigError
from megaaccum.lab.verification import relations
from megaaccum.lab.verification.axes import AXES
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.compare import Comparison, relative_error
from megaaccum.lab.verification.records import GRADIENT, MODEL, SENT, Crossing, Observed, Reference
from megaaccum.lab.verification.testing.ranks import RanksFailed
from megaaccum.lab.verification.verdict import Verdict, Verifier

_PHASES = {
    "initial weight": "before the step", "weight": "in the divisor", "loss": "in the forward",
    GRADIENT: "in the backward or the reduction", "param": "in the update", MODEL: "in the gather of new weights",
}  # fmt: skip
_KINDS = (
    "initial weight", "skipped", "weight", "loss", GRADIENT, "norm", "ranks", "loss_scale", "lr", "router", "random",
)  # fmt: skip


@dataclass(slots=True)
class Diagnosis:
    """The place of a failure.

    lane: the precision that was searched. axes: those that the failure needs; empty if one rank with one micro-batch
    fails. first: the first kind of number that is wrong, in the order of a step. parameter: the first that
    is wrong, in the order of the model. wrong, of: parameters with a wrong gradient (if gradients are right, with
    a wrong update), of all. stages: pipeline ranks that hold wrong ones. border: the first activation or gradient
    that is wrong at a border of stages, in words. relation: of the wrong gradient
    to the right one. smallest: keys of the smallest layout that fails."""

    lane: Lane
    axes: list[str] = field(default_factory=list)
    first: str = ""
    parameter: str = ""
    wrong: int = 0
    of: int = 0
    stages: list[int] = field(default_factory=list)
    border: str = ""
    relation: str = ""
    smallest: dict[str, object] = field(default_factory=dict)
    world_size: int = 1

    def lines(self) -> list[str]:
        """For the report."""
        needs = ", ".join(self.axes) or "no axis: one rank with one micro-batch fails too"
        lines = [f"Where       needs: {needs}", f"            first wrong number: {self.first}"]
        if self.parameter:
            stages = f", on pipeline ranks {self.stages}" if len(self.stages) else ""
            lines.append(f"            first wrong parameter: {self.parameter} ({self.wrong} of {self.of}{stages})")
        lines += [f"            {self.border}"] if self.border else []
        return lines + ([f"            it is: {self.relation}"] if self.relation else [])


def diagnose(verifier: Verifier, verdict: Verdict) -> Diagnosis | None:
    """Diagnose a verdict that failed; None if no precision was compared. Starts ranks several times."""
    if (failed := next((each for each in verdict.comparisons if not each.ok), None)) is None:
        return None
    lane = failed.lane
    # A case of several lanes was compared as `in_lane` has it.
    case = verdict.case.in_lane(lane)
    found = described(failed)
    wrong = [each.lane for each in verdict.comparisons if not each.ok]
    if len(verdict.comparisons) > 1 and wrong == [verdict.case.lane] and lane in ("bf16", "fp16"):
        found.axes.append(f"precision {lane}")  # the configured one, which alone fails
    _relate(found, verifier, case)
    smallest = _smallest(verifier, case, lane, found)
    found.smallest, found.world_size = dict(smallest.keys), smallest.world_size
    return found


def described(failed: Comparison) -> Diagnosis:
    """The first wrong number and parameter of a comparison that failed."""
    found = Diagnosis(failed.lane)
    step = min(row.step for row in failed.failed)
    rows = [row for row in failed.failed if row.step == step]
    first = min(rows, key=lambda row: _KINDS.index(row.kind) if row.kind in _KINDS else len(_KINDS))
    words = first.note or _PHASES.get(first.kind, "")
    found.first = f"{first.kind} of step {step}" + (f" ({words})" if words else "")
    tensors = [row for row in rows if row.name]
    kinds = sorted((row.kind for row in tensors), key=lambda kind: kind != GRADIENT)  # a gradient first, if it is wrong
    kind = first.kind if first.name else next(iter(kinds), "")
    wrong = [row for row in tensors if row.kind == kind]
    found.wrong, found.of = len(wrong), len({row.name for row in failed.rows if row.kind == kind})
    found.parameter = wrong[0].name if wrong else ""
    return found


# --- the relation to the right gradient -------------------------------------------------------------------------------


def _relate(found: Diagnosis, verifier: Verifier, case: Case) -> None:
    """Name the relation of the first step's wrong gradients to the right ones."""
    reference = verifier.references(case, ["fp64"], keep_parts=True)["fp64"]
    try:
        ranks = verifier.observe(case, at_borders=True)
    except RanksFailed:
        return
    if reference.steps[0].skipped or not found.parameter:
        return
    found.border = first_wrong_border(ranks, reference, relations.CLOSE[found.lane])
    plan, lane = case.plan(), found.lane
    true = reference.steps[0].tensors[GRADIENT]
    got, right = relations.gather(ranks, true), relations.laid_out(ranks, true)
    close = relations.CLOSE[lane]
    wrong = {name: each for name, each in got.items() if relative_error(each, right[name]) > close}
    found.stages = sorted({rank.place["pp"] for rank in ranks for name in wrong if _holds(rank, name)})
    if not wrong:
        return
    sizes = relations.sizes_of(plan.layout, plan.batch, ranks[0].steps[0].loss_scale)
    factors = {name: relations.factor_of(each, right[name]) for name, each in wrong.items()}
    if all(left <= close for _, left in factors.values()):
        found.relation = _of_factors({name: r for name, (r, _) in factors.items()}, sizes, close, ranks, reference)
        return
    parts = [
        {name: each * reference.clip for name, each in relations.laid_out(ranks, part).items() if name in wrong}
        for part in reference.parts
    ]
    shares, left = relations.shares_of(wrong, parts)
    found.relation = relations.name_of_shares(shares, reference, plan.layout.dp, close) if left <= close else ""
    if not found.relation:
        found.relation = _copies(ranks, wrong, close) or "no sum of the micro-batches' gradients"


def _holds(rank: Observed, name: str) -> bool:
    return any(piece.name == name and piece.values.numel() for piece in rank.steps[0].tensors.get(GRADIENT, []))


def _of_factors(
    factors: dict[str, float], sizes: dict[str, float], close: float, ranks: list[Observed], reference: Reference
) -> str:
    """One factor for all, or by stage."""
    values = list(factors.values())
    if max(values) - min(values) <= 10 * close * abs(values[0]):
        name = relations.name_of_factor(values[0], sizes, close)
        got, true = ranks[0].steps[0].norm, reference.steps[0].norm
        is_clipped = got and reference.clip < 1.0 and abs(got / true - 1) > 1e-12
        if is_clipped and abs(values[0] - true / got) <= 10 * close * true / got:
            return f"{name}: clipped by a wrong norm, {got:.6g} where it is {true:.6g}"
        return name
    by_stage: dict[int, set[str]] = {}
    for name, r in factors.items():
        for rank in ranks:
            if _holds(rank, name):
                by_stage.setdefault(rank.place["pp"], set()).add(
                    relations.name_of_factor(r, sizes, 10 * close) or "right"
                )
    return "; ".join(
        f"pipeline rank {stage}: {', '.join(sorted(words)[:4])}" for stage, words in sorted(by_stage.items())
    )


def _copies(ranks: list[Observed], wrong: Iterable[str], close: float) -> str:
    """Whether ranks that hold the same parameter have different gradients of it."""
    for name in wrong:
        squares: dict[str, dict[int, float]] = {"pp": {}, "dp": {}, "tp": {}}
        for rank in (each for each in ranks if _holds(each, name)):
            square = sum(float(p.values.square().sum()) for p in rank.steps[0].tensors[GRADIENT] if p.name == name)
            whole = all(p.start == 0 and p.tp_size == 1 for p in rank.steps[0].tensors[GRADIENT] if p.name == name)
            for axis, by_rank in squares.items() if whole else ():
                by_rank[rank.place[axis]] = square
        for axis, by_rank in squares.items():
            if len(by_rank) > 1 and max(by_rank.values()) - min(by_rank.values()) > close * max(by_rank.values()):
                return f"{axis} ranks {sorted(by_rank)} have different gradients of {name}: they were not summed"
    return ""


# --- the first wrong tensor at a border ------------------------------------------------------------------------------


def first_wrong_border(ranks: list[Observed], reference: Reference, close: float) -> str:
    """Describe the first wrong tensor at a border, in the order of a step; empty if there is no border."""
    crossings = [crossing for rank in ranks for crossing in rank.crossings if _true(reference, crossing) is not None]
    if not crossings:
        return ""
    for crossing in sorted(crossings, key=_order):
        true = _true(reference, crossing)
        assert true is not None
        distance = float((crossing.values - true).norm()) / max(float(true.norm()), 1e-300)
        if not distance <= close:
            r, left = relations.factor_of(crossing.values, true)
            kind = "gradient" if crossing.is_gradient else "activation"
            return (
                f"in the {'backward' if crossing.is_gradient else 'forward'}: the {kind} of micro-batch"
                f" {crossing.microbatch} that stage {crossing.stage} {crossing.way}, at the border after"
                f" {crossing.after}, is {f'x {r:.6g}' if r and left <= close else f'off by {distance:.1e}'}"
            )
    return "activations and gradients at the borders of stages are right: inside a stage, or after the backward"


def _order(crossing: Crossing) -> tuple[Any, ...]:
    """Sort key of a step: forwards from the first stage, then backwards from the last; sent, then received."""
    at = crossing.stage if not crossing.is_gradient else -crossing.stage
    return crossing.is_gradient, at + 0.5 * (crossing.way == SENT), crossing.microbatch


def _true(reference: Reference, crossing: Crossing) -> torch.Tensor | None:
    if crossing.microbatch >= len(reference.layers):
        return None
    tensors = reference.layers[crossing.microbatch].get(crossing.after, [])
    if len(tensors) <= crossing.is_gradient:
        return None
    true = tensors[crossing.is_gradient].chunk(crossing.parts)[crossing.part]
    return true if true.shape == crossing.values.shape else None


# --- the axes ---------------------------------------------------------------------------------------------------------


_IMPLIED_BY = {"micro-batches": "ga", "backend": "sync"}
"""An axis without which another that is needed cannot be."""


def _smallest(verifier: Verifier, case: Case, lane: Lane, found: Diagnosis) -> Case:
    """Remove every axis that the failure does not need; add those that it needs to `found`."""
    for name, remove in AXES.items():
        without = remove(case)
        if without is None or not without.is_legal() or _IMPLIED_BY.get(name) in found.axes:
            continue
        verifier.progress(f"without {name}")
        if _fails(verifier, without, lane):
            case = without
        else:
            found.axes.append(name)
    return case


def _fails(verifier: Verifier, case: Case, lane: Lane) -> bool:
    """Whether the case still fails by its numbers. A case whose ranks end early does not count."""
    try:
        references = verifier.references(case, ["fp64", lane])
        if any(reference.problem for reference in references.values()):
            return False
        return not verifier.compared(case, lane, references).ok
    except (RanksFailed, ConfigError):
        return False
