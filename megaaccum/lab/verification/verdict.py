"""Runs a case in its precisions and decides whether its steps are those of the full global batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megaaccum.errors import ConfigError
from megaaccum.lab.verification import on_ranks
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.compare import Comparison, alone, compare
from megaaccum.lab.verification.records import Observed, Reference
from megaaccum.lab.verification.testing.ranks import RanksFailed, run_ranks

if TYPE_CHECKING:
    from megaaccum.lab.verification.localise import Diagnosis

PASSED, FAILED, CANNOT = 0, 1, 3
"""Exit codes; 2 is a configuration that is refused."""
_ORDER: tuple[Lane, ...] = ("fp64", "fp32", "bf16", "fp16")

Progress = Callable[[str], None]
Observe = Callable[[Case, int, bool], list[Observed]]
"""(case, steps, at borders) -> the steps as each rank of the layout observed them. Raises RanksFailed, or ConfigError
if the ranks refuse the case."""


@dataclass(slots=True)
class Verdict:
    """The outcome of a verification.

    comparisons: one per precision. problem: why nothing can be verified. failure: how ranks ended that did not take
    their steps. notes: remarks for the reader."""

    case: Case
    steps: int
    comparisons: list[Comparison] = field(default_factory=list)
    problem: str = ""
    failure: str = ""
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __repr__(self) -> str:
        """The layout and the outcome in two lines; `verify(verbose=True)` prints the whole report."""
        return f"{self.layout}\n{self.conclusion}"

    @property
    def layout(self) -> str:
        """The layout in a line."""
        plan = self.case.plan()
        batch = plan.batch
        return (
            f"{repr(plan).splitlines()[0]}, {batch.grad_accum_steps} x {batch.pp_microbatches} micro-batches of"
            f" {batch.micro_batch_size} x {batch.seq_length} tokens"
        )

    @property
    def conclusion(self) -> str:
        """The outcome in a line."""
        if self.problem:
            return f"Cannot be verified because {self.problem}."
        if self.failure:
            return f"FAIL: the accumulated step did not end: {self.failure}"
        seconds = f"in {self.seconds:.0f} s"
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        if self.ok:
            numbers = sum(len(each.rows) for each in self.comparisons)
            within = "all within rounding of one process on the whole batch"
            return f"PASS: {steps}, {numbers} comparisons, {within} ({seconds})"
        failed = sum(len(each.failed) for each in self.comparisons)
        return f"FAIL: {failed} numbers of {steps} are farther from one process than rounding explains ({seconds})"

    @property
    def ok(self) -> bool:
        return not self.problem and not self.failure and all(each.ok for each in self.comparisons)

    @property
    def exit_code(self) -> int:
        if self.problem:
            return CANNOT
        return PASSED if self.ok else FAILED


@dataclass
class Verifier:
    """Verifies cases.

    steps: optimizer steps of each case. progress: called with a line on each start of ranks. observing: takes a case's
    steps on its ranks; default: starts them on this machine. known: steps of one process, by what they depend on; new
    ones are added. Many layouts of a model share one.
    """

    steps: int = 2
    progress: Progress = lambda text: None
    observing: Observe = on_ranks.start_and_observe
    known: dict[str, Reference] = field(default_factory=dict)

    def verify(self, case: Case, lanes: Sequence[Lane] | None = None) -> Verdict:
        """Compare each precision; default: float64 if the layout allows it, FP32, and the configured one. Raises
        ConfigError if the layout is not legal."""
        begun = time.monotonic()
        case.plan()
        lanes = lanes_of(case) if lanes is None else lanes
        verdict = Verdict(case, self.steps)
        references = self.references(case, ["fp64", *lanes])
        verdict.problem = next((each.problem for each in references.values() if each.problem), "")
        if not verdict.problem:
            verdict.notes = list(references["fp64"].notes)
            self._compare(verdict, references, lanes)
        verdict.seconds = time.monotonic() - begun
        return verdict

    def _compare(self, verdict: Verdict, references: dict[Lane, Reference], lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            case = verdict.case.in_lane(lane)
            self.progress(f"{case.world_size} ranks, {lane} over {case.plan().config.sharding.backend}")
            try:
                verdict.comparisons.append(self.compared(case, lane, references))
            except ConfigError as error:
                verdict.problem = str(error)
                return
            except RanksFailed as error:
                if _is_refusal(error):
                    verdict.problem = _short(error)
                else:
                    verdict.failure = _short(error)
                return

    def compared(self, case: Case, lane: Lane, references: dict[Lane, Reference]) -> Comparison:
        """Take the steps of a case, which is in the precision `lane`, and compare them. Raises as `observe`."""
        plan, exact, near = case.plan(), references["fp64"], references[lane]
        summands = plan.batch.num_microbatches * plan.layout.dp
        comparison = compare(lane, self.observe(case), exact, near, summands=summands)
        if case.device == "gpu":
            comparison.rows += alone(lane, exact, near)
        return comparison

    def observe(self, case: Case, *, at_borders: bool = False) -> list[Observed]:
        """The steps of a layout on its ranks. Raises RanksFailed, or ConfigError if launched ranks refuse it."""
        return self.observing(case, self.steps, at_borders)

    def references(self, case: Case, lanes: Sequence[Lane], *, keep_parts: bool = False) -> dict[Lane, Reference]:
        """The steps of one process in each precision."""
        keys = {lane: _key(case, lane, self.steps, keep_parts) for lane in lanes}
        missing = [lane for lane in _ORDER if lane in lanes and keys[lane] not in self.known]
        if missing:
            self.progress(f"one process in {', '.join(missing)}")
            for lane, reference in zip(missing, self._run_references(case, missing, keep_parts), strict=True):
                self.known[keys[lane]] = reference
        return {lane: self.known[keys[lane]] for lane in lanes}

    def _run_references(self, case: Case, lanes: list[Lane], keep_parts: bool) -> list[Reference]:
        try:
            start = on_ranks.start_of(case)
            (found,) = run_ranks(on_ranks.references, 1, case, lanes, self.steps, keep_parts, **start)
            return list(found)
        except RanksFailed as error:
            killed = any(outcome.status == -9 and not outcome.ended_by_harness for outcome in error.outcomes)
            why = "one process does not hold the model: it was ended for its memory" if killed else _short(error)
            return [Reference({}, problem=why) for _ in lanes]


def lanes_of(case: Case) -> list[Lane]:
    """Float64 for the mathematics, FP32 through the configured backend, and the configured precision; on a GPU BF16
    too, in which Transformer Engine's layers compute."""
    lanes: list[Lane] = ["fp64"] if case.in_lane("fp64").is_legal() else []
    if case.keys.get("backend") != "ddp" or case.lane == "fp32":
        lanes.append("fp32")
    wanted: list[Lane] = [case.lane, "bf16"] if case.device == "gpu" and case.lane != "fp16" else [case.lane]
    routes = bool(case.keys.get("num_experts"))  # to other experts, for a rounding of 16 bits
    return lanes + [each for each in dict.fromkeys(wanted) if each not in lanes and not (routes and each[2:] == "16")]


def _key(case: Case, lane: Lane, steps: int, keep_parts: bool) -> str:
    """A text that is equal for cases with the same reference."""
    plan, alone = case.plan(), case.one_process(lane)
    count = plan.batch.num_microbatches * plan.layout.dp
    scale = asdict(plan.config.step) if lane == "fp16" else {}
    data = [case.masks, case.overflow, id(case.user_model), id(case.samples)]
    facts: list[Any] = [alone.facts(), count, lane, steps, keep_parts, *data, scale]
    return json.dumps(facts, sort_keys=True, default=str)


def _is_refusal(error: RanksFailed) -> bool:
    """Whether every rank refused the configuration."""
    kinds = [outcome.error.kind for outcome in error.outcomes if outcome.error is not None]
    return bool(kinds) and len(kinds) == len(error.outcomes) and set(kinds) == {"ConfigError"}


def _short(error: RanksFailed) -> str:
    """The first rank's error, or the harness' message."""
    for outcome in sorted((each for each in error.outcomes if each.failed), key=lambda each: each.order):
        if outcome.error is not None:
            return f"rank {outcome.rank}: {outcome.error.kind}: {outcome.error.text}"
    return str(error).splitlines()[0]
