"""Runs a case in its precisions and says whether its steps are those of the big batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megaaccum.errors import ConfigError
from megaaccum.lab.verification import on_ranks
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.compare import Comparison, compare
from megaaccum.lab.verification.launched import Observe, num_ranks
from megaaccum.lab.verification.records import Observed, Truth
from megaaccum.lab.verification.testing.ranks import RanksFailed, run_ranks

if TYPE_CHECKING:
    from megaaccum.lab.verification.localise import Diagnosis

PASSED, FAILED, CANNOT = 0, 1, 3
"""Exit codes; 2 is a configuration that is refused."""
SECONDS = 120.0
"""Limit for one start of ranks."""
_ORDER: tuple[Lane, ...] = ("fp64", "fp32", "bf16", "fp16")

Progress = Callable[[str], None]


@dataclass(slots=True)
class Verdict:
    """The outcome of a verification. comparisons: one per precision. problem: why nothing can be verified. failure: how
    ranks ended that did not take their steps. notes: for the reader."""

    case: Case
    steps: int
    comparisons: list[Comparison] = field(default_factory=list)
    problem: str = ""
    failure: str = ""
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problem and not self.failure and all(each.ok for each in self.comparisons)

    @property
    def exit_code(self) -> int:
        return CANNOT if self.problem else PASSED if self.ok else FAILED


class Verifier:
    """Starts ranks for cases. Truths are kept, because many layouts have one. launched: observes on ranks that a
    launcher has started, as many as there are; default: every case's ranks are started here."""

    def __init__(self, steps: int = 2, progress: Progress | None = None, launched: Observe | None = None):
        self.steps, self._launched = steps, launched
        self._progress = progress or (lambda text: None)
        self._truths: dict[str, Truth] = {}

    def verify(self, case: Case, lanes: Sequence[Lane] | None = None) -> Verdict:
        """Compare each precision; default: float64 where the layout allows it, FP32, and the configured one. Raises
        ConfigError where the layout is not legal."""
        begun = time.monotonic()
        case.plan()
        lanes = lanes_of(case) if lanes is None else lanes
        verdict = Verdict(case, self.steps)
        truths = self.truths(case, ["fp64", *lanes])
        verdict.problem = next((truth.problem for truth in truths.values() if truth.problem), "")
        if not verdict.problem:
            verdict.notes = list(truths["fp64"].notes)
            self._compare(verdict, truths, lanes)
        verdict.seconds = time.monotonic() - begun
        return verdict

    def _compare(self, verdict: Verdict, truths: dict[Lane, Truth], lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            case = verdict.case.in_lane(lane)
            plan = case.plan()
            self._progress(f"{case.world_size} ranks, {lane} over {plan.config.sharding.backend}")
            try:
                ranks = self.observe(case)
            except ConfigError as error:
                verdict.problem = str(error)
                return
            except RanksFailed as error:
                verdict.problem, verdict.failure = (
                    ("", _short(error)) if not _is_refusal(error) else (_short(error), "")
                )
                return
            summands = plan.batch.num_microbatches * plan.layout.dp
            verdict.comparisons.append(compare(lane, ranks, truths["fp64"], truths[lane], summands=summands))

    def observe(self, case: Case, *, at_borders: bool = False) -> list[Observed]:
        """The steps of a layout on its ranks. Raises RanksFailed, or ConfigError where launched ranks refuse it."""
        if self._launched is not None and case.world_size == num_ranks():
            return self._launched(case, self.steps, at_borders)
        found: list[Observed] = run_ranks(
            on_ranks.observed, case.world_size, case, self.steps, at_borders, timeout=SECONDS
        )
        return found

    def truths(self, case: Case, lanes: Sequence[Lane], *, keep_parts: bool = False) -> dict[Lane, Truth]:
        """One process' steps in each precision."""
        keys = {lane: _key(case, lane, self.steps, keep_parts) for lane in lanes}
        missing = [lane for lane in _ORDER if lane in lanes and keys[lane] not in self._truths]
        if missing:
            self._progress(f"one process in {', '.join(missing)}")
            for lane, truth in zip(missing, self._run_truths(case, missing, keep_parts), strict=True):
                self._truths[keys[lane]] = truth
        return {lane: self._truths[keys[lane]] for lane in lanes}

    def _run_truths(self, case: Case, lanes: list[Lane], keep_parts: bool) -> list[Truth]:
        plain = replace(case, mistake="")
        try:
            found: list[Truth] = run_ranks(on_ranks.truths, 1, plain, lanes, self.steps, keep_parts, timeout=SECONDS)[0]
            return found
        except RanksFailed as error:
            killed = any(outcome.status == -9 and not outcome.ended_by_harness for outcome in error.outcomes)
            why = "one process does not hold the model: it was ended for its memory" if killed else _short(error)
            return [Truth({}, problem=why) for _ in lanes]


def lanes_of(case: Case) -> list[Lane]:
    """Float64 for the mathematics, FP32 through the configured backend, and the configured precision."""
    lanes: list[Lane] = ["fp64"] if case.in_lane("fp64").is_legal() else []
    if case.keys.get("backend") != "ddp" or case.lane == "fp32":
        lanes.append("fp32")
    own = case.lane
    if own not in lanes and not (own in ("bf16", "fp16") and case.keys.get("num_experts")):
        lanes.append(own)
    return lanes


def _key(case: Case, lane: Lane, steps: int, keep_parts: bool) -> str:
    """Equal for cases of which one process does the same."""
    plan, alone = case.plan(), case.one_process(lane)
    count = plan.batch.num_microbatches * plan.layout.dp
    scale = asdict(plan.config.step) if lane == "fp16" else {}
    facts: list[Any] = [
        alone.facts(),
        count,
        lane,
        steps,
        keep_parts,
        case.masks,
        case.overflow,
        id(case.own),
        id(case.samples),
        scale,
    ]
    return json.dumps(facts, sort_keys=True, default=str)


def _is_refusal(error: RanksFailed) -> bool:
    """Whether every rank said that the configuration cannot be honoured here."""
    kinds = [outcome.error.kind for outcome in error.outcomes if outcome.error is not None]
    return bool(kinds) and len(kinds) == len(error.outcomes) and set(kinds) == {"ConfigError"}


def _short(error: RanksFailed) -> str:
    """The first rank's error, or what the harness says."""
    failed = sorted((each for each in error.outcomes if each.failed), key=lambda each: each.order)
    for outcome in failed:
        if outcome.error is not None:
            return f"rank {outcome.rank}: {outcome.error.kind}: {outcome.error.text}"
    return str(error).splitlines()[0]
