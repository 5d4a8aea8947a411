"""Experts that have ranks of their own.

With expert parallelism, or if the matrices of experts are not cut as the dense ones are (expert_tensor_parallel_size
other than tensor_model_parallel_size), the ranks that hold the same part of an expert are not those that hold the same
part of a dense matrix: they are the expert data-parallel group, the tp * cp * dp ranks of a stage / (etp * ep).
Megatron marks the parameters of such experts (`allreduce = False`), and the marks decide here, whatever the
configuration says.

An expert's parameters are cut over that group, and its gradients summed over it. It saw the tokens of all ranks that
sent it some, so an average divides the sum by dp * cp, as everybody's. FSDP2 uses `of_chunks` and `modules_of` alone,
and reduces experts over a mesh of their own (sharding/fsdp2.py).

A product of all these tokens rounds otherwise than one of a single rank's, and its weight gradient is a sum over
micro-batches of several. Under `reproducible: layout` (`multiply_apart`) an expert runs for each rank's tokens alone,
in products of the shapes that they have without expert parallelism, and each weight gradient, of each block of a
sequence, is a leaf of its own in the tree of micro-batches (sum_tree.py). Copies of a token are added on its own rank
in the order of experts, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megaaccum.config import Plan
from megaaccum.config.rules import moe
from megaaccum.distributed.agreement import numbers_of_all
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.sharding.reduction import PartitionReducer, Share
from megaaccum.sharding.sum_tree import AnyOrder


def of_chunks(chunks: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters of experts with ranks of their own."""
    return [param for chunk in chunks for param in chunk.parameters() if names.is_expert(param)]


