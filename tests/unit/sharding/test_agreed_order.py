"""Turns of reductions: of gradients from several streams, of those that do not come, and after the backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.platform import cpu
from megaaccum.sharding.agreed_order import AgreedOrder


def order_of(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[AgreedOrder, torch.nn.Linear]:
    """An order over a layer's weight and bias on the first of its ranks; `happened` gets the names as they are
    reduced."""
    chunk: Any = torch.nn.Linear(2, 2)
    chunk.config = SimpleNamespace(moe_shared_expert_overlap=True)
    plan: Any = SimpleNamespace(
        layout=SimpleNamespace(tp=1, etp=1, ep=1, splits_backward=False),
        config=SimpleNamespace(parallel=SimpleNamespace(overlap_moe_expert_parallel_comm=False)),
    )
    groups: Any = SimpleNamespace(dp_cp=None)
    names = {id(param): name for name, param in chunk.named_parameters()}
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    return AgreedOrder(plan, groups, [chunk], chunk.parameters(), lambda each: happened.append(names[id(each)])), chunk


def test_a_gradient_of_another_stream_is_waited_for_before_its_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's gradients are sums of a stream of their own (moe_shared_expert_overlap)."""
    happened: list[str] = []

    def stream(name: str) -> Any:
        event = SimpleNamespace(wait=lambda: happened.append(f"wait for {name}"))
        return lambda: SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(cpu, "device", lambda: torch.device("cpu"))
    order, chunk = order_of(happened, monkeypatch)
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


@pytest.mark.parametrize(
    ("uses", "on_another_rank", "waits"),
    [
        ((4, 4), (4, 4), False),
        ((8, 4), (8, 4), False),  # twice in every micro-batch
        ((4, 0), (4, 0), False),  # by none, on no rank
        ((4, 3), (4, 3), True),
        ((4, 4), (4, 2), True),
        ((4, 2), (4, 4), True),
    ],
)
def test_reductions_wait_for_the_end_if_microbatches_use_different_parameters(
    monkeypatch: pytest.MonkeyPatch, uses: tuple[int, int], on_another_rank: tuple[int, int], waits: bool
) -> None:
    """A CPU's reduction holds up the backward. A gradient that does not come is reduced at the end, each once."""
    theirs = torch.tensor([on_another_rank, [-count for count in on_another_rank]])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda most, **_: most.copy_(most.maximum(theirs)))
    happened: list[str] = []
    order, chunk = order_of(happened, monkeypatch)
    order.begin()
    assert order.counts_uses
    order.uses.update({id(chunk.weight): uses[0], id(chunk.bias): uses[1]})
    for param in (chunk.bias, chunk.weight):
        order.came(param)
    assert happened == []
    order.end()
    assert happened == ["bias", "weight"] and not order.counts_uses
    happened.clear()
    order.begin()
    order.came(chunk.bias)
    assert happened == ([] if waits else ["bias"])
    order.end()
    assert happened == ["bias", "weight"]
