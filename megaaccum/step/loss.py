"""The one place that divides the loss.

The schedules are told to divide nothing (`calculate_per_token_loss`), DeepSpeed's accumulation is 1, and data-parallel
averaging is taken back here. So the gradient of a step is

    loss_norm token:       sum over all unmasked tokens of d loss_token, divided by their number in the whole step
    loss_norm microbatch:  mean over all ga * pp_microbatches * dp micro-batches of d (mean loss of the micro-batch)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaaccum.distributed import cpu

if TYPE_CHECKING:
    from megaaccum.config.batch import BatchPlan
    from megaaccum.distributed.groups import Groups


class StepLoss:
    """The divisor of one step, fixed before its first backward.

    masks: loss mask of each of this rank's micro-batches, [micro_batch_size, seq_length], whole sequences also under
    context parallelism, 1 where a token counts; on the CPU. Collective over dp: one all-reduce of two integers.
    `reduction_divisor`: by how much the backend's reduction divides the sum over ranks. `dummies`: indices of this
    rank's micro-batches that stand for none; no token of theirs may be unmasked, and they count in no mean.

    `num_tokens` is the number of unmasked tokens of the step over all ranks. A step without any has no gradient;
    its divisor is 1, so that it is zero rather than not a number.
    """

    def __init__(
        self,
        masks: Sequence[torch.Tensor],
        *,
        batch: BatchPlan,
        groups: Groups,
        reduction_divisor: int,
        dummies: Collection[int] = (),
    ):
        self._per_token = batch.loss_norm == "token"
        self.num_microbatches = len(masks)
        self._counts = torch.stack([mask.count_nonzero() for mask in masks])
        self.dummies = frozenset(dummies)
        assert not any(self._counts[index] for index in self.dummies), "a dummy micro-batch has no tokens"
        total = torch.tensor([int(self._counts.sum()), len(masks) - len(self.dummies)]).to(_device())
        dist.all_reduce(total, group=groups.dp)
        self.num_tokens, real_microbatches = total.tolist()
        self._loss_microbatches = max(real_microbatches, 1)
        divisor = max(self.num_tokens, 1) if self._per_token else self._loss_microbatches
        self._scale = reduction_divisor / divisor

    def of_microbatch(self, index: int):
        """The `loss_func` that Megatron's schedule calls with the model's output of micro-batch `index`:
        per-token losses [micro_batch_size, seq_length] -> (loss to differentiate, tokens, what is reported)."""
        return partial(self._loss, index)

    def _loss(self, index: int, mask: torch.Tensor, output: torch.Tensor):
        # Half precision would lose the sum; float64 stays what it is.
        losses = output if output.dtype is torch.float64 else output.float()
        total = (losses.view(-1) * mask.reshape(-1).to(losses.dtype)).sum()
        weight = 1.0 if self._per_token else 1.0 / max(int(self._counts[index]), 1)
        # Cloned: what is reported must not change if somebody scales the loss in place.
        report = (total.detach() * weight).clone()
        return total * (weight * self._scale), torch.zeros((), dtype=torch.int, device=output.device), report

    def aux_scale(self, rows: int) -> float:
        """Scale of an auxiliary loss (MoE load balancing, z) so that its coefficient means the same at any split: the
        mean over all micro-batches of the step. For a dummy micro-batch it is 0 instead.

        rows: tokens of a whole micro-batch, masked ones included. Megatron multiplies the loss by the tokens that this
        rank's router sees and by the ranks of tp x cp that share the rest, where the schedule does not divide
        (megatron-core 0.19: TopKRouter.attach_and_log_load_balancing_loss).
        """
        return (
            self._scale
            * (max(self.num_tokens, 1) if self._per_token else self._loss_microbatches)
            / (self._loss_microbatches * rows)
        )

    @property
    def scale(self) -> float:
        """What a sum of per-token losses is multiplied by (multi-token prediction takes the same)."""
        return self._scale

    def share(self, reports: Sequence[torch.Tensor], groups: Groups) -> torch.Tensor:
        """What this rank adds to the sum of the step's losses over the world, a float64 scalar: `reports` are those
        that the last stage's schedule returned (elsewhere empty). Ranks of one tp group have the same; the first
        counts."""
        if not reports or groups.tp.rank() != 0:
            return torch.zeros((), dtype=torch.float64, device=_device())
        return torch.stack([report.double() for report in reports]).sum()

    def mean(self, total: float) -> float:
        """The step's loss as a user reads it. total: sum of all ranks' `share`."""
        return total / (max(self.num_tokens, 1) if self._per_token else self._loss_microbatches)


def _device() -> torch.device:
    return cpu.device()
