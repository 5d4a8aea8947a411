"""The state that optimizers of a user's own are found to keep."""

import pytest
import torch

from megaaccum.upstream import adam

BOTH = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("kind", "keys", "tensors", "others", "count"),
    [
        (torch.optim.SGD, {}, (), (), None),
        (torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",), (), None),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, None, ("a state that does not begin at zero",), None),
        (torch.optim.AdamW, {"amsgrad": True}, (*BOTH, "max_exp_avg_sq"), (), torch.Tensor),
        (torch.optim.RMSprop, {"centered": True}, ("grad_avg", "square_avg"), (), torch.Tensor),
        (torch.optim.NAdam, {}, BOTH, ("mu_product",), torch.Tensor),
        (torch.optim.Rprop, {}, None, ("a state that does not begin at zero",), torch.Tensor),
    ],
)
def test_what_an_optimizer_keeps(kind, keys, tensors, others, count):
    layer = torch.nn.Linear(3, 4)
    layer(torch.ones(3)).sum().backward()
    optimizer = kind(layer.parameters(), lr=0.1, **keys)
    before, groups = [param.clone() for param in layer.parameters()], list(optimizer.param_groups)
    kept = adam.look_at(optimizer)
    assert (kept.others, kept.count, kept.cuts) == (others, count, True)
    assert tensors is None or kept.tensors == tensors
    assert all(map(torch.equal, before, layer.parameters())), "gradients that are there are not stepped"
    assert optimizer.param_groups == groups and not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_of_whole_parameters(kind):
    assert not adam.look_at(kind([torch.nn.Parameter(torch.ones(3, 4))])).cuts


def test_an_optimizer_that_takes_a_closure():
    with pytest.raises(TypeError, match="closure"):
        adam.look_at(torch.optim.LBFGS(torch.nn.Linear(3, 4).parameters()))
