"""FP32 sums of BF16 gradients, with a cast where the bits need one and nowhere else."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megaaccum.sharding.fp32_sums import Fp32Sums


class Model(torch.nn.Module):
    """One matrix that a forward uses once, and one that it uses `times`."""

    def __init__(self, times: int, recompute: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.once, self.often = (torch.nn.Linear(24, 24, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.times, self.recompute = times, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.once, x, use_reentrant=True) if self.recompute else self.once(x)
        for _ in range(self.times):
            x = torch.tanh(self.often(x))
        return x


def sums(model: Model, *, steps: int, microbatches: int, in_place: bool) -> list[torch.Tensor]:
    """Gradients of each step, by Fp32Sums, or by autograd's own cast."""
    params, found = list(model.parameters()), []
    held = Fp32Sums(params, [model]) if in_place else None
    for param in params:
        param.grad_dtype = torch.float32
    for step in range(steps):
        for param in params:
            param.grad = None
        if held is not None:
            held.begin()
        for microbatch in range(microbatches):
            torch.manual_seed(100 * step + microbatch)
            x = torch.randn(7, 24, dtype=torch.bfloat16, requires_grad=True)
            model(x).float().square().sum().backward()
        found += [param.grad for param in params if param.grad is not None]
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_sums_have_the_bits_of_cast_and_add(times, recompute):
    cast, added = (
        sums(Model(times, recompute), steps=2, microbatches=4, in_place=in_place) for in_place in (False, True)
    )
    assert len(cast) == 4 and all(each.dtype is torch.float32 for each in added)
    assert all(map(torch.equal, cast, added))


def test_the_uses_of_a_matrix_would_be_rounded_without_the_cast(monkeypatch):
    cast = sums(Model(3), steps=1, microbatches=4, in_place=False)
    monkeypatch.setattr(Fp32Sums, "is_used_once", lambda *args, **keys: True)
    rounded = sums(Model(3), steps=1, microbatches=4, in_place=True)
    assert torch.equal(cast[0], rounded[0]) and not torch.equal(cast[1], rounded[1])


def test_a_matrix_of_two_modules_is_used_twice_whatever_a_checkpoint_hides():
    model = Model(1, recompute=True)
    model.often.weight = model.once.weight
    held = Fp32Sums(model.parameters(), [model])
    model(torch.randn(2, 24, dtype=torch.bfloat16, requires_grad=True))
    assert not held.is_used_once(model.once.weight, seen=False)


def test_a_hidden_use_is_not_taken_for_one_that_was_seen():
    model = Model(1, recompute=True)
    held = Fp32Sums(model.parameters(), [model])
    model(torch.randn(2, 24, dtype=torch.bfloat16, requires_grad=True))
    assert held.is_used_once(model.once.weight, seen=False)
    assert not held.is_used_once(model.once.weight, seen=True)
    assert held.is_used_once(model.often.weight, seen=True)
