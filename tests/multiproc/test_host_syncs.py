"""The host waits for a GPU a few times in a step, however many parameters and micro-batches there are."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import host_syncs
from tests.support.host_syncs import BUDGET
from tests.support.parity import Case, Rig

PP = "--pipeline_model_parallel_size {} --pp_microbatches {}"


def waits(layout: str, *sizes: tuple[int, int], spoiled: bool = False):
    """Counts of each of 4 ranks, for each number of micro-batches and of layers."""
    for m, layers in sizes:
        keys = f"{PP.format(2, m)} --reduce_bucket_size 4000 {layout}"
        case = Case(4, keys, f"--num_layers {layers} --clip_grad 0.01")
        yield run_ranks(host_syncs.of_a_step, 4, case, spoiled)


def apart(found: dict[str, int]) -> tuple[dict[str, int], int]:
    """(the waits that are not for a bucket, the number of those that are)."""
    of_buckets = [place for place in found if ":reduce synchronize" in place or "ipg_grads synchronize" in place]
    return {place: count for place, count in found.items() if place not in of_buckets}, sum(map(found.get, of_buckets))


def test_a_step_of_zero_3_waits_as_often_at_any_size_and_once_for_three_buckets():
    small, large = waits("", (4, 2), (8, 8))
    assert [apart(found)[0] for found, _ in small] == [apart(found)[0] for found, _ in large]
    for found, buckets in (*small, *large):
        others, of_buckets = apart(found)
        assert sum(others.values()) == BUDGET, found
        assert of_buckets <= buckets // 3
        assert any("sums.py:sums" in place for place in found), "the verdict is read"
        assert any("epilogue synchronize" in place for place in found), "the reduction's stream is waited for once"
    assert all(apart(found)[1] > 0 for found, _ in large), "there are buckets to wait for"


def test_deepspeed_s_own_waits_for_buckets_are_more():
    ((found, buckets), *_) = next(waits("", (4, 8), spoiled=True))
    assert apart(found)[1] > buckets // 3


@pytest.mark.parametrize("layout", ["--zero_stage 1", "--zero_stage 2", "--sync streaming"])
def test_other_modes_of_deepspeed_wait_no_more(layout):
    for found, _ in next(waits(layout, (4, 4))):
        assert sum(found.values()) <= BUDGET, found


def test_a_step_with_the_same_bits_in_every_layout_reads_two_numbers_more():
    """The largest gradient and, on the first rank, the norm's digits."""
    found = [sum(found.values()) for found, _ in next(waits("--reproducible layout", (4, 4)))]
    assert found == [BUDGET + 2, *[BUDGET + 1] * 3]


def test_stages_between_the_first_and_the_last_put_no_tokens_on_their_device():
    m = 8
    assert run_ranks(host_syncs.uploads, 4, Case(4, PP.format(4, m))) == [2 * m, 0, 0, 2 * m]


def gradients_heard(case: Case) -> tuple[int, set[int]]:
    """(parameters that were heard of beyond those of this rank, how often autograd called for one) in a step after the
    first, in which a CPU counts the uses of each."""
    heard: Counter[int] = Counter()

    def register(param, hook, register=torch.Tensor.register_post_accumulate_grad_hook):
        def called(param) -> None:
            heard[id(param)] += 1
            hook(param)

        return register(param, called)

    with patch.object(torch.Tensor, "register_post_accumulate_grad_hook", register):
        rig = Rig.of(case)
        rig.train(step=1)
        heard.clear()
        rig.train(step=2)
    return len(heard) - len(rig.backend.driver.params), set(heard.values())


@pytest.mark.parametrize(("more", "times"), [("", 1), ("--reproducible layout ", 4)])
def test_autograd_calls_for_a_gradient_once_in_a_step_unless_each_microbatch_is_looked_at(more, times):
    assert run_ranks(gradients_heard, 4, Case(4, PP.format(2, 4) + " " + more)) == [(0, {times})] * 4
