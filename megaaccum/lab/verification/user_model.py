"""`megaaccum.verify`: verification of a user's model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megaaccum.config import Plan
from megaaccum.config.keys import all_keys, value
from megaaccum.errors import ConfigError
from megaaccum.lab.verification import launched, localise, on_ranks, report
from megaaccum.lab.verification.case import Case, UserModel
from megaaccum.lab.verification.shrink import MOST_RANKS
from megaaccum.lab.verification.verdict import Observe, Progress, Verdict, Verifier


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
            f"the plan has {plan.layout.world_size} ranks, but at most {MOST_RANKS} are started on one machine: give"
            " verify a plan with each axis at 2 (world_size=8 or less), or start its ranks by torchrun"
        )
    model = UserModel(
        build=build, forward_step_func=forward_step_func, data=data if callable(data) else list(data),
        optimizer=optimizer, reports=dict(reports or {}),
    )  # fmt: skip
    verbose = verbose and launched.is_first()
    progress = to_stderr() if verbose else (lambda text: None)
    verdict = run(case_of(plan, model), steps, progress)
    if verbose:
        print(report.text(verdict))
    return verdict


def run(case: Case, steps: int, progress: Progress) -> Verdict:
    """Verify a case and, if it fails, locate the failure. Under a launcher its ranks take the steps, and all receive
    the verdict."""

    def verify(observe: Observe = on_ranks.start_and_observe) -> Verdict:
        verifier = Verifier(steps, progress, observe)
        verdict = verifier.verify(case)
        if not verdict.ok and not verdict.problem:
            verdict.diagnosis = localise.diagnose(verifier, verdict, progress)
        return verdict

    return verify() if launched.num_ranks() == 1 else launched.together(case, verify)


def case_of(plan: Plan, model: UserModel) -> Case:
    """A case with the keys that the plan was made of."""
    assert plan.written is not None
    keys = {name: value(plan.written, name) for name in all_keys() if name in plan.written.origin}
    if model.optimizer is None and not keys.get("lr"):
        keys |= {"lr": 1e-2}
    keys |= {"adam_eps": keys.get("adam_eps", 1e-2)}
    kept = {name: each for name, each in keys.items() if each is not None}
    return Case(keys=kept, megatron=dict(plan.config.megatron), world_size=plan.layout.world_size, user_model=model)


def to_stderr() -> Progress:
    """A function that prints its text to stderr, with the seconds since this call."""
    begun = time.monotonic()

    def note(text: str) -> None:
        print(f"verify: {time.monotonic() - begun:5.1f} s  {text}", file=sys.stderr, flush=True)

    return note
