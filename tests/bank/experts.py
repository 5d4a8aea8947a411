"""Experts that have ranks of their own: summed over others' ranks, divided by another number, missing in the norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megaaccum.config import Plan
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