def modules_of(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The largest modules all of whose parameters are of experts with ranks of their own. Raises ConfigError if a
    module has such a parameter beside others."""
    found: list[torch.nn.Module] = []

    def look(module: torch.nn.Module) -> None:
        if (marks := {names.is_expert(param) for param in module.parameters()}) == {True}:
            found.append(module)
        elif len(marks) == 2:
            if any(names.is_expert(param) for param in module.parameters(recurse=False)):
                raise ConfigError(
                    f"{type(module).__name__} has parameters of experts (allreduce = False) beside others: backend"
                    " fsdp2 gathers them over other ranks, so put them into a module of their own"
                )
            for child in module.children():
                look(child)

    look(chunk)
    return found


def problems(plan: Plan, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Experts of this rank's chunks that the plan does not describe."""
    return [*(problem for chunk in chunks for problem in _config_problems(plan, chunk)), *_mark_problems(plan, chunks)]


def _config_problems(plan: Plan, chunk: torch.nn.Module) -> Iterator[str]:
    """Keys of a chunk's configuration that the plan has otherwise."""
    config: Any = chunk.config
    built, planned = getattr(config, "num_moe_experts", None), plan.config.model.num_experts
    if built != planned:
        yield (
            f"the chunks were built with {built or 'no'} experts (num_moe_experts), but num_experts of the plan is"
            f" {planned}: {f'give Plan.of num_experts={built}' if built else 'leave num_experts out'}"
        )
    elif built is not None:
        if (factor := getattr(config, "moe_expert_capacity_factor", None)) is not None and factor <= 0:
            yield f"moe_expert_capacity_factor {factor:g} of the chunks {moe.DROPS_EVERYTHING}"
        if config.moe_router_topk > built:
            yield f"moe_router_topk {config.moe_router_topk} of the chunks is more than their {built} experts"
        kinds, step = config.moe_router_load_balancing_type, plan.config.step
        if kinds == "quantile_balancing":
            yield f"moe_router_load_balancing_type {kinds} of the chunks: no step moves its bias; take aux_loss or none"
        counts = config.moe_router_enable_expert_bias or "global_aux_loss" in kinds
        if counts and (step.speculative_step or step.short_batch == "pad" or step.nonfinite == "drop_microbatch"):
            yield (
                "routers of the chunks count the tokens of a step, and not those of stand-ins or of forwards that are"
                " dropped: set short_batch to error, nonfinite to skip and speculative_step to false"
            )


def _mark_problems(plan: Plan, chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Parameters that Megatron's marks, or their absence, would have summed over the wrong ranks."""
    ep, etp, tp = plan.layout.ep, plan.layout.etp, plan.layout.tp
    for name, param in names.named_parameters(chunks):
        if names.is_expert(param) and not has_own_ranks(plan):
            yield (
                f"{name} is marked as an expert's with ranks of its own (allreduce = False), but by the plan experts"
                f" have the ranks of dense matrices (ep 1, etp {etp} = tp): set expert_model_parallel_size or"
                " expert_tensor_parallel_size as the chunks were built"
            )
            return
        if ".experts." in name and not names.is_expert(param) and has_own_ranks(plan):
            yield (
                f"{name} is not marked as an expert's with ranks of its own (allreduce = False), but by the plan it has"
                f" them (ep {ep}, etp {etp}, tp {tp}): build the chunks for this layout"
            )
            return


def check_same_on_ranks(groups: Groups, chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError on every rank if ranks of a stage have built different numbers of experts. Collective over the
    world."""
    of_ranks = numbers_of_all([groups.pp.rank(), sum(param.numel() for param in of_chunks(chunks))])
    by_stage: dict[int, dict[int, list[int]]] = {}
    for rank, (stage, count) in enumerate(zip(*of_ranks, strict=True)):
        by_stage.setdefault(stage, {}).setdefault(count, []).append(rank)
    for stage, by_count in sorted(by_stage.items()):
        if len(by_count) > 1:
            held = ", ".join(f"ranks {ranks} hold {count}" for count, ranks in sorted(by_count.items()))
            raise ConfigError(
                f"pipeline rank {stage} has experts on some ranks only (elements of parameters with allreduce = False:"
                f" {held}): build the same layers on all of them"
            )


def multiply_apart(chunks: Iterable[torch.nn.Module]) -> None:
    """Let the experts of `chunks` that have ranks of their own multiply the tokens of each rank apart. Raises
    ConfigError for experts that cannot."""
    chunks = list(chunks)
    left = {id(param) for param in of_chunks(chunks)}
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        built: Any = layer.experts
        if type(built) is SequentialMLP and type(layer.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            wgrad.install(built)
            built.forward = partial(_forward, layer, built)
            # The gradient of a bias would be autograd's sum over all calls.
            left -= {id(param) for name, param in built.named_parameters() if name.endswith("weight")}
    if left:
        raise ConfigError(
            "reproducible layout with expert_model_parallel_size above 1 needs experts that multiply the tokens of each"
            " rank apart: those of Megatron's local layers (SequentialMLP), with no bias, with its alltoall dispatcher."
            " Transformer Engine's grouped products take all at once. Set transformer_impl to local, or reproducible to"
            " none."
        )


def _forward(
    layer: Any, built: Any, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SequentialMLP.forward, with a call of each expert for each rank's tokens."""
    counts = _counts(layer.token_dispatcher, layer.num_local_experts)
    first = wgrad.source() * counts.shape[1]  # of this block of a sequence
    numbers = range(first, first + counts.shape[1])
    calls = [partial(multiply_for, expert, number) for expert in built.local_experts for number in numbers]
    stand_in: Any = SimpleNamespace(config=built.config, num_local_experts=len(calls), local_experts=calls)
    output: tuple[torch.Tensor, torch.Tensor | None] = SequentialMLP.forward(stand_in, tokens, counts.ravel(), probs)
    return output


def multiply_for(expert: torch.nn.Module, number: int, *args: torch.Tensor) -> Any:
    """The output of an expert for the tokens of one rank's run, whose number its gradients have."""
    with wgrad.tokens_from(number):
        return expert(*args)


def _counts(dispatcher: Any, num_local_experts: int) -> torch.Tensor:
    """[experts of this rank, ranks of its ep group]: the tokens that a rank has sent to an expert. They lie in this
    order."""
    if num_local_experts == 1 and not dispatcher.drop_and_pad:
        return torch.as_tensor(dispatcher.output_splits).view(1, -1)
    return torch.as_tensor(dispatcher.num_global_tokens_per_local_expert).view(-1, num_local_experts).T


class ReducerByRanks:
    """Adds whole gradients to partitions, each summed over the ranks that hold the parameter: a `PartitionReducer` for
    dense parameters, and one for experts."""

    def __init__(self, plan: Plan, groups: Groups, sums: AnyOrder):
        ranks = groups.dp_cp, groups.expert_dp if has_own_ranks(plan) else groups.dp_cp
        self._dense, self._experts = (PartitionReducer(plan, each, sums) for each in ranks)

    def add(self, shares: list[Share]) -> None:
        """Start to add `shares` (PartitionReducer.add)."""
        for are_experts, reducer in enumerate((self._dense, self._experts)):
            if mine := [share for share in shares if names.is_expert(share[0]) == are_experts]:
                reducer.add(mine)

    def exchange(self, shares: list[Share], take: Callable[[torch.Tensor], None]) -> None:
        """Exchange the rows of dense parameters (PartitionReducer.exchange)."""
        self._dense.exchange(shares, take)

    def wait(self) -> None:
        """Wait until the partitions hold everything that was added."""
        self._dense.wait()
        self._experts.wait()


def has_own_ranks(plan: Plan) -> bool:
    """Whether experts have ranks of their own by the plan's layout."""
    return plan.layout.ep > 1 or plan.layout.etp != plan.layout.tp
