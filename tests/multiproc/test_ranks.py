"""A late rank and a missed no_sync, on real ranks: both are silent but for what is counted of them."""

from __future__ import annotations

from megaaccum.lab.planner import expected
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.model.layers import choose
from tests.support.parity import VOCAB, Case, Rig

FLAT = "--num_layers 2 --pp_microbatches 4 --rank_report_interval 3 "
FSDP2 = Case(2, FLAT + "--backend fsdp2", "--untie_embeddings_and_output_weights")
ZERO3 = Case(2, FLAT, "--untie_embeddings_and_output_weights")


def found(case: Case, *, missed: bool = False, slow: float = 0.0, late: float = 0.0) -> list[list[tuple[str, str]]]:
    """Alarms after each of 6 steps. missed: each micro-batch has a reduction of all gradients. slow, late: seconds that
    rank 1 takes longer for a forward, or waits for data, in the first 3 steps, by a clock that nothing else moves."""
    import torch

    from megaaccum.observe.observer import Stopwatch
    from megaaccum.pretrain.metrics.ranks import Ranks

    rig = Rig.of(case)
    stages = expected.of_plan(rig.plan, VOCAB, choose(rig.plan.config, has_te=False, on_gpu=False))
    ranks = Ranks(rig.plan, rig.groups, rig.chunks, stages)
    clock, mine, size = [0.0], torch.distributed.get_rank(), sum(param.numel() for param in rig.chunks[0].parameters())
    rig.train_step.observer.stopwatch = Stopwatch(lambda: clock[0])
    user = rig.train_step.forward_step_func

    def forward_step(data_iterator, chunk):
        clock[0] += 1.0 + slow * mine
        if missed:
            torch.distributed.all_reduce(torch.zeros(size), group=rig.groups.dp)
        return user(data_iterator, chunk)

    forward_step.weights = user.weights
    rig.train_step.forward_step_func = forward_step
    steps = range(6)
    return [ranks.after(rig.train(step=n), data=late * mine if n < 3 else 0.0) for n in steps]


def test_a_missed_no_sync_is_an_alarm_once():
    for rank in run_ranks(found, 2, FSDP2, missed=True):
        assert [len(each) for each in rank] == [0, 1, 0, 0, 0, 0]
        ((kind, text),) = rank[1]
        assert kind == "alarm" and "from data-parallel ranks in a step, but the plan says" in text


def test_a_rank_that_computes_slowly_is_named_once_while_it_does():
    for rank in run_ranks(found, 2, ZERO3, slow=1.0):
        assert [len(each) for each in rank] == [0, 0, 1, 0, 0, 0]
        ((kind, text),) = rank[2]
        assert kind == "straggler" and text.startswith(
            "rank 1 takes in its forwards at least 8 s in each of the last 3"
        )


def test_a_rank_that_waits_for_data_is_named():
    for rank in run_ranks(found, 2, ZERO3, late=2.0):
        assert [len(each) for each in rank] == [0, 0, 1, 0, 0, 0]
        assert rank[2][0][1].startswith("rank 1 waits for data at least 2 s")


def test_ranks_in_time_are_not():
    assert run_ranks(found, 2, ZERO3) == [[[]] * 6] * 2
