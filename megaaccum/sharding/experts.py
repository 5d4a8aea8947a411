"""Experts over DeepSpeed ZeRO-3 that have ranks of their own.

With expert parallelism, or without tensor parallelism inside experts (expert_tensor_parallel_size 1), the ranks that
share an expert are not those that share a dense matrix: they are the expert data-parallel group, tp * dp * cp / ep
ranks. An expert's parameters are cut over that group, and its gradients added up over it. It saw the tokens of all
ranks that sent it some, so the sum is divided by dp * cp, as everybody's.

Which layouts do is the rule `expert_groups` of the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaaccum.model import names
from megaaccum.upstream import zero

if TYPE_CHECKING:
    import torch

    from megaaccum.distributed.groups import Groups


def assign_groups(groups: Groups, chunks: list[torch.nn.Module]) -> None:
    """Tell DeepSpeed, before it cuts the parameters, over which ranks each expert's are cut and added up."""
    experts = [param for chunk in chunks for param in chunk.parameters() if names.is_expert(param)]
    if experts:
        zero.set_expert_ranks(experts, groups.collection.ep, groups.collection.expt_dp)
