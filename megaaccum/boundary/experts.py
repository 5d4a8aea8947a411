"""Experts over DeepSpeed ZeRO-3 when expert parallelism spreads them over the data-parallel ranks.

Of the ranks that share dense parameters, each holds other experts; the same expert is on `dp * cp / ep` of them, the
expert data-parallel group. An expert's parameters are cut and its gradients reduced over that group. The expert saw the
tokens of all `ep` ranks that sent it some, so the sum of its gradients is divided by dp * cp, as everybody's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaaccum import model, private
from megaaccum.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megaaccum.config import Plan
    from megaaccum.groups import Groups


def place(plan: Plan, groups: Groups, chunks: list[torch.nn.Module]) -> None:
    """Tell DeepSpeed, before it cuts the parameters, over which ranks each expert's are cut and reduced.

    Raises ConfigError, naming each key, where experts are spread in a way that no gradient has been checked for.
    """
    if groups.layout.ep == 1:
        return
    if problems := _problems(plan):
        raise ConfigError(problems)
    experts = [param for chunk in chunks for param in chunk.parameters() if model.is_expert(param)]
    private.place_experts(experts, groups.collection.ep, groups.collection.expt_dp)


def _problems(plan: Plan) -> list[str]:
    layout, sharding = plan.layout, plan.config.sharding
    spread = f"expert_model_parallel_size {layout.ep}"
    problems = []
    if sharding.zero_stage != 3:
        problems.append(f"{spread} needs zero_stage 3, and zero_stage is {sharding.zero_stage}: set it to 3.")
    if layout.tp * layout.etp > 1:
        problems.append(
            f"{spread} goes with tensor_model_parallel_size 1 and expert_tensor_parallel_size 1, which are {layout.tp} "
            f"and {layout.etp}: set both to 1, or expert_model_parallel_size to 1."
        )
    if plan.config.model.moe_grouped_gemm:
        problems.append(f"{spread} has not been checked with moe_grouped_gemm: set that to false.")
    if sharding.deterministic:
        problems.append(f"{spread} has no deterministic reduction: set deterministic to false.")
    return problems
