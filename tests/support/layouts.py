"""Steps of one model under many layouts, and what has to be the same to the bit in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.layouts import cuts_of, digest, gathered, state_of
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import VOCAB, Case, Gradient, Rig

if TYPE_CHECKING:
    from megaaccum.sharding import ShardingBackend

MODEL = "--num_layers 4 --attention_dropout 0.1 --hidden_dropout 0.1 --clip_grad 0.5 --lr 1e-2 --global_batch_size 16 "


OWN = "--attention_dropout 0 "
"""Flags of a case whose model is benchmarks/own_model, which has its own dropout."""


@dataclass(frozen=True)
class Outcome:
    """Losses and norms of the steps, and digests of the last gradient and of weights and moments."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradient: str
    state: str


def outcome(case: Case, steps: int) -> Outcome:
    """On rank 0: the outcome of `steps` steps of `case`, with the weights after the last. Collective."""
    rig = own_rig(case) if OWN in case.model else Rig.of(case)
    size = rig.plan.batch.global_batch_size
    results = [rig.train(step, first=step * size) for step in range(1, steps)]
    gradient, last = rig.watched(rig.microbatches(steps * size), step=steps)
    results.append(last)
    return outcome_of([each.loss for each in results], [each.grad_norm for each in results], gradient, rig.backend)


def own_rig(case: Case) -> Rig:
    """A rank of the model of benchmarks/own_model. Collective."""
    from benchmarks import own_model
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize

    plan = case.plan()
    groups.destroy()
    engine = initialize(plan, own_model.build_stages(plan, VOCAB), forward_step_func=own_model.forward_step)
    return Rig(case, plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)


def outcome_of(losses: list[float], norms: list[float], gradient: Gradient, backend: ShardingBackend) -> Outcome:
    """The outcome of steps with these losses and norms, the last of which had `gradient`."""
    return Outcome(
        losses=tuple(losses),
        norms=tuple(norms),
        gradient=digest(
            gathered({name: [(0, part.reshape(-1))] for name, part in gradient.parts.items()}, cuts_of(backend))
        ),
        state=digest(state_of(backend)),
    )


def outcomes(cases: list[Case], steps: int) -> list[Outcome]:
    return [outcome(case, steps) for case in cases]


def outcomes_by_case(starts: Sequence[tuple[int, list[Case]]], steps: int) -> dict[Case, Outcome]:
    """The outcome of each case. starts: numbers of ranks, and the cases that one start of them takes."""
    found: dict[Case, Outcome] = {}
    for ranks, cases in starts:
        found |= zip(cases, run_ranks(outcomes, ranks, cases, steps, timeout=60 + 10 * len(cases))[0], strict=True)
    return found
