"""Forwards alone: what the loss functions return, without gradients or dropout.

Functions on a TrainStep, whose open step stays as it is. Collective over the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaaccum.distributed.sums import sums_over_ranks
from megaaccum.errors import MegaaccumError
from megaaccum.step import call_agreement, world_sums
from megaaccum.step.loss import Divisor, Tally, spread_over_batch
from megaaccum.step.microbatches import Microbatches, OpenStep
from megaaccum.step.train_step import TrainStep


def forward(steps: TrainStep, batch: Microbatches) -> Tally:
    """The loss functions' values of `batch`; empty but on ranks of the last stage."""
    steps.drop_begun()
    batch = call_agreement.with_lengths(batch, steps.plan, steps.groups.pp)
    steps.backend.gather()
    before = steps.fp8.snapshot()  # largest values are noted in every forward, and these are not the training's
    if steps.opened is None:  # the open step's flushes share one copy of each weight
        steps.fp8.begin_attempt()
    training = [module for chunk in steps.chunks for module in chunk.modules() if module.training]
    for chunk in steps.chunks:
        chunk.eval()
    evaluation = OpenStep(0, lambda: None, tally=Tally(spread_over_batch(steps.plan, steps.groups, len(batch))))
    # A rank that fails continues, so that the others reach the end, unless they wait for it inside a forward.
    layout, streams = steps.plan.layout, steps.backend.streamed_modules()
    evaluation.tally.keeps_errors = layout.tp == layout.cp == layout.ep == 1 and not streams
    evaluation.divisor = Divisor.known(1.0, reduction_divisor=1)
    try:
        with torch.no_grad():
            steps.flush(evaluation, batch, reduce=True, forward_only=True)
    finally:
        for module in training:  # a part that is frozen may be evaluated in training too
            module.training = True
        steps.fp8.restore(before)
        if steps.opened is None:
            steps.backend.drop_gathered()
    call_agreement.on_call("the end of a forward", steps, problem=evaluation.tally.problem)
    return evaluation.tally


def evaluate(
    steps: TrainStep, microbatches: Sequence[Any], problem: MegaaccumError | None = None
) -> tuple[float, float]:
    """(mean loss, weight) of one global batch; the same on every rank. A `problem` of any rank is raised on every rank,
    and StepError for weights that are negative or not finite."""
    tally = forward(steps, steps.agreed_batch("evaluate", problem, microbatches))
    total, weight, bad = sums_over_ranks(world_sums.counted(steps.groups, [*tally.sums(), tally.faults()[0]]))
    world_sums.refuse_weights(bad)
    return total / (weight or 1.0), weight
