"""The host waits for a GPU a few times in a step, however many parameters and micro-batches there are."""

from collections import Counter
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support import host_syncs
from tests.support.parity import Case, Rig

BUDGET = 4
PP = "--pipeline_model_parallel_size {} --pp_microbatches {}"


def test_a_step_of_zero_3_waits_as_often_at_any_size():
    small, large = (
        run_ranks(host_syncs.of_a_step, 4, Case(4, PP.format(2, m), f"--num_layers {layers} --clip_grad 0.01"))
        for m, layers in ((4, 2), (8, 8))
    )
    assert small == large
    for found in small:
        assert 0 < sum(found.values()) <= BUDGET, found
        assert any("loss.py:sums" in place for place in found), "the verdict is read"
        assert any("epilogue synchronize" in place for place in found), "the reduction's stream is waited for once"


def test_stages_between_the_first_and_the_last_put_no_tokens_on_their_device():
    m = 8
    assert run_ranks(host_syncs.uploads, 4, Case(4, PP.format(4, m))) == [2 * m, 0, 0, 2 * m]


def gradients_heard(case: Case) -> tuple[int, set[int]]:
    """(parameters that were heard of beyond those of this rank, how often autograd called for one) in a step."""
    from megaaccum.upstream.pytorch import OnGradient

    heard: Counter[int] = Counter()

    def added(self, param, added=OnGradient._added) -> None:
        heard[id(param)] += 1
        added(self, param)

    with patch.object(OnGradient, "_added", added):
        rig = Rig.of(case)
        rig.train(step=1)
    return len(heard) - len(rig.backend.driver.params), set(heard.values())


@pytest.mark.parametrize(("more", "times"), [("", 1), ("--reproducible layout ", 4)])
def test_autograd_calls_for_a_gradient_once_in_a_step_unless_each_microbatch_is_looked_at(more, times):
    assert run_ranks(gradients_heard, 4, Case(4, PP.format(2, 4) + " " + more)) == [(0, {times})] * 4
