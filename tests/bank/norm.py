"""The gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaaccum.config import Plan
from megaaccum.distributed.sums import sums_over_ranks
from megaaccum.model import names
from megaaccum.step import grad_norm
from tests.bank.mistake import mistake, replaced


def _norm_over(group: Callable[[], Any]) -> AbstractContextManager[None]:
    """The norm's squares are summed over another group; losses and weights, as they should be."""

    def over_group(parts: Sequence[torch.Tensor]) -> list[float]:
        return [*sums_over_ranks(parts[:1], group()), *sums_over_ranks(parts[1:])]

    return replaced(grad_norm, "sums_over_ranks", over_group)


@mistake(
    "each pipeline stage has a norm of its own",
    "https://github.com/pytorch/torchtitan/issues/596",
    base="pipeline, clipped", axes="pp",
)  # fmt: skip
def norm_per_stage(plan: Plan) -> Iterator[None]:
    with _norm_over(lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)):
        yield


@mistake(
    "each rank clips by the norm of its own partition",
    "https://github.com/ContextualAI/HALOs/issues/15",
    base="ZeRO-3, clipped", axes="dp",
)  # fmt: skip
def norm_per_partition(plan: Plan) -> Iterator[None]:
    with _norm_over(parallel_state.get_model_parallel_group):
        yield


@mistake(
    "parameters that are whole on every tp rank count once per rank",
    "https://github.com/NVIDIA-NeMo/RL/pull/3788",
    base="tensor parallel, clipped", axes="tp",
)  # fmt: skip
def whole_parameters_counted_per_rank(plan: Plan) -> Iterator[None]:
    with replaced(names, "is_same_over_tp", lambda param: False):
        yield


@mistake(
    "parts of a matrix pass for copies of it: the norm counts the first tp rank's alone",
    "https://github.com/NVIDIA/Megatron-LM/pull/5916",
    base="tensor parallel, clipped", axes="tp",
)  # fmt: skip
def cut_parameters_counted_on_one_rank(plan: Plan) -> Iterator[None]:
    with replaced(names, "is_same_over_tp", lambda param: True):
        yield


@mistake(
    "the norm counts the embedding on the first stage, and its copy on the last",
    "https://github.com/NVIDIA/Megatron-LM/pull/7227",
    base="pipeline, tied and clipped", axes="pp, tied embedding",
)  # fmt: skip
def tied_copy_counted_twice(plan: Plan) -> Iterator[None]:
    counts = grad_norm.counts_in_norm

    def both(shard: Any, groups: Any) -> bool:
        return counts(shard, groups) or (names.is_tied_copy(shard.param) and shard.replica == 0)

    with replaced(grad_norm, "counts_in_norm", both):
        yield


@mistake(
    "the norm of spread experts is not summed over the ranks that hold them",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3817",
    base="spread experts, clipped", axes="ep, dp, experts",
)  # fmt: skip
def experts_missing_in_the_norm(plan: Plan) -> Iterator[None]:
    counts = grad_norm.counts_in_norm

    def own(shard: Any, groups: Any) -> bool:
        elsewhere = names.is_expert(shard.param) and plan.layout.ep > 1 and dist.get_rank() % plan.layout.ep != 0
        return counts(shard, groups) and not elsewhere

    with replaced(grad_norm, "counts_in_norm", own):
        yield


@mistake(
    "gradients are clipped before they are divided by the loss scale",
    "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    base="FP16, clipped", axes="loss scale, clipping",
)  # fmt: skip
def clipped_before_unscaling(plan: Plan) -> Iterator[None]:
    clip = grad_norm.scale_and_clip

    def early(backend: Any, norm: float, max_norm: float, *, factor: float = 1.0) -> None:
        clip(backend, norm * backend.loss_scale, max_norm, factor=factor)

    with replaced(grad_norm, "scale_and_clip", early):
        yield


@mistake(
    "each parameter is clipped by its own norm",
    "https://arxiv.org/abs/1211.5063",
    base="pipeline, clipped", axes="clipping",
)  # fmt: skip
def clipped_one_by_one(plan: Plan) -> Iterator[None]:
    def each_alone(backend: Any, norm: float, max_norm: float, *, factor: float = 1.0) -> None:
        for shard in backend.shards():
            own = float(shard.grad.norm()) * factor
            shard.grad.mul_(factor * (min(max_norm / (own + 1e-6), 1.0) if max_norm > 0 else 1.0))

    with replaced(grad_norm, "scale_and_clip", each_alone):
        yield
