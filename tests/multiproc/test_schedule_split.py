"""The split of the backward is real: I and W cost what they should, together B, and make the same gradient."""

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import split


def test_flops():
    """With 16 tokens of width 128 attention scores are 2 % of a layer: I has twice those of F, W none."""
    (flops,) = run_ranks(split.count_flops, 1)
    assert flops.input_grad == pytest.approx(flops.forward, rel=0.05)
    assert flops.weight_grad == pytest.approx(flops.forward, rel=0.05)
    assert flops.input_grad + flops.weight_grad == flops.backward


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_equal_to_the_bit(recompute, dtype):
    (whole,), (apart,) = (run_ranks(split.gradients, 1, each, recompute, dtype) for each in (False, True))
    assert whole.keys() == apart.keys()
    for name, grad in whole.items():
        assert torch.equal(grad, apart[name]), name
        assert grad.dtype is (torch.float64 if dtype == "fp64" else torch.float32)


def test_without_gradients_and_with_frozen_weights():
    assert run_ranks(split.evaluation_and_frozen, 1) == [(True, True)]


def test_a_weight_gradient_holds_less_than_a_forward_and_then_nothing():
    ((after_forward, after_input_grad, after_weight_grad),) = run_ranks(split.live_after_each_pass, 1)
    assert 0 < after_input_grad < after_forward
    assert after_weight_grad == 0


def test_layers_that_add_their_gradients_by_themselves():
    (text,) = run_ranks(split.refused, 1)
    assert "gradient_accumulation_fusion" in text
    assert "to false" in text
