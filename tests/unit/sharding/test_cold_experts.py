"""Which experts are cold, and what becomes of their gradients, on one rank and without an engine."""

from __future__ import annotations

from collections import deque

import torch
from torch.utils.checkpoint import checkpoint

from megaaccum.sharding.cold_experts import ColdExperts, ExpertLayer


class Experts(torch.nn.Module):
    """Called as Megatron's: one number per expert, times its tokens."""

    def __init__(self, count: int):
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, tokens, tokens_per_expert, probs):
        parts = tokens.split(tokens_per_expert.tolist())
        return torch.cat([part * scale for part, scale in zip(parts, self.scales, strict=True)])


def made(*, fewer_than: int, steps: int, count: int = 2) -> tuple[Experts, ColdExperts]:
    experts = Experts(count)
    layer = ExpertLayer([[scale] for scale in experts.scales], deque(maxlen=steps))
    experts.register_forward_pre_hook(layer.count)
    return experts, ColdExperts([layer], fewer_than=fewer_than)


def forward(experts: Experts, *routed: int) -> torch.Tensor:
    tokens = torch.arange(1.0, sum(routed) + 1)
    return experts(tokens, torch.tensor(routed), None)


def step(experts: Experts, cold: ColdExperts, *routed: int) -> None:
    cold.begin_step()
    forward(experts, *routed)
    cold.end_step()


def found(experts: Experts, cold: ColdExperts) -> list[int]:
    """The experts that are cold in the next step: those whose gradient is taken."""
    cold.begin_step()
    for scale in experts.scales:
        scale.grad = torch.ones(1)
        cold.take(scale)
    taken = [number for number, scale in enumerate(experts.scales) if scale.grad is None]
    cold.begin_step()
    return taken


def test_cold_is_what_had_fewer_tokens_in_the_last_steps():
    experts, cold = made(fewer_than=4, steps=2)
    assert found(experts, cold) == []
    step(experts, cold, 3, 1)
    assert found(experts, cold) == [], "there is no history of two steps yet"
    step(experts, cold, 1, 2)
    assert found(experts, cold) == [1], "4 are not fewer than 4, and 3 are"
    step(experts, cold, 0, 2)
    assert found(experts, cold) == [0], "the first step is forgotten: 1 and 4"


def test_a_layer_that_does_not_run_has_no_token():
    experts, cold = made(fewer_than=1, steps=1)
    cold.begin_step()
    cold.end_step()
    assert found(experts, cold) == [0, 1]


def test_all_forwards_of_a_step_count_and_no_other():
    """Not an evaluation's, not one that is computed again inside a backward, not those of a step that began again."""
    experts, cold = made(fewer_than=4, steps=1)
    cold.begin_step()
    forward(experts, 9, 9)
    cold.begin_step()
    forward(experts, 2, 3)
    experts.eval()
    forward(experts, 9, 9)
    experts.train()
    tokens = torch.ones(2, requires_grad=True)
    output = checkpoint(lambda part: experts(part, torch.tensor([1, 1]), None), tokens, use_reentrant=True)
    output.sum().backward()
    cold.end_step()
    assert found(experts, cold) == [0], "3 tokens, and 4"


def test_gradients_are_added_up_off_the_parameter_and_come_back_once():
    experts, cold = made(fewer_than=1, steps=1)
    step(experts, cold, 0, 2)
    cold.begin_step()
    rarely, often = experts.scales
    for value in (0.0, 0.1, 0.2, 0.3):
        rarely.grad = torch.tensor([value])
        cold.take(rarely)
        assert rarely.grad is None
        assert len(list(cold.tensors())) == (value > 0), "zeros take no memory"
    often.grad = torch.tensor([7.0])
    cold.take(often)
    cold.bring_back(often)
    cold.bring_back(rarely)
    assert often.grad == 7.0
    assert torch.equal(rarely.grad, torch.tensor([0.1]) + torch.tensor([0.2]) + torch.tensor([0.3]))
    assert not list(cold.tensors())


def test_numbers_that_are_not_finite_are_not_dropped():
    experts, cold = made(fewer_than=1, steps=1)
    step(experts, cold, 0, 2)
    cold.begin_step()
    for value in (float("nan"), 1.0):
        experts.scales[0].grad = torch.tensor([value])
        cold.take(experts.scales[0])
    cold.bring_back(experts.scales[0])
    assert experts.scales[0].grad.isnan().all()


def test_what_a_given_up_attempt_left_is_dropped():
    experts, cold = made(fewer_than=1, steps=1)
    step(experts, cold, 0, 2)
    cold.begin_step()
    experts.scales[0].grad = torch.ones(1)
    cold.take(experts.scales[0])
    assert list(cold.tensors())
    cold.begin_step()
    assert not list(cold.tensors())
