"""Learning rates that follow the batch: the factor, what it moves, and what check prints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaaccum.errors import ConfigError
from megaaccum.optim.lr_schedule import build
from megaaccum.step.result import StepResult
from megaaccum.step.transaction import Transaction
from tests.support.configs import plan

RATES = dict(lr=1e-3, min_lr=1e-4, lr_warmup_init=1e-5, decoupled_lr=2e-3, decoupled_min_lr=2e-4)
RATES |= dict(muon_scalar_lr=5e-4)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        (dict(), 1.0),
        (dict(lr_scaling="linear", lr_reference_batch_size=16), 4.0),
        (dict(lr_scaling="sqrt", lr_reference_batch_size=16), 2.0),
        (dict(lr_scaling="sqrt", lr_reference_tokens=16 * 64), 2.0),
        (dict(lr_scaling="linear", lr_reference_batch_size=128), 0.5),
    ],
)
def test_every_rate_and_its_floor_is_scaled_once_and_nothing_else(keys, factor) -> None:
    given = plan(2, pp_microbatches=None, global_batch_size=64, optimizer="muon", **RATES, **keys)
    scaled = given.config.optimizer
    assert {name: getattr(scaled, name) for name in RATES} == {name: rate * factor for name, rate in RATES.items()}
    plain = plan(2, pp_microbatches=None, global_batch_size=64, optimizer="muon", **RATES).config.optimizer
    for name in ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"):
        assert getattr(scaled, name) == getattr(plain, name)
    assert given.written is not None
    assert given.written.optimizer.lr == 1e-3


def test_under_a_ramp_the_rate_follows_the_batch_of_the_step_if_asked() -> None:
    keys = dict(
        pp_microbatches=1, grad_accum_steps=4, batch_warmup_steps=3, lr_scaling="sqrt", lr_reference_batch_size=4,
        lr_decay_style="constant", lr=1e-3,
    )  # fmt: skip
    for follows, expected in ((False, [1.0] * 5), (True, [0.25**0.5, 0.5**0.5, 0.75**0.5, 1.0, 1.0])):
        settled = plan(**keys, lr_scaling_follows_rampup=follows)
        groups: list[dict] = [{}]
        schedule, rates, consumed = build(SimpleNamespace(param_groups=groups), settled.config, settled.ramp), [], 0
        for _ in expected:
            rates.append(groups[0]["lr"])
            assert groups[0]["lr"] == schedule.lr
            size = settled.ramp.size_at(consumed)
            schedule.step(size)
            consumed += size
            schedule.scale_to_batch(settled.ramp.size_at(consumed))
        assert rates == pytest.approx([1e-3 * each for each in expected], rel=1e-12)


@pytest.mark.parametrize(
    ("policy", "factors"),
    [("consumed", [0.25, 0.5, 0.75, 1.0]), ("retried", [0.25, 0.25, 0.25, 0.5])],
)
def test_a_skipped_step_moves_the_factor_with_the_batch_and_never_the_schedule(policy, factors) -> None:
    """Two skipped steps, then one that counts: every step has the rate of its own batch."""
    settled = plan(
        pp_microbatches=1, grad_accum_steps=4, batch_warmup_steps=3, lr_scaling="linear", lr_reference_batch_size=4,
        lr_decay_style="linear", lr=1e-3, min_lr=0.0, lr_decay_iters=10, train_iters=10,
        lr_scaling_follows_rampup=True, skipped_samples=policy, nonfinite="skip",
    )  # fmt: skip
    groups: list[dict] = [{}]
    schedule = build(SimpleNamespace(param_groups=groups), settled.config, settled.ramp)
    transaction = Transaction(settled, schedule)
    position, rates = [], []
    for skipped in (True, True, False):
        rates.append(groups[0]["lr"])
        position.append(schedule.state_dict()["num_steps"])
        result = StepResult(step=1, loss=1.0, weight=1.0, grad_norm=1.0, skipped=skipped)
        assert transaction.commit(result, groups).lr == rates[-1]
    assert position == [0, 0, 0] and schedule.state_dict()["num_steps"] > 0
    assert rates == pytest.approx([1e-3 * factor for factor in factors[:3]], rel=1e-12)
    share = 1 - schedule.state_dict()["num_steps"] / settled.ramp.samples_after(10)
    assert groups[0]["lr"] == pytest.approx(1e-3 * share * factors[3], rel=1e-12)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (dict(lr_scaling="sqrt"), "needs one reference batch, but none is given"),
        (
            dict(lr_scaling="sqrt", lr_reference_batch_size=8, lr_reference_tokens=8),
            "lr_reference_batch_size and lr_reference_tokens is given",
        ),
        (dict(lr_scaling="linear", lr_reference_batch_size=0), "lr_reference_batch_size is 0: it must be at least 1"),
        (
            dict(lr_reference_batch_size=8),
            "lr_reference_batch_size: no effect with lr_scaling none: set lr_scaling to linear or sqrt",
        ),
    ],
)
def test_a_scaling_that_cannot_be_is_one_message(keys, text) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(**keys)
    (problem,) = raised.value.problems
    assert text in problem
