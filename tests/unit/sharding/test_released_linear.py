"""torch's linear layer with a weight that is released between forward and backward."""

from __future__ import annotations

import weakref

import numpy
import pytest
import torch

from megaaccum.sharding import released_linear


def passed(layer: torch.nn.Linear, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Output, and the gradients of input, weight and bias."""
    torch.manual_seed(3)
    x = torch.randn(*shape, layer.in_features, dtype=layer.weight.dtype, requires_grad=True)
    layer.zero_grad()
    output = layer(x)
    output.backward(torch.randn_like(output))
    return [output, *(each.grad.clone() for each in (x, *layer.parameters()) if each.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_has_torch_s_own_bits(dtype, shape, bias):
    torch.manual_seed(5)
    layer = torch.nn.Linear(33, 17, bias=bias, dtype=dtype)
    plain = passed(layer, shape)
    released_linear.install(torch.nn.ModuleList([layer]))
    assert len(plain) == 3 + bias
    assert all(map(torch.equal, plain, passed(layer, shape)))


def test_a_released_weight_is_not_kept_for_the_backward():
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    for installed in (False, True):
        if installed:
            released_linear.install(layer)
        gathered = numpy.ones((8, 8), dtype=numpy.float32)
        alive, layer.weight.data = weakref.ref(gathered), torch.from_numpy(gathered)
        del gathered
        output = layer(x)
        layer.weight.data = torch.empty(0)  # as ZeRO-3 releases it
        assert (alive() is None) is installed
        layer.weight.data = torch.ones(8, 8)
        output.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 8.0))
        x.grad = None


@pytest.mark.parametrize("bias", [True, False])
def test_its_output_may_be_changed_in_place(bias):
    """By a residual and an activation in place: torch refuses both for a view of a custom function."""
    torch.manual_seed(5)
    layer, x = torch.nn.Linear(8, 8, bias=bias), torch.randn(2, 3, 8, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(torch.relu_(layer(x).add_(x)).sum(), x)[0]

    plain = gradient()
    released_linear.install(layer)
    assert torch.equal(plain, gradient())


def test_a_frozen_weight_gets_no_gradient():
    layer = torch.nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    released_linear.install(layer)
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
