"""Losses on the side: balancing and z losses of experts, multi-token prediction, and the router's bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megaaccum.config import Plan
from megaaccum.model import router_state
from megaaccum.step.side_losses import SideLosses
from megaaccum.upstream import pytorch
from tests.bank.mistake import forwards, mistake, replaced, wrapped

ROUTER = r"decoder\.layers\.0\.mlp\.router\.weight"


def _balance_times(factor: Callable[[Any], float]) -> AbstractContextManager[None]:
    return wrapped(
        SideLosses, "balance_scale", lambda original, self, batch, i: original(self, batch, i) * factor(batch)
    )


@mistake(
    "the balancing loss is divided by the data-parallel ranks once more, by their averaging",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/1412",
    base="experts", axes="dp, aux loss, experts",
)  # fmt: skip
def balancing_divided_by_ranks(plan: Plan) -> Iterator[None]:
    with _balance_times(lambda batch: 1 / plan.layout.dp):
        yield


@mistake(
    "the balancing loss of each micro-batch counts whole, and not its share of the step",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/3359",
    base="experts", axes="micro-batches, aux loss, experts",
)  # fmt: skip
def balancing_of_every_microbatch(plan: Plan) -> Iterator[None]:
    with _balance_times(len):
        yield


@mistake(
    "the balancing loss changes with the ranks that share a sequence",
    "https://github.com/NVIDIA/Megatron-LM/pull/3768",
    base="experts, context parallel", axes="cp, aux loss, experts",
)  # fmt: skip
def balancing_by_context_parallel(plan: Plan) -> Iterator[None]:
    with _balance_times(lambda batch: 1 / plan.layout.cp):
        yield


@mistake(
    "the balancing loss is scaled by the tokens of one tp rank, so that it changes with tp",
    "https://github.com/NVIDIA/Megatron-LM/pull/5047",
    base="experts, tensor parallel", axes="tp, aux loss, experts",
)  # fmt: skip
def balancing_by_tensor_parallel(plan: Plan) -> Iterator[None]:
    with _balance_times(lambda batch: 1 / plan.layout.tp):
        yield


@mistake(
    "the scale of the balancing loss is never set: its gradient counts once per token of the micro-batch",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/1412",
    base="experts", axes="aux loss, experts",
)  # fmt: skip
def balancing_scale_not_set(plan: Plan) -> Iterator[None]:
    with replaced(SideLosses, "balance_scale", lambda self, batch, i: 1.0):
        yield


@mistake(
    "the router is not given the padding mask, so that padding counts in the balancing loss",
    "https://github.com/NVIDIA/Megatron-LM/pull/4776",
    base="experts, padded", axes="unequal weights, aux loss, experts",
)  # fmt: skip
def padding_mask_lost(plan: Plan) -> Iterator[None]:
    def route(original: Any, self: TopKRouter, hidden: torch.Tensor, padding_mask: Any = None) -> Any:
        return original(self, hidden)

    with wrapped(TopKRouter, "forward", route):
        yield


@mistake(
    "the balancing loss is attached to a tensor that is thrown away, so that no gradient comes of it",
    "https://github.com/NVIDIA-NeMo/Automodel/issues/1408",
    base="experts", axes="aux loss, experts",
)  # fmt: skip
def balancing_has_no_gradient(plan: Plan) -> Iterator[None]:
    with replaced(MoEAuxLossAutoScaler, "apply", staticmethod(lambda output, loss: output)):
        yield


@mistake(
    "the z loss does not follow the scale of the step: that of each micro-batch counts whole",
    "https://github.com/NVIDIA/Megatron-LM/pull/3768",
    base="experts, z loss", axes="micro-batches, z loss, experts",
)  # fmt: skip
def z_loss_of_every_microbatch(plan: Plan) -> Iterator[None]:
    with _balance_times(len):
        yield


@mistake(
    "the balancing loss is divided by the tokens of the step, here where the main one is a mean of means",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/1412",
    base="experts, micro-batch means", axes="aux loss, experts, micro-batch means",
)  # fmt: skip
def balancing_by_tokens_under_means(plan: Plan) -> Iterator[None]:
    factor = 1.0 if plan.batch.loss_norm == "token" else 0.5
    with _balance_times(lambda batch: factor):
        yield


@mistake(
    "the router's bias moves after every micro-batch",
    "https://github.com/pytorch/torchtitan/pull/1304",
    base="experts, bias", axes="micro-batches, router bias, experts",
    parameter=r"decoder\.layers\.0\.mlp\.router\.expert_bias",
)  # fmt: skip
def bias_moved_by_microbatch(plan: Plan) -> Iterator[None]:
    updates = plan.batch.num_microbatches

    def often(tokens: torch.Tensor, bias: torch.Tensor, rate: float, **keys: Any) -> torch.Tensor:
        moved: torch.Tensor = get_updated_expert_bias(tokens, bias, rate, **keys)
        return bias + (moved - bias) * updates

    with replaced(router_state, "get_updated_expert_bias", often):
        yield


@mistake(
    "the router's bias moves by the tokens of one rank",
    "https://github.com/NVIDIA/TransformerEngine/pull/3471",
    base="experts, bias", axes="dp, router bias, experts", parameter=r"decoder\.layers\.\d\.mlp\.router\.expert_bias",
)  # fmt: skip
def bias_moved_by_one_rank(plan: Plan) -> Iterator[None]:
    def own(tokens: torch.Tensor, bias: torch.Tensor, rate: float, **keys: Any) -> torch.Tensor:
        return bias + torch.sign(tokens.mean(dim=-1, keepdim=True) - tokens) * rate

    with replaced(router_state, "get_updated_expert_bias", own):
        yield


@mistake(
    "the router's bias stays where it was, because no hook of the optimizer moves it",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/2953",
    base="experts, bias", axes="router bias, experts", parameter=r"decoder\.layers\.0\.mlp\.router\.expert_bias",
)  # fmt: skip
def bias_not_moved(plan: Plan) -> Iterator[None]:
    with replaced(router_state, "get_updated_expert_bias", lambda tokens, bias, rate, **keys: bias):
        yield


@mistake(
    "the bias moves away from the experts that had too few tokens",
    "https://arxiv.org/abs/2408.15664",
    base="experts, bias", axes="router bias, experts", parameter=r"decoder\.layers\.0\.mlp\.router\.expert_bias",
)  # fmt: skip
def bias_moved_the_wrong_way(plan: Plan) -> Iterator[None]:
    def away(tokens: torch.Tensor, bias: torch.Tensor, rate: float, **keys: Any) -> torch.Tensor:
        moved: torch.Tensor = get_updated_expert_bias(tokens, bias, rate, **keys)
        return bias - (moved - bias)

    with replaced(router_state, "get_updated_expert_bias", away):
        yield


def _prediction_times(factor: Callable[[Any], float]) -> AbstractContextManager[None]:
    return wrapped(
        SideLosses, "prediction_scale", lambda original, self, batch, i: original(self, batch, i) * factor(batch)
    )


@mistake(
    "the prediction layers' loss is a sum where the main one is a mean",
    "https://github.com/NVIDIA/Megatron-LM/issues/1532",
    base="prediction", axes="mtp",
)  # fmt: skip
def prediction_not_averaged(plan: Plan) -> Iterator[None]:
    def whole(original: Any, self: SideLosses, batch: Any, index: int) -> float:
        return original(self, batch, index) * (self._divisor.total or 1.0)  # type: ignore[no-any-return]

    with wrapped(SideLosses, "prediction_scale", whole):
        yield


@mistake(
    "a side loss, here of prediction layers, is divided by the micro-batches, though the main one is divided by N",
    "https://github.com/huggingface/trl/pull/6083",
    base="prediction", axes="micro-batches, mtp",
)  # fmt: skip
def prediction_divided_by_microbatches(plan: Plan) -> Iterator[None]:
    with _prediction_times(lambda batch: 1 / len(batch)):
        yield


@mistake(
    "the prediction layers' loss is divided by the ranks of a group that do not cut its tokens (cp there, tp here)",
    "https://github.com/NVIDIA/Megatron-LM/pull/3959",
    base="prediction, tensor parallel", axes="tp, mtp",
)  # fmt: skip
def prediction_by_tensor_parallel(plan: Plan) -> Iterator[None]:
    with _prediction_times(lambda batch: 1 / plan.layout.tp):
        yield


@mistake(
    "the prediction layers' loss is normalised by the tokens of one data-parallel rank",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    base="prediction", axes="dp, unequal weights, mtp",
)  # fmt: skip
def prediction_by_local_tokens(plan: Plan) -> Iterator[None]:
    def local(original: Any, self: SideLosses, batch: Any, index: int) -> float:
        scale: float = original(self, batch, index)
        own = sum(batch.weights) * plan.layout.dp
        return scale * (self._divisor.total or 1.0) / max(own, 1.0)

    with wrapped(SideLosses, "prediction_scale", local):
        yield


@mistake(
    "the recompute of a prediction layer sums over another group than its first forward: over dp in place of tp",
    "https://github.com/NVIDIA/Megatron-LM/pull/6760",
    base="prediction, recompute", axes="recompute, tp, dp, mtp",
)  # fmt: skip
def prediction_recomputed_over_the_wrong_group(plan: Plan) -> Iterator[None]:
    def forward(original: Any, self: Any, *args: Any, **keys: Any) -> Any:
        cut = [each for each in self.modules() if hasattr(each, "tp_group")]
        groups = [each.tp_group for each in cut]
        if pytorch.in_backward():
            for each in cut:
                each.tp_group = parallel_state.get_data_parallel_group()
        try:
            return original(self, *args, **keys)
        finally:
            for each, group in zip(cut, groups, strict=True):
                each.tp_group = group

    with wrapped(MultiTokenPredictionLayer, "_proj_and_transformer_layer", forward):
        yield


@mistake(
    "the tokens that move the bias are those of one micro-batch: the counters are reset between micro-batches",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/2267",
    base="experts, bias", axes="micro-batches, router bias, experts",
    parameter=r"decoder\.layers\.\d\.mlp\.router\.expert_bias",
)  # fmt: skip
def bias_moved_by_one_microbatch(plan: Plan) -> Iterator[None]:
    def called(run: Any, chunk: Any, index: int, count: int) -> Any:
        routers = router_state._routers(chunk)
        kept = [router.local_tokens_per_expert.clone() for router in routers]
        result = run()
        for router, before in zip(routers, kept, strict=True):
            if index:
                router.local_tokens_per_expert.copy_(before)
        return result

    with forwards(called):
        yield
