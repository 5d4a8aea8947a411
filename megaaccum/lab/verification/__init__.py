"""Proof on a user's model, data and layout that the accumulated step is exactly the step on the full global batch.

| module | holds |
| --- | --- |
| `case` | a model, a layout and data, small enough to be pickled to ranks |
| `reference` | one process, the full global batch, float64 |
| `observe` | the accumulated step on a rank of a layout |
| `compare` | every number of both, and the error that rounding explains |
| `verdict` | pass, fail, or the reason why nothing can be verified |
| `on_ranks` | what ranks run |
| `user_model` | a model that a user wrote |
| `axes`, `relations`, `localise` | the place at which a wrong step goes wrong |
| `first_samples` | the first samples of a configuration's data |
| `shrink` | a configuration as a case that fits on one machine |
| `borders` | what crosses the borders of stages |
| `launched` | ranks that a launcher started |
| `at_start` | two splits of a run's first step, on the run's ranks |
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
    api = importlib.import_module("megaaccum.lab.verification.user_model")
    verdict: Verdict = api.verify(
        plan, build, forward_step_func, data, optimizer=optimizer, reports=reports, steps=steps, verbose=verbose
    )
    return verdict
