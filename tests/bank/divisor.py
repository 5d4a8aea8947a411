"""Divisions: by what is not N, where it was divided already, or where nothing should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megaaccum.config import Plan
from megaaccum.pretrain.model.gpt_forward import GptForwardStep
from megaaccum.step import train_step, world_sums
from megaaccum.step.forward_step import ForwardStep
from megaaccum.step.loss import Divisor
from megaaccum.step.microbatches import Microbatches
from megaaccum.step.train_step import TrainStep
from tests.bank.mistake import mistake, replaced, wrapped


def _times(factor: float) -> AbstractContextManager[None]:
    """Another factor in the loss."""
    known = Divisor.known

    def another(*args: Any, **keys: Any) -> Divisor:
        right = known(*args, **keys)
        return replace(right, in_loss=right.in_loss * factor)

    return replaced(Divisor, "known", another)


@mistake(
    "every pipeline stage divides the gradient of its output by the accumulation steps, though it was divided before",
    "https://github.com/deepspeedai/DeepSpeed/pull/8154",
    base="pipeline", axes="ga",
)  # fmt: skip
def division_per_stage(plan: Plan) -> Iterator[None]:
    rounds = plan.batch.grad_accum_steps

    def forward(original: Any, self: Any, *args: Any, **keys: Any) -> Any:
        output = original(self, *args, **keys)
        if output.requires_grad:
            output.register_hook(lambda grad: grad / rounds)
        return output

    with wrapped(GPTModel, "forward", forward):
        yield


@mistake(
    "every chunk of an interleaved pipeline divides the gradient of its output, here by the number of chunks",
    "https://github.com/deepspeedai/DeepSpeed/pull/8154",
    base="interleaved", axes="schedule, pp",
)  # fmt: skip
def division_per_chunk(plan: Plan) -> Iterator[None]:
    chunks = plan.layout.vpp

    def forward(original: Any, self: Any, *args: Any, **keys: Any) -> Any:
        output = original(self, *args, **keys)
        if output.requires_grad:
            output.register_hook(lambda grad: grad / chunks)
        return output

    with wrapped(GPTModel, "forward", forward):
        yield


@mistake(
    "under a pipeline the loss is differentiated before it is divided by N",
    "https://github.com/pytorch/torchtitan/issues/2972",
    base="pipeline", axes="pp",
)  # fmt: skip
def pipeline_not_divided(plan: Plan) -> Iterator[None]:
    known = Divisor.known

    def undivided(*args: Any, **keys: Any) -> Divisor:
        right = known(*args, **keys)
        return replace(right, in_loss=float(right.reduction_divisor)) if plan.layout.pp > 1 else right

    with replaced(Divisor, "known", undivided):
        yield


@mistake(
    "the loss is not divided by the accumulation steps: the sum over rounds of their means",
    "https://github.com/karpathy/nanoGPT/issues/206",
    base="micro-batch means", axes="ga",
)  # fmt: skip
def rounds_not_divided(plan: Plan) -> Iterator[None]:
    with _times(plan.batch.grad_accum_steps):
        yield


@mistake(
    "trainer and accelerator both divide by the accumulation steps",
    "https://github.com/huggingface/accelerate/issues/3533",
    base="pipeline", axes="ga",
)  # fmt: skip
def accumulation_divided_twice(plan: Plan) -> Iterator[None]:
    with _times(1 / plan.batch.grad_accum_steps):
        yield


@mistake(
    "a loss that was divided by the tokens of all ranks is averaged over the ranks once more",
    "https://github.com/huggingface/transformers/issues/37474",
    base="pipeline", axes="dp",
)  # fmt: skip
def ranks_divided_twice(plan: Plan) -> Iterator[None]:
    with _times(1 / plan.layout.dp):
        yield


@mistake(
    "a loss that is a mean on each rank is multiplied by their number, though the reduction averages",
    "https://github.com/neuralmagic/sparseml/pull/135",
    base="pipeline", axes="dp",
)  # fmt: skip
def ranks_summed_not_averaged(plan: Plan) -> Iterator[None]:
    with _times(plan.layout.dp):
        yield


@mistake(
    "Megatron's schedule divides by the number of micro-batches, and so does the caller",
    "https://github.com/areal-project/AReaL/pull/1273",
    base="pipeline", axes="micro-batches",
)  # fmt: skip
def schedule_divides_too(plan: Plan) -> Iterator[None]:
    with _times(1 / plan.batch.num_microbatches):
        yield


@mistake(
    "the loss is multiplied by cp, though gradients are averaged over dp alone",
    "https://github.com/NVIDIA/Megatron-LM/issues/906",
    base="context parallel", axes="cp",
)  # fmt: skip
def loss_times_context_parallel(plan: Plan) -> Iterator[None]:
    with _times(plan.layout.cp):
        yield


@mistake(
    "every micro-batch weighs the same, however many tokens it has: a mean of means",
    "https://github.com/huggingface/transformers/pull/34191",
    base="pipeline", axes="micro-batches, unequal weights",
)  # fmt: skip
def mean_of_means(plan: Plan) -> Iterator[None]:
    def divided(original: Any, self: ForwardStep, index: int, at: Any, loss_func: Any) -> Any:
        def own_mean(output: torch.Tensor) -> Any:
            total, weight, reports = loss_func(output)
            mean_weight = (self._divisor.total or 1.0) / (len(self._batch) * plan.layout.dp)
            return total * (mean_weight / float(weight)), weight, reports

        return original(self, index, at, own_mean)

    with wrapped(ForwardStep, "scaled_loss", divided):
        yield


@mistake(
    "each rank divides by the tokens that it has itself, and the ranks are averaged",
    "https://github.com/huggingface/transformers/issues/34242",
    base="pipeline", axes="dp, unequal weights",
)  # fmt: skip
def mean_over_own_tokens(plan: Plan) -> Iterator[None]:
    def own(steps: TrainStep, calls: list[Microbatches], total: float | None = None, *, alone: bool) -> Any:
        ranks, mine = steps.groups.dp.size(), [weight for each in calls for weight in each.weights or ()]
        divisor = steps.backend.reduction_divisor
        return lambda: Divisor.known(sum(mine) * ranks, len(mine) * ranks, reduction_divisor=divisor)

    with replaced(world_sums, "divisor_of", own):
        yield


@mistake(
    "N counts the padding: every token of the batch, masked or not",
    "https://github.com/AI-Hypercomputer/maxtext/pull/366",
    base="pipeline", axes="unequal weights",
)  # fmt: skip
def padding_counts(plan: Plan) -> Iterator[None]:
    def every(self: Any, microbatches: list[dict[str, torch.Tensor]]) -> list[float]:
        return [float(each["loss_mask"].numel()) for each in microbatches]

    with replaced(GptForwardStep, "weights", every):
        yield


@mistake(
    "N is an estimate: the tokens of the last micro-batch times their number",
    "https://github.com/OpenNMT/OpenNMT-py/pull/2275",
    base="pipeline", axes="micro-batches, unequal weights",
)  # fmt: skip
def tokens_of_the_last_microbatch(plan: Plan) -> Iterator[None]:
    weights = GptForwardStep.weights

    def last(self: Any, microbatches: list[dict[str, torch.Tensor]]) -> list[float]:
        own = weights(self, microbatches)
        return own[-1:] * len(own)

    with replaced(GptForwardStep, "weights", last):
        yield


@mistake(
    "each micro-batch's loss is divided by its own tokens, and the step divides by N as well",
    "https://github.com/fw-ai/cookbook/pull/200",
    base="pipeline", axes="",
)  # fmt: skip
def tokens_divided_twice(plan: Plan) -> Iterator[None]:
    loss = GptForwardStep.loss

    def twice(self: Any, mask: torch.Tensor, tokens: float, output: torch.Tensor) -> Any:
        total, weight, reports = loss(self, mask, tokens, output)
        return total / weight.clamp(min=1), weight, reports

    with replaced(GptForwardStep, "loss", twice):
        yield


@mistake(
    "the loss scale stays in the gradient that the optimizer reads",
    "https://arxiv.org/abs/1710.03740",
    base="FP16, no overflow", axes="loss scale",
)  # fmt: skip
def loss_scale_not_divided(plan: Plan) -> Iterator[None]:
    with _at_end(lambda scale: scale):
        yield


@mistake(
    "the gradient is divided by the loss scale twice",
    "https://arxiv.org/abs/1710.03740",
    base="FP16, no overflow", axes="loss scale",
)  # fmt: skip
def loss_scale_divided_twice(plan: Plan) -> Iterator[None]:
    with _at_end(lambda scale: 1 / scale):
        yield


def _at_end(factor: Any) -> AbstractContextManager[None]:
    """The attempt's factor times `factor(loss scale)`, its norm with it."""

    def measured(original: Any, self: Any, opened: Any) -> Any:
        attempt = original(self, opened)
        by = factor(self.backend.loss_scale)
        return replace(attempt, factor=attempt.factor * by, norm=attempt.norm * by)

    return wrapped(train_step.TrainStep, "reduce_and_measure", measured)


@mistake(
    "the reported loss is divided by the accumulation steps once more",
    "https://github.com/espnet/espnet/issues/5090",
    base="pipeline", axes="ga", parameter="",
)  # fmt: skip
def reported_loss_divided(plan: Plan) -> Iterator[None]:
    rounds = plan.batch.grad_accum_steps

    def divided(original: Any, self: Any, index: int, at: Any, loss_func: Any) -> Any:
        inner = original(self, index, at, loss_func)

        def call(*args: Any, **keys: Any) -> Any:
            result = inner(*args, **keys)
            self._tally.losses[-1] = self._tally.losses[-1] / rounds
            return result

        return call

    with wrapped(ForwardStep, "scaled_loss", divided):
        yield
