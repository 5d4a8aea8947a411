"""The turns of experts: one order of reductions whatever comes on a rank, zeros for what does not."""

from __future__ import annotations

import pytest
import torch

from megaaccum.errors import FlushError
from megaaccum.executor import wgrad
from megaaccum.sharding.expert_turns import ExpertTurns, before_experts


def module(**children: torch.nn.Module) -> torch.nn.Module:
    found = torch.nn.Module()
    for name, child in children.items():
        found.add_module(name, child)
    return found


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(1, 1, bias=False)


def layer() -> torch.nn.Module:
    experts = torch.nn.ModuleList([linear(), linear()])
    return module(norm=linear(), attention=linear(), mlp=module(router=linear(), experts=experts))


def chunk() -> torch.nn.Module:
    """Two layers: a norm, attention, and a router with two experts."""
    return module(embedding=linear(), layers=torch.nn.ModuleList([layer(), layer()]), head=linear())


def completed(model: torch.nn.Module, came: list[str], *, splits: bool = False, in_pieces: bool = False) -> list[str]:
    """Names in the order in which their gradients are reduced, if those of `came` come in this order."""
    params = {name.removesuffix(".weight"): param for name, param in model.named_parameters()}
    names = {id(param): name for name, param in params.items()}
    found: list[str] = []
    turns = ExpertTurns([model], lambda param: found.append(names[id(param)]), splits=splits, in_pieces=in_pieces)
    turns.begin()
    for name in came:
        turns.came(params[name])
    return found


LAST = ["layers.1.mlp.experts.1", "layers.1.mlp.experts.0"]
IN_TURN = ["layers.1.mlp.experts.0", "layers.1.mlp.experts.1"]


def test_experts_are_reduced_in_the_order_of_the_model_when_their_layer_goes_on():
    before = ["head", "layers.1.mlp.router"]
    after = ["layers.1.attention", "layers.1.norm"]
    expected = [*before, *IN_TURN, *after]
    for experts in (LAST, IN_TURN, LAST[:1], []):
        assert completed(chunk(), [before[0], *experts, before[1], *after]) == expected


def test_a_dense_gradient_of_the_same_module_or_of_no_layer_is_no_sign():
    assert completed(chunk(), ["head", "embedding", "layers.1.mlp.router"]) == [
        "head",
        "embedding",
        "layers.1.mlp.router",
    ]


def test_an_earlier_layer_is_a_sign_for_all_after_it():
    both = ["layers.1.mlp.experts.0", "layers.1.mlp.experts.1", "layers.0.mlp.experts.0", "layers.0.mlp.experts.1"]
    assert completed(chunk(), ["layers.0.attention"]) == [*both, "layers.0.attention"]
    assert completed(chunk(), ["layers.0.mlp.router"]) == [*both[:2], "layers.0.mlp.router"]


def test_what_comes_in_w_has_turns_of_its_own():
    """The last I of a chunk may lie before the W of early micro-batches."""
    model = chunk()
    for name in ("attention", "mlp.experts.0", "mlp.experts.1"):
        wgrad.mark_put_off(model.get_submodule(f"layers.1.{name}").weight)
    came = ["layers.1.norm", *LAST, "layers.1.attention"]
    assert completed(model, came, splits=True) == ["layers.1.norm", *IN_TURN, "layers.1.attention"]
    assert completed(model, came[:1], splits=False) == [*IN_TURN, "layers.1.norm"]


def test_each_reduction_begins_anew():
    model = chunk()
    found: list[torch.nn.Parameter] = []
    turns = ExpertTurns([model], found.append, splits=False, in_pieces=False)
    for _ in range(2):
        turns.begin()
        found.clear()
        turns.came(model.get_submodule("layers.1.norm").weight)
        assert len(found) == 3
        turns.finish(found[0])
        assert len(found) == 3


@pytest.mark.parametrize("late", ["layers.1.mlp.experts.1", "layers.1.attention", "head"])
def test_a_gradient_that_comes_after_its_reduction_is_no_silent_loss(late):
    """Experts after a module before them; a second gradient of a parameter."""
    with pytest.raises(FlushError, match=rf"a gradient of {late}\.weight came after its reduction had begun"):
        completed(chunk(), ["head", "layers.1.attention", late])


def test_parameters_before_the_experts_of_their_layer():
    """A layer without experts has none."""
    dense = module(norm=linear(), mlp=module(fc1=linear()))
    model = module(embedding=linear(), layers=torch.nn.ModuleList([dense, layer(), layer()]))
    names = {id(param): name for name, param in model.named_parameters()}
    assert [names[id(param)] for param in before_experts(model)] == [
        f"layers.{layer}.{name}.weight" for layer in (1, 2) for name in ("norm", "attention")
    ]


def test_what_several_pieces_use_waits_for_the_end():
    assert completed(chunk(), ["head", "layers.1.norm"], in_pieces=True) == [*IN_TURN, "layers.1.norm"]
