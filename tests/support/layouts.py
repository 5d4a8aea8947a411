"""Steps of one model under many layouts, and what has to be the same to the bit in all of them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.layouts import digest, gathered, state_of
from tests.support.parity import Case, Rig

MODEL = "--num_layers 4 --attention_dropout 0.1 --hidden_dropout 0.1 --clip_grad 0.5 --lr 1e-2 --global_batch_size 16 "


@dataclass(frozen=True)
class Outcome:
    """Losses and norms of the steps, and digests of the last gradient and of weights and moments."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradient: str
    state: str


def outcome(case: Case, steps: int) -> Outcome:
    """Of `steps` steps of `case`, the last of which leaves the weights; the same on every rank."""
    rig = Rig.of(case)
    size = rig.plan.batch.global_batch_size
    results = [rig.train(step, first=step * size) for step in range(1, steps)]
    gradient, last = rig.watched(rig.microbatches(steps * size), step=steps)
    return Outcome(
        losses=tuple(each.loss for each in (*results, last)),
        norms=tuple(each.grad_norm for each in (*results, last)),
        gradient=digest(gathered({name: [(0, part.view(-1))] for name, part in gradient.parts.items()})),
        state=digest(state_of(rig.backend)),
    )


def outcomes(cases: list[Case], steps: int) -> list[Outcome]:
    return [outcome(case, steps) for case in cases]
