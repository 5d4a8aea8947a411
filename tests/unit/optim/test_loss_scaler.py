"""The loss scale moves as torch's and Megatron's do, survives a checkpoint, and is there for FP16 alone."""

from __future__ import annotations

import random

import pytest
import torch

from megaaccum.errors import CheckpointError
from megaaccum.optim.loss_scaler import LossScaler, build
from tests.support.configs import plan

STEPS = 50


def verdicts(seed: int, share: float) -> list[bool]:
    """Which of STEPS steps overflow; about `share` of them."""
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(STEPS)]


def of_torch(overflows: list[bool], *, scale: float, window: int) -> list[float]:
    """The scales of torch.amp.GradScaler for these verdicts, the first one included."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=window)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = [scale]
    for overflow in overflows:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def of_megatron(overflows: list[bool], *, scale: float, minimum: float, window: int, hysteresis: int) -> list[float]:
    """The scales of Megatron-core's DynamicGradScaler, whose tensors are made without CUDA."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scaler = DynamicGradScaler.__new__(DynamicGradScaler)
    scaler._scale = torch.tensor([scale])
    scaler.min_scale, scaler.growth_factor = torch.tensor([minimum]), torch.tensor([2.0])
    scaler.backoff_factor, scaler.growth_interval, scaler.hysteresis = torch.tensor([0.5]), window, hysteresis
    scaler._growth_tracker, scaler._hysteresis_tracker = 0, hysteresis
    scales = [scale]
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(float(scaler._scale))
    return scales


def of_ours(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    scales = [scaler.scale]
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize("window", [1, 3, 2000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_fifty_steps_equal_torchs(window: int, share: float) -> None:
    overflows = verdicts(seed=window, share=share)
    ours = of_ours(LossScaler(65536.0, minimum=2.0**-60, window=window), overflows)
    assert ours == of_torch(overflows, scale=65536.0, window=window)
    assert (len(set(ours)) > 1) == (any(overflows) or window < STEPS)


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_fifty_steps_with_hysteresis_and_a_floor_equal_megatrons(hysteresis: int) -> None:
    overflows = verdicts(seed=7, share=0.4)
    numbers = dict(minimum=1024.0, window=3, hysteresis=hysteresis)
    assert of_ours(LossScaler(65536.0, **numbers), overflows) == of_megatron(overflows, scale=65536.0, **numbers)


def test_the_floor_is_where_an_overflow_is_no_search_any_more() -> None:
    scaler = LossScaler(4.0, minimum=2.0, window=10, hysteresis=1)
    assert scaler.can_back_off
    scaler.update(True)
    assert scaler.scale == 2.0
    assert not scaler.can_back_off
    assert not LossScaler(4.0).can_back_off


def test_a_fixed_scale_does_not_move() -> None:
    assert set(of_ours(LossScaler(128.0), verdicts(seed=1, share=0.5))) == {128.0}


def test_a_resumed_sequence_is_the_uninterrupted_one() -> None:
    overflows, numbers = verdicts(seed=3, share=0.3), dict(window=3, hysteresis=2)
    whole = of_ours(LossScaler(65536.0, **numbers), overflows)
    first = LossScaler(65536.0, **numbers)
    before = of_ours(first, overflows[:20])
    second = LossScaler(1.0, **numbers)
    second.load_state_dict(first.state_dict())
    assert before + of_ours(second, overflows[20:])[1:] == whole


def test_a_window_that_a_resume_makes_shorter_is_over() -> None:
    before, after = LossScaler(8.0, window=9), LossScaler(1.0, window=3)
    of_ours(before, [False] * 5)
    after.load_state_dict(before.state_dict())
    after.update(overflow=False)
    assert after.scale == 16.0


def test_a_damaged_state_is_named() -> None:
    with pytest.raises(CheckpointError, match="lacks good_steps"):
        LossScaler(1.0).load_state_dict({"scale": 1.0, "overflows_left": 1})


def test_only_fp16_has_a_scaler() -> None:
    assert build(plan(bf16=True)) is None
    assert build(plan()) is None
    dynamic = build(plan(fp16=True))
    assert dynamic is not None
    assert (dynamic.scale, dynamic.is_dynamic) == (65536.0, True)
    fixed = build(plan(fp16=True, loss_scale=64.0))
    assert fixed is not None
    assert (fixed.scale, fixed.is_dynamic) == (64.0, False)
