"""The scale of Megatron's side losses in each micro-batch's backward."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megaaccum.step.loss import Divisor
from megaaccum.step.microbatches import Microbatches
from megaaccum.step.side_losses import SideLosses


def test_a_scale_that_comes_back_is_what_it_was(monkeypatch):
    """Megatron keeps the first tensor that it is given and copies later scales into it."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    config = SimpleNamespace(num_moe_experts=4)
    sides = SideLosses([SimpleNamespace(config=config)])  # type: ignore[list-item]
    weights = [3.0, 1.0, 3.0]
    batch = Microbatches(forward_step_func=lambda *_: None, data=[None] * 3, count=3, tokens=[4] * 3, weights=weights)  # type: ignore[arg-type, return-value]
    sides.begin_attempt(Divisor.at_commit(reduction_divisor=2), 1.0)
    sides.begin_flush(batch)
    seen = []
    for index in range(3):
        MoEAuxLossAutoScaler.set_loss_scale(config.moe_grad_scale_func())
        sides.begin_backward(0, index)
        seen.append(float(MoEAuxLossAutoScaler.main_loss_backward_scale))  # type: ignore[arg-type]
    assert seen == [2 * weight / 4 for weight in weights]


def test_a_later_call_of_a_step_has_scales_of_its_own(monkeypatch):
    """Its first micro-batch only pads it, so the flush begins with the scales of the second. A step of one micro-batch
    has a whole coefficient."""
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        monkeypatch.setattr(scaler, "main_loss_backward_scale", torch.ones((), dtype=torch.float64))
    config = SimpleNamespace(num_moe_experts=4, moe_aux_loss_coeff=0.1, mtp_num_layers=1)
    sides = SideLosses([SimpleNamespace(config=config)])  # type: ignore[list-item]
    whole = Microbatches(
        forward_step_func=lambda *_: None,  # type: ignore[arg-type, return-value]
        data=range(5), count=5, tokens=[4] * 5, weights=[3.0, 1.0, 9.0, 2.0, 5.0],
        token_weights=[1.0, 1.0, 0.5, 0.25, 0.125], dummies=frozenset({2}),
    )  # fmt: skip

    def scales() -> tuple[float, float]:
        held = MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale
        return float(held[0]), float(held[1])  # type: ignore[arg-type]

    sides.begin_attempt(Divisor.at_commit(reduction_divisor=2), 8.0)
    sides.begin_flush(whole.part(0, 2))
    assert sides.weighed == (4.0, 2)
    sides.begin_flush(whole.part(2, 5))
    assert sides.weighed == (11.0, 4)
    assert scales() == (16 * 2 / 4, 16 * 0.25) == (config.moe_grad_scale_func(), config.mtp_grad_scale_func())
    for index, expected in {2: (0.0, 0.0), 3: (16 * 2 / 4, 16 * 0.25), 4: (16 * 5 / 4, 16 * 0.125)}.items():
        sides.begin_backward(0, index)
        assert scales() == expected
    sides.begin_flush(whole.part(2, 3))
    assert scales() == (0.0, 0.0)
    sides.begin_attempt(Divisor.known(14.0, 1, reduction_divisor=1), 1.0)
    sides.begin_flush(whole.part(0, 1))
    assert scales() == (pytest.approx(1 / 4, rel=1e-15), pytest.approx(1 / 14, rel=1e-15))


def test_an_indexers_loss_is_a_sum_over_tokens_as_the_main_one(monkeypatch):
    """Sparse attention's, whose scale Megatron (0.19) keeps in a tensor of its own."""
    monkeypatch.setattr(DSAIndexerLossAutoScaler, "main_loss_backward_scale", None)
    config = SimpleNamespace(experimental_attention_variant="dsa")
    sides = SideLosses([SimpleNamespace(config=config)])  # type: ignore[list-item]
    batch = Microbatches(forward_step_func=lambda *_: None, data=[None] * 3, count=3, tokens=[4] * 3)  # type: ignore[arg-type, return-value]
    batch = replace(batch, dummies={1: None})
    sides.begin_attempt(Divisor.known(7.0, 2, reduction_divisor=2), 8.0)
    sides.begin_flush(batch)
    seen = []
    for index in range(3):
        config.experimental_attention_variant_loss_scale_func(torch.ones(1))
        sides.begin_backward(0, index)
        seen.append(float(DSAIndexerLossAutoScaler.main_loss_backward_scale))  # type: ignore[arg-type]
    assert seen == [8 * 2 / 7, 0.0, 8 * 2 / 7]


def test_scales_are_not_rounded(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(()))
    config = SimpleNamespace(num_moe_experts=4)
    sides = SideLosses([SimpleNamespace(config=config)])  # type: ignore[list-item]
    batch = Microbatches(forward_step_func=lambda *_: None, data=[None], count=1, tokens=[4])  # type: ignore[arg-type, return-value]
    sides.begin_attempt(Divisor.known(3.0, 7, reduction_divisor=1), 1.0)
    sides.begin_flush(batch)
    MoEAuxLossAutoScaler.set_loss_scale(config.moe_grad_scale_func())
    assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == pytest.approx(1 / 28, rel=1e-15)  # type: ignore[arg-type]


def test_lengths_alone_give_each_micro_batch_its_scale(monkeypatch):
    """With N known, each counts as much, by a mean over its own tokens; also if its weight is its number of tokens."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones((), dtype=torch.float64))
    config = SimpleNamespace(num_moe_experts=4)
    sides = SideLosses([SimpleNamespace(config=config)])  # type: ignore[list-item]
    batch = Microbatches(forward_step_func=lambda *_: None, data=[None] * 3, count=3, tokens=[4, 8, 2])  # type: ignore[arg-type, return-value]
    sides.begin_attempt(Divisor.known(14.0, 3, reduction_divisor=1), 1.0)
    sides.begin_flush(batch)
    for index, tokens in enumerate(batch.tokens):
        sides.begin_backward(0, index)
        scale = float(MoEAuxLossAutoScaler.main_loss_backward_scale)  # type: ignore[arg-type]
        assert scale * tokens == pytest.approx(1 / 3, rel=1e-15)


@pytest.mark.parametrize(("expected", "times"), [(None, "2 times"), (3.0, "1.5 times"), (2.0, "")])
def test_a_step_says_by_how_much_its_coefficients_were_off(expected, times):
    """Three micro-batches of four tokens, two of them unmasked, whose weights come last."""
    sides = SideLosses([SimpleNamespace(config=SimpleNamespace(num_moe_experts=4, moe_z_loss_coeff=0.1))])  # type: ignore[list-item]
    batch = Microbatches(forward_step_func=lambda *_: None, data=[None] * 3, count=3, tokens=[4] * 3, expected=expected)  # type: ignore[arg-type, return-value]
    sides.begin_attempt(Divisor.at_commit(reduction_divisor=1), 1.0)
    sides.begin_flush(batch)
    sides.compare(6.0, *sides.weighed)
    assert (times in sides.note and "expected_tokens 2" in sides.note) if times else sides.note == ""
    sides.begin_attempt(Divisor.known(6.0, 3, reduction_divisor=1), 1.0)
    sides.begin_flush(batch)
    sides.compare(6.0, *sides.weighed)
    assert sides.note == ""
