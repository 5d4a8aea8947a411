"""The sums of a step over all ranks: N (the weight, usually unmasked tokens) before it if the weights are known, and
after it, in the all-reduce of the norm, the loss, the reports, and N if it was not known.

Functions on a TrainStep and its OpenStep; `distributed/sums` makes the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from megaaccum.distributed.agreement import raise_together
from megaaccum.distributed.sums import post_sums, sums_over_ranks
from megaaccum.errors import StepError
from megaaccum.platform import cpu
from megaaccum.step.loss import Divisor, Tally, spread_over_batch
from megaaccum.step.recovery import Attempt

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.step.microbatches import Microbatches, OpenStep
    from megaaccum.step.train_step import TrainStep


# --- N ---


def divisor_of(
    steps: TrainStep, calls: Sequence[Microbatches], total: float | None = None, *, alone: bool
) -> Callable[[], Divisor]:
    """The divisor of a step; its weights are on their way until it is called. total: N if the caller knows it.
    alone: no further call is expected, so the weights of `calls` are all."""
    divide = partial(Divisor.known, reduction_divisor=steps.backend.reduction_divisor)
    if total is None and alone and len(calls) == 1:
        total = calls[0].total_weight
    if total is not None:
        return lambda: divide(total, steps.batch.num_microbatches * steps.groups.dp.size())
    weights = [each.weights for each in calls]
    if not alone or any(each is None for each in weights):
        return lambda: divisor_at_commit(steps, calls[0].expected)
    known = [weight for each in weights for weight in each or ()]
    count = sum(len(each) - len(each.dummies) for each in calls)
    spread = spread_over_batch(steps.plan, steps.groups, len(known))
    if steps.groups.collection.cp.rank():  # ranks of one cp group have the same sequences, and the first counts
        known, count = [0.0] * len(known), 0
    own = torch.tensor(math.fsum(known) if spread is None else known, dtype=torch.float64)
    parts = [own if spread is None else spread(own), torch.tensor(count, dtype=torch.float64)]
    # Over dp x cp, whose ranks reduce gradients too: a group of dp alone would cost NCCL another communicator.
    sums = post_sums(parts, steps.groups.dp_cp)

    def summed() -> Divisor:
        weight, num_microbatches = sums()
        return divide(weight, round(num_microbatches))

    return summed


def divisor_at_commit(steps: TrainStep, expected: float | None) -> Divisor:
    """The divisor of a step whose weight is not known before its end, which is about that of the last step, or as
    `expected` of each micro-batch."""
    nominal, batch = None, steps.batch
    if steps.recovery.scaler is not None:
        expected = expected or float(batch.micro_batch_size * batch.seq_length)
        nominal = (steps.transaction.last_weight or expected / batch.micro_batch_size) * batch.global_batch_size
    return Divisor.at_commit(reduction_divisor=steps.backend.reduction_divisor, nominal=nominal)


# --- at the end of a step ---


def counted(groups: Groups, sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's share of sums over the world: ranks of one tp group have the same, and the first counts."""
    return sums if groups.tp.rank() == 0 else [torch.zeros_like(each) for each in sums]


def own_sums(steps: TrainStep, opened: OpenStep) -> list[torch.Tensor]:
    """This rank's share of the loss, of N if that is not known yet, of the weights of balancing losses if there are
    experts, and of each report."""
    tally, groups = opened.tally, steps.groups
    sums = tally.sums() if opened.divisor.total is None else [tally.total(tally.losses)]
    if steps.plan.config.model.num_experts:
        # Ranks of a pipeline and of a cp group have the same micro-batches, and the first counts.
        is_first = groups.pp.rank() == groups.collection.cp.rank() == 0
        sums += [sums[0].new_full((), is_first * each) for each in steps.side_losses.weighed]
    noise = [] if steps.noise_scale is None else steps.noise_scale.own_sums(tally.weights)
    return [*noise, *counted(steps.groups, [*sums, *steps.reports.sums(tally)])]


def faults(steps: TrainStep, tally: Tally) -> list[torch.Tensor]:
    """[bad weights, 1 if there is a problem, 1 if reports have new names, zeroed elements] of this rank, float64
    scalars on its device."""
    zeroed = torch.zeros((), device=cpu.device()) if steps.recovery.zero is None else steps.recovery.zero.total()
    bad, problem = tally.faults()
    # Sums are those of the first ranks of tp; what another one alone gave wrongly would train its part by zeros.
    own = [bad / steps.groups.tp.size(), problem]
    parts = [*own, *counted(steps.groups, [steps.reports.unknown_names(tally)]), zeroed]
    return [part.to(cpu.device(), torch.float64) for part in parts]


def attempt_of(steps: TrainStep, opened: OpenStep, norm: float, sums: Sequence[float]) -> Attempt:
    """The attempt, from the norm and the sums over the world of each rank's `own_sums`."""
    count = 0 if steps.noise_scale is None else 2
    noise, (loss, *rest) = tuple(sums[:count]), sums[count:]
    weight = opened.divisor.total if opened.divisor.total is not None else rest.pop(0)
    if steps.plan.config.model.num_experts:
        steps.side_losses.compare(weight, rest.pop(0), rest.pop(0))
    factor = opened.divisor.at_end(weight) / steps.backend.loss_scale
    reports = steps.reports.reduced(rest)
    return Attempt(
        loss=loss / (weight or 1.0), weight=weight, norm=norm * factor, factor=factor, reports=reports, noise=noise
    )


def with_faults(steps: TrainStep, opened: OpenStep, attempt: Attempt) -> Attempt:
    """`attempt` with reports of new names, and zeroed elements. Raises a problem of any rank, and StepError for weights
    that are negative or not finite. Collective over the world."""
    tally = opened.tally
    bad, problem, unknown, zeroed = sums_over_ranks(faults(steps, tally))
    if problem:
        raise_together(tally.problem)
    refuse_weights(bad, "a weight that is negative or not finite, or a sum of losses without a gradient (detached, or"
                   " made under no_grad)")  # fmt: skip
    reports = attempt.reports
    if unknown:
        steps.reports.register(tally)
        reports = steps.reports.reduced(sums_over_ranks(counted(steps.groups, steps.reports.sums(tally))))
    return replace(attempt, reports=reports, num_zeroed=int(zeroed))


def refuse_weights(bad: float, why: str = "a weight that is negative or not finite") -> None:
    """Raise StepError if loss functions gave micro-batches, `bad` over all ranks, what cannot be a weight."""
    if bad:
        raise StepError(f"{math.ceil(bad)} micro-batches have {why}: fix the loss function").printed_once()


def noise_report(steps: TrainStep, verdict: Attempt) -> dict[str, float]:
    """The gradient noise scale, if it is asked for and the step counted."""
    if steps.noise_scale is None or verdict.skip:
        return {}
    factor, batch = verdict.factor / steps.backend.reduction_divisor, steps.batch.global_batch_size
    return steps.noise_scale.report(verdict.noise, norm=verdict.norm, weight=verdict.weight, factor=factor, batch=batch)
