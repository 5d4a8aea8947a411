"""A gradient that waits for its turn is handed over from the hook of another one, and perhaps from another stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.platform import cpu
from megaaccum.sharding.agreed_order import AgreedOrder


def test_a_gradient_of_another_stream_is_waited_for_before_its_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's gradients are sums of a stream of their own (moe_shared_expert_overlap)."""
    happened: list[str] = []

    def stream(name: str) -> Any:
        event = SimpleNamespace(wait=lambda: happened.append(f"wait for {name}"))
        return lambda: SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(cpu, "device", lambda: torch.device("cpu"))
    chunk: Any = torch.nn.Linear(2, 2)
    chunk.config = SimpleNamespace(moe_shared_expert_overlap=True)
    plan: Any = SimpleNamespace(
        layout=SimpleNamespace(tp=1, etp=1, ep=1, splits_backward=False),
        config=SimpleNamespace(parallel=SimpleNamespace(overlap_moe_expert_parallel_comm=False)),
    )
    groups: Any = SimpleNamespace(dp_cp=None)
    names = {id(param): name for name, param in chunk.named_parameters()}
    order = AgreedOrder(plan, groups, [chunk], chunk.parameters(), lambda param: happened.append(names[id(param)]))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    order.begin()
    for param in (chunk.bias, chunk.weight):  # the first reduction, whose order holds
        monkeypatch.setattr(torch.cuda, "current_stream", stream("the first"))
        order.came(param)
    order.end()
    happened.clear()
    order.begin()
    for param, of in ((chunk.weight, "the shared expert"), (chunk.bias, "the layer")):
        monkeypatch.setattr(torch.cuda, "current_stream", stream(of))
        order.came(param)
    assert happened == ["wait for the layer", "bias", "wait for the shared expert", "weight"]
