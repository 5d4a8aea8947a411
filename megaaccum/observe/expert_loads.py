"""Tokens that each expert was given in a step, layer by layer: how even routing is, and how many tokens it dropped.

Megatron's routers have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router

from megaaccum.config import Plan
from megaaccum.platform import cpu


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The routing of one step over all ranks. imbalance: of each layer with experts, by its number from 1 (prediction
    layers after the others), tokens of the fullest expert over the mean. rank_imbalance: the same of the experts of a
    rank together, in the worst layer. dropped: share of the routed copies of tokens that exceeded the capacity."""

    imbalance: dict[int, float]
    rank_imbalance: float
    dropped: float

    def record(self) -> dict[str, float]:
        """The numbers as the log has them."""
        return {
            "expert_imbalance": max(self.imbalance.values()),
            "expert_rank_imbalance": self.rank_imbalance,
            "expert_dropped_share": self.dropped,
            **{f"expert_imbalance_layer_{number}": value for number, value in self.imbalance.items()},
        }


class ExpertCounter:
    """Counts the tokens of each expert in the forwards that are differentiated, recomputed ones once."""

    def __init__(self, plan: Plan, chunks: Sequence[torch.nn.Module]):
        model = plan.config.model
        self._ep, self._pads = plan.layout.ep, model.moe_pad_expert_input_to_capacity
        experts = model.num_experts if model.num_layers > 0 else None  # a model of the caller's own may have no number
        self._shape = model.num_layers + (model.mtp_num_layers or 0), experts + 1 if experts else 0
        self._counts = self.begin()
        for module in (each for chunk in chunks for each in chunk.modules() if experts):
            if isinstance(module, Router) and module.layer_number is not None:
                # Prediction layers have numbers of their own, and come after the others.
                before = model.num_layers if module.is_mtp_layer else 0
                module.register_forward_hook(partial(self._count, before + module.layer_number - 1))

    def begin(self) -> torch.Tensor:
        """Count from here on into a tensor of zeros, which is returned: [layers, experts and the routed copies]."""
        self._counts = torch.zeros(self._shape, dtype=torch.int64, device=cpu.device())
        return self._counts

    def _count(self, row: int, router: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add the tokens that a router gave to each expert. Of experts that are filled up to their capacity, those of
        weight zero are none."""
        if not (router.training and torch.is_grad_enabled()):
            return
        probs, routed = output
        self._counts[row, :-1] += (probs.detach() != 0 if self._pads else routed).sum(dim=0)
        self._counts[row, -1] += routed.shape[0] * router.topk

    def loads(self, counts: torch.Tensor) -> ExpertLoads | None:
        """Sum `counts`, this rank's, over all ranks; None if no router of Megatron's has run. Collective over
        the world if the plan has experts."""
        if 0 in self._shape:
            return None
        dist.all_reduce(counts)
        tokens = counts[:, :-1].double()
        mean = tokens.mean(dim=1).clamp(min=1e-9)
        of_ranks = tokens.view(len(tokens), self._ep, -1).sum(dim=2)
        rows = [counts[:, -1].double(), tokens.sum(dim=1), tokens.amax(dim=1) / mean]
        rows.append(of_ranks.amax(dim=1) / of_ranks.mean(dim=1).clamp(min=1e-9))
        found = {at: row for at, row in enumerate(torch.stack(rows, dim=1).tolist(), start=1) if row[0]}
        if not found:
            return None
        routed, kept = (sum(row[column] for row in found.values()) for column in (0, 1))
        worst = max(row[3] for row in found.values())
        return ExpertLoads({at: row[2] for at, row in found.items()}, worst, 1.0 - kept / routed)
