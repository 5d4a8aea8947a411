"""Tokens of each expert: which forwards count, in which row, and what a step's counts say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import Router

from megaaccum.observe import expert_loads
from megaaccum.observe.expert_loads import ExpertCounter, ExpertLoads


class Routed(Router):
    """A router that gives what it is called with: a layer's number, counted apart in prediction layers."""

    def __init__(self, layer_number: int, *, is_mtp_layer: bool = False):
        torch.nn.Module.__init__(self)
        self.layer_number, self.is_mtp_layer, self.topk = layer_number, is_mtp_layer, 2

    def routing(self, logits: torch.Tensor) -> None: ...

    def forward(self, probs: torch.Tensor, routed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return probs, routed


def counter(routers: list[Routed], *, pads: bool = False) -> ExpertCounter:
    model = SimpleNamespace(num_experts=4, num_layers=2, mtp_num_layers=1, moe_pad_expert_input_to_capacity=pads)
    plan: Any = SimpleNamespace(config=SimpleNamespace(model=model), layout=SimpleNamespace(ep=2))
    return ExpertCounter(plan, [torch.nn.ModuleList(routers)])


EVEN = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
UNEVEN = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
DROPPED = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0]]).bool()


def test_imbalance_is_that_of_experts_and_of_ranks_over_all_ranks(monkeypatch: pytest.MonkeyPatch):
    routers = [Routed(1), Routed(2), Routed(1, is_mtp_layer=True)]
    counting = counter(routers)
    routers[0](UNEVEN.float(), EVEN)  # before the step
    counts = counting.begin()
    for router, routed in zip(routers, (EVEN, UNEVEN, DROPPED), strict=True):
        router(torch.zeros(2, 4), routed)  # a weight may round to 0
        with torch.no_grad():
            router(routed.float(), UNEVEN)  # as recomputation calls it first
        router.eval()
        router(routed.float(), UNEVEN)
    assert counts.tolist() == [[1, 1, 1, 1, 4], [2, 1, 1, 0, 4], [1, 0, 1, 0, 4]]
    monkeypatch.setattr(expert_loads.dist, "all_reduce", lambda tensor: tensor.mul_(3))
    loads = counting.loads(counts)
    assert loads == ExpertLoads({1: 1.0, 2: 2.0, 3: 2.0}, rank_imbalance=1.5, dropped=pytest.approx(2 / 12))


def test_experts_that_are_filled_up_have_the_tokens_with_a_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_loads.dist, "all_reduce", lambda tensor: None)
    router = Routed(2)
    counting = counter([router], pads=True)
    router(DROPPED.float(), torch.ones(2, 4).bool())
    loads = counting.loads(counting.begin())
    assert loads is None, "no router has run since the counts began"
    counts = counting.begin()
    router(DROPPED.float(), torch.ones(2, 4).bool())
    assert counting.loads(counts) == ExpertLoads({2: 2.0}, rank_imbalance=1.0, dropped=0.5)
