"""The gradient's norm, to the precision that its numbers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.observe.noise_scale import NoiseScale
from megaaccum.sharding.base import GradShard
from megaaccum.step.grad_norm import own_square

ALONE: Any = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))


def square_of(*grads: torch.Tensor) -> float:
    shards = [GradShard(str(at), torch.nn.Parameter(torch.empty(0)), each, 0) for at, each in enumerate(grads)]
    backend: Any = SimpleNamespace(shards=lambda: iter(shards))
    return float(own_square(backend, ALONE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_in_host_memory_loses_no_squares(dtype):
    """Added up in FP32, one after another, as an offloaded optimizer's were, 1 % of the norm is lost."""
    large = torch.full((2**24,), 1e-3, dtype=dtype)
    exact = 2**24 * float(large[0]) ** 2
    assert square_of(large, torch.ones(3)) == pytest.approx(exact + 3, rel=1e-6)
    assert float(torch.linalg.vector_norm(large.float())) ** 2 < 0.995 * exact  # torch's own: if it fails, cut no more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_16_bit_numbers_has_more_than_16_bits(dtype):
    small = torch.full((1000,), 1.0, dtype=dtype)
    assert square_of(small) == pytest.approx(1000.0, rel=1e-6)
    assert float(torch.linalg.vector_norm(small)) ** 2 != pytest.approx(1000.0, rel=1e-4)


def test_the_noise_scale_takes_the_same_squares():
    meter = NoiseScale([], window=1)
    meter.add(grad := torch.full((2**12, 2**12), 1e-3))
    assert float(meter.square) == pytest.approx(2**24 * float(grad[0, 0]) ** 2, rel=1e-6)


def test_a_value_that_is_not_finite_stays_so():
    for bad in (float("inf"), float("nan")):
        large = torch.zeros(2**17)
        large[-1] = bad
        assert not torch.isfinite(torch.tensor(square_of(large)))
