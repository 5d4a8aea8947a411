"""The counters of a run, and its learning rate: which steps move them, and what a checkpoint brings back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaaccum.optim.lr_schedule import build
from megaaccum.step.result import StepResult
from megaaccum.step.transaction import Transaction
from tests.support.configs import plan

RAMP = dict(pp_microbatches=1, grad_accum_steps=4, batch_warmup_steps=3, nonfinite="skip", lr_decay_style="constant")


def result(*, skipped: bool = False) -> StepResult:
    return StepResult(step=1, loss=1.0, weight=1.0, grad_norm=1.0, skipped=skipped)


@pytest.mark.parametrize("policy", ["consumed", "retried"])
def test_each_step_is_counted_by_what_became_of_it(policy):
    transaction = Transaction(plan(**RAMP, skipped_samples=policy), None)
    seen = []
    for skipped in (False, True, True, False):
        following = transaction.next_batch
        made = transaction.commit(result(skipped=skipped), [{"lr": 0.25}, {"lr": 0.5}])
        assert made.lr == 0.25, "of the first group, without a schedule"
        assert made.advanced == (not skipped or policy == "consumed")
        assert not made.advanced or transaction.batch == following
        seen.append(
            (transaction.step, transaction.num_updates, transaction.skipped_steps, transaction.consumed_samples)
        )
    consumed = [(1, 1, 0, 1), (2, 1, 1, 3), (3, 1, 2, 6), (4, 2, 2, 10)]
    assert seen == (consumed if policy == "consumed" else [(1, 1, 0, 1), (1, 1, 1, 1), (1, 1, 2, 1), (2, 2, 2, 3)])


def test_a_schedules_rate_is_that_of_the_step_and_not_of_a_group():
    settled = plan(**RAMP, lr=1e-3)
    groups: list[dict] = [{"max_lr": 5e-3}, {}]
    transaction = Transaction(settled, build(SimpleNamespace(param_groups=groups), settled.config, settled.ramp))
    assert groups[0]["lr"] != groups[1]["lr"]
    assert transaction.commit(result(), groups).lr == pytest.approx(groups[1]["lr"])


def test_a_checkpoint_brings_back_the_counters_and_the_rate_of_its_batch():
    settled = plan(**RAMP, lr=1e-3, lr_scaling="linear", lr_reference_batch_size=4, lr_scaling_follows_rampup=True)

    def fresh() -> tuple[Transaction, list[dict]]:
        groups: list[dict] = [{}]
        return Transaction(settled, build(SimpleNamespace(param_groups=groups), settled.config, settled.ramp)), groups

    saved, groups = fresh()
    for skipped in (False, True):
        saved.commit(result(skipped=skipped), groups)
    saved.last_weight = 7.5
    state = saved.state_dict()
    loaded, groups = fresh()
    assert loaded.state_dict() == {"num_updates": 0, "skipped_steps": 0, "last_weight": 0.0}
    loaded.load_state_dict(state, step=2, consumed_samples=3)
    assert loaded.state_dict() == state == {"num_updates": 1, "skipped_steps": 1, "last_weight": 7.5}
    assert loaded.batch == saved.batch and (loaded.step, loaded.consumed_samples) == (2, 3)
    assert groups[0]["lr"] == pytest.approx(0.75e-3, rel=1e-12), "a batch of 3 of 4"
    without, _ = fresh()
    without.load_state_dict({}, step=2, consumed_samples=3)
    assert without.state_dict() == {"num_updates": 2, "skipped_steps": 0, "last_weight": 0.0}
