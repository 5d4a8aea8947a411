"""Which experts are cold, and what becomes of their gradients, on one rank and without an engine."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megaaccum.platform import cpu
from megaaccum.sharding.cold_experts import _AHEAD, ColdExperts, ExpertLayer


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
        cold.offload(scale)
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
        cold.offload(rarely)
        assert rarely.grad is None
        assert len(list(cold.tensors())) == (value > 0), "zeros take no memory"
    often.grad = torch.tensor([7.0])
    cold.offload(often)
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
        cold.offload(experts.scales[0])
    cold.bring_back(experts.scales[0])
    assert experts.scales[0].grad.isnan().all()


def test_what_a_given_up_attempt_left_is_dropped():
    experts, cold = made(fewer_than=1, steps=1)
    step(experts, cold, 0, 2)
    cold.begin_step()
    experts.scales[0].grad = torch.ones(1)
    cold.offload(experts.scales[0])
    assert list(cold.tensors())
    cold.begin_step()
    assert not list(cold.tensors())


# --- a GPU that is late: a copy lands when its event is waited for ---------------------------------------------------


class Stream:
    """Work that is launched and not done."""

    def __init__(self):
        self.work: list = []

    def record_event(self):
        return SimpleNamespace(synchronize=partial(self._work_off, len(self.work)))

    def _work_off(self, count: int) -> None:
        for index, each in enumerate(self.work[:count]):
            each()
            self.work[index] = lambda: None


class Pinned(torch.Tensor):
    """Host memory that a copy has not reached holds what it held before."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False):
        assert non_blocking, "the host would wait"
        torch.cuda.current_stream().work.append(partial(super().copy_, source.clone()))
        return self


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """compute, copies: streams. kept: gradients whose memory waits for a stream. pinned: elements of each buffer."""
    empty, seen = torch.empty, SimpleNamespace(compute=Stream(), copies=Stream(), kept=[], pinned=[])
    seen.current = seen.compute

    def pinned(shape, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made = empty(shape, dtype=dtype)
        seen.pinned.append(made.numel())
        return made.fill_(float("nan") if dtype.is_floating_point else False).as_subclass(Pinned)

    @contextmanager
    def on(stream: Stream):
        seen.current = stream
        yield
        seen.current = seen.compute

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda grad, stream: seen.kept.append((grad.tolist(), stream)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: seen.copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: seen.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    return seen


def with_a_cold_expert() -> tuple[torch.nn.Parameter, ColdExperts]:
    experts, cold = made(fewer_than=1, steps=1)
    step(experts, cold, 0, 2)
    cold.begin_step()
    return experts.scales[0], cold


def take(cold: ColdExperts, param: torch.nn.Parameter, *values: float) -> None:
    for value in values:
        param.grad = torch.tensor([value])
        cold.offload(param)
        assert param.grad is None


def waited_for(stream: Stream) -> int:
    return sum(not isinstance(each, partial) for each in stream.work)


def test_the_host_is_some_gradients_ahead_of_the_copies(gpu):
    param, cold = with_a_cold_expert()
    values = [0.1 * number for number in range(1, 2 * _AHEAD + 2)]
    take(cold, param, *values[:_AHEAD])
    assert waited_for(gpu.compute) == 0
    assert not gpu.copies.work
    take(cold, param, *values[_AHEAD : 2 * _AHEAD])
    assert (waited_for(gpu.compute), waited_for(gpu.copies), len(gpu.copies.work)) == (_AHEAD, 0, _AHEAD)
    take(cold, param, values[-1])
    assert waited_for(gpu.copies) == 1
    cold.bring_back(param)
    total = torch.tensor([0.0])
    for value in values:
        total += torch.tensor([value])
    assert torch.equal(torch.tensor(param.grad.tolist()), total)
    assert gpu.kept == [([pytest.approx(value)], gpu.copies) for value in values]
    assert not list(cold.tensors())


def test_zeros_are_not_copied(gpu):
    param, cold = with_a_cold_expert()
    take(cold, param, *[0.0] * 3 * _AHEAD)
    cold.bring_back(param)
    assert param.grad is None
    assert not gpu.copies.work


def test_a_new_attempt_does_not_get_what_was_under_way(gpu):
    param, cold = with_a_cold_expert()
    take(cold, param, *[1.0] * 3 * _AHEAD)
    assert list(cold.tensors())
    cold.begin_step()
    assert not list(cold.tensors())
    take(cold, param, 3.0)
    cold.bring_back(param)
    assert param.grad == 3.0


def test_a_sum_that_does_not_wait_is_seen(gpu, monkeypatch: pytest.MonkeyPatch):
    param, cold = with_a_cold_expert()
    monkeypatch.setattr(gpu.copies, "record_event", lambda: SimpleNamespace(synchronize=lambda: None))
    take(cold, param, 1.0, 2.0)
    cold.bring_back(param)
    assert param.grad.isnan().all()
