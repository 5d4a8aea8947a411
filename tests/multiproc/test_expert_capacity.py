"""Experts that take a limited number of tokens: the gradient is that of one process that drops the same ones, and the
log says how many."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.step.result import StepResult
from tests.support.distance import check, problems_with
from tests.support.expert_table import CAPACITY, CP, MODEL, WHOLE
from tests.support.expert_table import EP2 as EP
from tests.support.parity import SEQ, Case, Reference, Rig, gradient, references

LAYOUT = "--pp_microbatches 4 "
FILLED = "--moe_pad_expert_input_to_capacity --moe_token_drop_policy position "
GATHERED = "--moe_token_dispatcher_type allgather "
HALVES = [list(range(8)), list(range(8, 16))]
"""The positions of two sequence-parallel ranks."""
ZIGZAG = [[*range(4), *range(12, 16)], list(range(4, 12))]
"""The positions of two context-parallel ranks."""


def case(ranks: int, layout: str = "", model: str = "") -> Case:
    exact = "--backend fsdp2 --params_dtype fp64 "
    return Case(ranks, LAYOUT + exact + layout, MODEL + CAPACITY + model, "fp64")


def test_the_tokens_that_one_process_drops():
    """A rank's micro-batch is whole, so what it drops depends on nothing else."""
    check([case(2, EP), case(2, EP, FILLED), case(2, EP, GATHERED)])


def dropping_apart(model: str, sequences: int, cuts: list[list[int]]) -> Reference:
    """The reference, whose experts have a capacity for each part of a sequence: its positions by rank."""
    from megatron.core.transformer.moe import router

    drop = router.apply_router_token_dropping

    def drop_apart(probs: torch.Tensor, routed: torch.Tensor, **keys):
        kept = [drop(probs[cut], routed[cut], **keys) for cut in cuts]
        order = torch.tensor([at for cut in cuts for at in cut]).argsort()
        return tuple(torch.cat(parts)[order] for parts in zip(*kept, strict=True))

    with patch.object(router, "apply_router_token_dropping", drop_apart):
        return references([(model, sequences, "fp64")])[0]


@pytest.mark.parametrize(("layout", "cuts"), [(EP + CP, ZIGZAG), (EP + WHOLE, HALVES)], ids=["cp", "tp"])
def test_ranks_that_share_a_sequence_drop_of_their_own_part(layout, cuts):
    assert sorted(at for cut in cuts for at in cut) == list(range(SEQ))
    at = case(2, layout + "--loss_norm token ")
    got, sequences = run_ranks(gradient, 2, at), at.plan().batch.global_batch_size
    apart, whole = (run_ranks(dropping_apart, 1, at.model, sequences, each)[0] for each in (cuts, [list(range(SEQ))]))
    assert problems_with(at, got, apart, apart) == []
    assert problems_with(at, got, whole, whole), "the capacity of a whole sequence is another routing"


def stepped(cases: list[Case]) -> list[StepResult]:
    return [Rig.of(each).watched()[1] for each in cases]


def test_dropped_tokens_and_loads_are_counted():
    """Over all ranks, stages and micro-batches, once; recomputed forwards included."""
    pp = "--pipeline_model_parallel_size 2 --recompute_granularity full "
    one, filled, free = case(2, EP), case(2, EP, FILLED), Case(2, LAYOUT + EP, MODEL)
    recomputed = case(2, pp + "--grad_accum_steps 2 ")
    for ranks in zip(*run_ranks(stepped, 2, [one, filled, free, recomputed]), strict=True):
        assert ranks[0].expert_loads == ranks[1].expert_loads
    for limited, padded, unlimited, again in run_ranks(stepped, 2, [one, filled, free, recomputed]):
        assert limited.expert_loads is not None and unlimited.expert_loads is not None
        assert limited.expert_loads.imbalance.keys() == {1, 2, 3, 4}
        assert again.expert_loads is not None
        assert (limited.expert_loads.imbalance, limited.expert_loads.dropped) == (
            again.expert_loads.imbalance,
            again.expert_loads.dropped,
        )
        assert 0.2 <= limited.expert_loads.dropped < 0.6, "a capacity of 3/4 of an even share drops a quarter at least"
        assert unlimited.expert_loads.dropped == 0.0
        assert limited.expert_loads.rank_imbalance <= max(limited.expert_loads.imbalance.values())
        assert padded.expert_loads is not None and padded.expert_loads.dropped > 0.2
        assert max(unlimited.expert_loads.imbalance.values()) > max(limited.expert_loads.imbalance.values())
