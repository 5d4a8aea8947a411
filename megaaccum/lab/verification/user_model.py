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
    optimizer: Callable[[list[Any]], Any] | None = None,
    reports: Mapping[str, str] | None = None,
    steps: int = 2,
    verbose: bool = True,
) -> Verdict:
    """Prove that the accumulated step of a user's model is exactly the step on the full global batch.

    Starts the plan's ranks (at most 8) and one process for the reference on this machine, under
    `if __name__ == "__main__":`. In a program that a launcher started (torchrun, deepspeed), the launcher's ranks are
    the plan's, and each returns the verdict. `build`, `forward_step_func`, `data` and `optimizer` are functions at the
    top level of a module, or objects that can be pickled.

    Args:
        plan: the layout, `Plan.of(..., world_size=ranks)`; its precision is what is verified, beside float64 and FP32.
        build: `(stage, stages) -> chunk`; `build(0, 1)` is the whole model. Weights must not depend on the number of
            stages; they are compared.
        forward_step_func: as `initialize` takes it.
        data: the micro-batches of a step, over all data-parallel ranks, as a list or a function of the step from 0.
            Number i of data-parallel rank r is i * dp + r. Dicts of tensors with one number of rows also go through the
            model as one batch.
        optimizer: makes a torch optimizer of a list of parameters; default: AdamW by the plan's `optimizer` section.
        reports: as `initialize` takes it.
        steps: optimizer steps.
        verbose: print what is under way, and the report.

    Returns the verdict: `ok`, `exit_code`, `comparisons`, `problem` (the reason why it cannot be verified). Raises
    ConfigError if the plan has more than 8 ranks and no launcher started them."""
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
            verdict.diagnosis = localise.diagnose(verifier, verdict)
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
