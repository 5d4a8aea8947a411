"""Experts that have ranks of their own: summed over others' ranks, divided by another number, missing in the norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megaaccum.config import Plan
from megaaccum.distributed.sums import sums_over_ranks
from megaaccum.model import names
from megaaccum.sharding import fsdp2
from megaaccum.step import grad_norm
from tests.bank.mistake import mistake, replaced, wrapped
from tests.bank.reduction import changed_in_every_backward

EXPERT = r"decoder\.layers\.0\.mlp\.experts\.local_experts\.0\.linear_fc1\.weight"
"""The first parameter of an expert."""
ROUTER = r"decoder\.layers\.0\.mlp\.router\.weight"
"""The first router."""


@mistake(
    "fully_shard averages experts over the ranks that hold the same ones, and not over all whose tokens they saw",
    "https://github.com/pytorch/pytorch/issues/160285",
    base="spread experts, FSDP2", axes="ep, dp, backend, experts", parameter=EXPERT,
)  # fmt: skip
def experts_averaged_over_their_own_ranks(plan: Plan) -> Iterator[None]:
    def finish(original: Any, self: fsdp2.Fsdp2Backend) -> None:
        original(self)
        for shard in self.shards():
            if names.is_expert(shard.param):
                shard.grad.mul_(plan.layout.dp / plan.layout.edp)

    with wrapped(fsdp2.Fsdp2Backend, "finish_reduction", finish):
        yield


@mistake(
    "an expert that is on one rank alone is added to itself in every micro-batch",
    "https://github.com/NVIDIA/Megatron-LM/issues/6660",
    base="spread experts, one rank each", axes="ep, dp, backend, experts", parameter=EXPERT,
)  # fmt: skip
def experts_doubled_where_nothing_is_reduced(plan: Plan) -> Iterator[None]:
    with changed_in_every_backward(
        lambda grad: grad.mul_(2), of=lambda param: names.is_expert(param) and plan.layout.edp == 1
    ):
        yield


@mistake(
    "experts that are whole beside cut matrices are summed over the ranks of those",
    "https://github.com/NVIDIA/Megatron-LM/pull/5916",
    base="whole experts", axes="tp, experts", parameter=EXPERT,
)  # fmt: skip
def whole_experts_over_the_ranks_of_cut_matrices(plan: Plan) -> Iterator[None]:
    with replaced(names, "dp_group", lambda param, groups: groups.dp_cp):
        yield


@mistake(
    "the norm counts the experts of the first tensor-parallel rank alone",
    "https://github.com/NVIDIA/Megatron-LM/pull/6470",
    base="spread experts, tensor parallel, clipped", axes="tp, ep, backend, experts",
)  # fmt: skip
def experts_of_other_tensor_ranks_missing_in_the_norm(plan: Plan) -> Iterator[None]:
    counts = grad_norm.counts_in_norm

    def own(shard: Any, groups: Any) -> bool:
        return counts(shard, groups) and (groups.tp.rank() == 0 or not names.is_expert(shard.param))

    with replaced(grad_norm, "counts_in_norm", own):
        yield


@mistake(
    "the router's probabilities pass to the experts' ranks without a gradient, so it learns from its side losses alone",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    base="spread experts", axes="experts", parameter=rf"{ROUTER}|embedding\.word_embeddings\.weight",
)  # fmt: skip
def router_detached(plan: Plan) -> Iterator[None]:
    def detached(original: Any, self: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
        return original(self, hidden, routing_map, probs.detach())

    with wrapped(MoEAlltoAllTokenDispatcher, "dispatch_preprocess", detached):
        yield


@mistake(
    "each rank's scores get the gradient of its own experts alone, and the rest is not summed over the ranks",
    "https://github.com/huggingface/transformers/pull/48205",
    base="spread experts", axes="ep, dp, experts", parameter=rf"{ROUTER}|embedding\.word_embeddings\.weight",
)  # fmt: skip
def scores_of_others_experts_without_gradient(plan: Plan) -> Iterator[None]:
    def own(original: Any, self: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
        is_own = torch.zeros(probs.shape[1], dtype=torch.bool)
        is_own[self.local_expert_indices] = True
        return original(self, hidden, routing_map, torch.where(is_own, probs, probs.detach()))

    with wrapped(MoEAlltoAllTokenDispatcher, "dispatch_preprocess", own):
        yield


@contextmanager
def _norm_of(norm: Callable[[float, float], float]) -> Iterator[None]:
    """The norm is `norm(square of the dense parameters, square of the experts that this rank's group holds)`."""
    squares: list[torch.Tensor] = []
    counts = grad_norm.counts_in_norm

    def dense(shard: Any, groups: Any) -> bool:
        if counts(shard, groups) and names.is_expert(shard.param):
            squares.append(shard.grad.double().square().sum())
            return False
        return counts(shard, groups)

    def sums(parts: Sequence[torch.Tensor]) -> list[float]:
        total, *others = sums_over_ranks(parts)
        own = torch.stack(squares).sum()
        squares.clear()
        dist.all_reduce(own, group=parallel_state.get_expert_data_parallel_group())
        return [norm(total, float(own)) ** 2, *others]

    with replaced(grad_norm, "counts_in_norm", dense), replaced(grad_norm, "sums_over_ranks", sums):
        yield


@mistake(
    "the norm is not summed over the ranks that hold other experts: each clips by one of its own",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3817",
    base="spread experts, clipped", axes="ep, dp, backend, experts",
)  # fmt: skip
def norm_of_each_expert_group(plan: Plan) -> Iterator[None]:
    with _norm_of(lambda dense, own: math.sqrt(dense + own)):
        yield


@mistake(
    "norms of ranks that hold other experts are averaged, as if all held the same",
    "https://github.com/deepspeedai/DeepSpeed/issues/8475",
    base="spread experts, clipped", axes="ep, dp, backend, experts",
)  # fmt: skip
def norms_of_other_experts_averaged(plan: Plan) -> Iterator[None]:
    def averaged(dense: float, own: float) -> float:
        norm = torch.tensor(math.sqrt(dense + own), dtype=torch.float64)
        dist.all_reduce(norm)
        return float(norm) / dist.get_world_size()

    with _norm_of(averaged):
        yield
