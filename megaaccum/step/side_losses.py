"""Losses that Megatron differentiates on the side, inside the backward: balancing and z losses of experts, and
multi-token prediction. Megatron has one scale for all micro-batches of each kind; here it is set per micro-batch.

A balancing loss is a mean over tokens, which Megatron (0.19: TopKRouter.attach_and_log_load_balancing_loss) multiplies
by the tokens that the router sees where the schedule does not divide. So that its coefficient means the same at any
split, micro-batch i counts with the weight W_i / N of the step:

    N known before the backward: W_i / N = 1 / micro-batches of the step, a mean over micro-batches
    else: W_i is the micro-batch's own weight where that is known in advance, `expected_tokens`, or its tokens, masked
          ones included, which is Megatron's own meaning under calculate_per_token_loss

Multi-token prediction is a sum over tokens, as the loss itself is, and so is the loss of a sparse attention's indexer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megaaccum.platform import cpu
from megaaccum.step.loss import Divisor
from megaaccum.step.microbatches import Microbatches
from megaaccum.upstream import megatron


class SideLosses:
    """Gives Megatron the scales of the side losses of `chunks`; does nothing where there are none."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._configs: list[Any] = [chunk.config for chunk in chunks]
        self._balances = any(getattr(config, "num_moe_experts", None) for config in self._configs)
        if self._balances:
            megatron.mend_padding_masks()
        self._weighs = any(
            getattr(config, name, 0) for config in self._configs for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        )
        self._predicts = any(getattr(config, "mtp_num_layers", None) for config in self._configs)
        self._indexes = "dsa" in (getattr(config, "experimental_attention_variant", "") for config in self._configs)
        if self._predicts and any(getattr(config, "context_parallel_size", 1) > 1 for config in self._configs):
            megatron.weigh_predictions_over_cp()
        self._divisor, self._loss_scale, self._mean_weight = Divisor.known(1.0, reduction_divisor=1), 1.0, 1.0
        self.weighed, self.note = (0.0, 0.0), ""
        """The sum of the weights by which this rank's micro-batches of the step count in balancing losses, and how many
        these are; by how much the coefficients of the step were off, empty if they were not."""
        self._scalars: dict[float, torch.Tensor] = {}
        self._batch: Microbatches | None = None

    @property
    def are_there(self) -> bool:
        """Whether the chunks have losses beside that of the last stage."""
        return self._balances or self._predicts or self._indexes

    def begin_attempt(self, divisor: Divisor, loss_scale: float) -> None:
        """Take the divisor and the loss scale of a step's backwards."""
        self._divisor, self._loss_scale = divisor, loss_scale
        self._mean_weight = (divisor.total or 1.0) / max(divisor.num_microbatches, 1)
        self.weighed, self.note = (0.0, 0.0), ""
        self._scalars.clear()
        # Megatron keeps the first scale that it is ever given, and copies later ones into it.
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, dtype=torch.float64, device=cpu.device())

    def begin_flush(self, batch: Microbatches) -> None:
        """Give Megatron the scales that most micro-batches of `batch` have: those of its first real one."""
        self._batch = batch if self.are_there else None
        if self._batch is None:
            return
        real = [index for index in range(len(batch)) if index not in batch.dummies]
        if self._weighs and torch.is_grad_enabled():
            self.weighed = self.weighed[0] + sum(self._weight(batch, i) for i in real), self.weighed[1] + len(real)
        first = next(iter(real), 0)
        balance = self._scalar(self.balance_scale(batch, first))
        prediction = self._scalar(self.prediction_scale(batch, first))
        for config in self._configs:
            config.moe_grad_scale_func = lambda: balance
            config.mtp_grad_scale_func = lambda: prediction
            if self._indexes:
                config.experimental_attention_variant_loss_scale_func = lambda _: self._scale_sums(prediction)
        MoEAuxLossAutoScaler.set_loss_scale(balance)  # a flush may go on with a backward
        self._scale_sums(prediction)

    def compare(self, total: float, weights: float, count: float) -> None:
        """Note by how much the coefficients of balancing and z losses were off in a step of weight `total`. weights,
        count: `weighed`, of the micro-batches of all ranks."""
        if count and total and abs(weights / total - 1) >= 0.01:
            self.note = (
                f"balancing and z losses weighed {weights / total:.3g} times their coefficients: give weights, or"
                " total_weight with as many micro-batches as planned, before the backward, or expected_tokens"
                f" {total / count:.4g}"
            )

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Set the scales of a micro-batch if they are not those of the others."""
        if self._batch is None or not self._batch.differ:
            return
        index = microbatch - self._batch.first
        MoEAuxLossAutoScaler.set_loss_scale(self._scalar(self.balance_scale(self._batch, index)))
        self._scale_sums(self._scalar(self.prediction_scale(self._batch, index)))

    def balance_scale(self, batch: Microbatches, index: int) -> float:
        """The factor on the experts' balancing and z losses of micro-batch `index`, which Megatron sums over
        tokens."""
        return self._factor(batch, index) * self._weight(batch, index) / max(batch.tokens[index], 1)

    def prediction_scale(self, batch: Microbatches, index: int) -> float:
        """The factor on the summed multi-token prediction loss of micro-batch `index`."""
        return self._factor(batch, index) * batch.token_weight(index)

    def _factor(self, batch: Microbatches, index: int) -> float:
        return 0.0 if index in batch.dummies else self._divisor.in_loss * self._loss_scale

    def _weight(self, batch: Microbatches, index: int) -> float:
        return batch.expected_weight(index) if self._divisor.total is None else self._mean_weight

    def _scale_sums(self, scale: torch.Tensor) -> None:
        """Set the scale of losses that are sums over tokens."""
        MTPLossAutoScaler.set_loss_scale(scale)
        if self._indexes:
            DSAIndexerLossAutoScaler.set_loss_scale(scale.clone())  # it copies later scales into the first

    def _scalar(self, value: float) -> torch.Tensor:
        """On the device, made once per step: Megatron copies a plain number over in every forward, which waits. In
        float64, since Megatron rounds to the precision of the loss."""
        if value not in self._scalars:
            self._scalars[value] = torch.full((), value, dtype=torch.float64, device=cpu.device())
        return self._scalars[value]
