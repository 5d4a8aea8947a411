"""Proof on a user's own model, data and layout that the accumulated step is the step of the one big batch.

| module | holds |
| --- | --- |
| `case` | a model, a layout and data, small enough to be handed to ranks |
| `reference` | one process, the whole batch, float64 |
| `observe` | the accumulated step on a rank of a layout |
| `compare` | every number of both, beside what rounding explains |
| `verdict` | starts the ranks; pass, fail, or why nothing can be verified |
| `axes`, `relations`, `localise` | where a wrong step goes wrong |
| `own_data` | the first samples of a configuration's data |
| `shrink` | a configuration as a case that fits on one machine |
| `borders` | what crosses the borders of stages |
| `launched` | ranks that a launcher started |
| `at_start` | two splits of a run's first step, on its own ranks |
| `bank` | documented mistakes, to be made on purpose |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.lab.verification.verdict import Verdict


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
    """Prove that the accumulated step of a model of the user's own is the step of the one big batch.

    Starts the plan's ranks (at most 8) on this machine and one process for the reference, under
    `if __name__ == "__main__":`; in a program that a launcher started (torchrun, deepspeed), its ranks are those of the
    plan, and each returns the verdict. `build`, `forward_step_func`, `data` and `optimizer` are functions at the top
    level of a module, or objects that can be pickled.

    Args:
        plan: the layout, `Plan.of(..., world_size=ranks)`; its precision is what is verified, beside float64 and FP32.
        build: `(stage, stages) -> chunk`; `build(0, 1)` is the whole model. Weights have to be the same whatever the
            number of stages; they are compared.
        forward_step_func: as `initialize` takes it.
        data: the micro-batches of a step, over all data-parallel ranks, as a list or a function of the step from 0.
            Number i of data-parallel rank r is i * dp + r. Dicts of tensors with one number of rows also go through the
            model as one batch.
        optimizer: makes a torch optimizer of a list of parameters; default: AdamW by the plan's `optimizer` section.
        reports: as `initialize` takes it.
        steps: optimizer steps.
        verbose: print what is under way, and the report.

    Returns the verdict: `ok`, `exit_code`, `comparisons`, `problem` (why it cannot be verified). Raises ConfigError
    where the plan has more than 8 ranks."""
    api = importlib.import_module("megaaccum.lab.verification.user_model")
    verdict: Verdict = api.verify(
        plan, build, forward_step_func, data, optimizer=optimizer, reports=reports, steps=steps, verbose=verbose
    )
    return verdict
