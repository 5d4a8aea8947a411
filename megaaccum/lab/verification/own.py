"""`megaaccum.verify`: the verification of a model of a user's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megaaccum.config import Plan
from megaaccum.config.keys import all_keys, value
from megaaccum.errors import ConfigError
from megaaccum.lab.verification import launched, localise, report
from megaaccum.lab.verification.case import Case, OwnModel
from megaaccum.lab.verification.shrink import MOST_RANKS
from megaaccum.lab.verification.verdict import Progress, Verdict, Verifier


def verify(
    plan: Plan,
    build: Callable[[int, int], Any],
    forward_step_func: Callable[..., Any],
    data: Callable[[int], list[Any]] | Sequence[Any],
    *,
    optimizer: Callable[[list[Any]], Any] | None,
    reports: Mapping[str, str] | None,
    steps: int,
    verbose: bool,
) -> Verdict:
    """See `megaaccum.verify`."""
    if plan.layout.world_size > MOST_RANKS and launched.num_ranks() == 1:
        raise ConfigError(
            f"the plan has {plan.layout.world_size} ranks, and at most {MOST_RANKS} are started on one machine: give"
            f" verify a"
            " plan with each axis at 2 (world_size=8 or less), or start its ranks by torchrun"
        )
    own = OwnModel(
        build=build, forward_step_func=forward_step_func, data=data if callable(data) else list(data),
        optimizer=optimizer, reports=dict(reports or {}),
    )  # fmt: skip
    verbose = verbose and launched.is_first()
    progress = to_stderr() if verbose else (lambda text: None)
    verdict = run(case_of(plan, own), steps, progress)
    if verbose:
        print(report.text(verdict))
    return verdict


def run(case: Case, steps: int, progress: Progress) -> Verdict:
    """Verify a case, and where it fails look for the place; under a launcher on its ranks, which all get the
    verdict."""

    def verify(observe: launched.Observe | None = None) -> Verdict:
        verifier = Verifier(steps, progress, observe)
        verdict = verifier.verify(case)
        if not verdict.ok and not verdict.problem:
            verdict.diagnosis = localise.diagnose(verifier, verdict, progress)
        return verdict

    return verify() if launched.num_ranks() == 1 else launched.together(case, verify)


def case_of(plan: Plan, own: OwnModel) -> Case:
    """A case with the keys that the plan was made of."""
    assert plan.written is not None
    keys = {name: value(plan.written, name) for name in all_keys() if name in plan.written.origin}
    if own.optimizer is None and not keys.get("lr"):
        keys |= {"lr": 1e-2}
    keys |= {"adam_eps": keys.get("adam_eps", 1e-2)}
    left = {name: each for name, each in keys.items() if each is not None}
    return Case(keys=left, megatron=dict(plan.config.megatron), world_size=plan.layout.world_size, own=own)


def to_stderr() -> Progress:
    """Reports what is under way, with the seconds since the start."""
    begun = time.monotonic()

    def note(text: str) -> None:
        print(f"verify: {time.monotonic() - begun:5.1f} s  {text}", file=sys.stderr, flush=True)

    return note
