"""Collectives of one rank inside a step: an all-reduce that changes nothing is not made, others are."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch.distributed import AllreduceOptions, ReduceOp

from megaaccum.upstream import pytorch

TWICE = torch.distributed._make_nccl_premul_sum(2.0)


def made(collective: str, operator, ranks: int) -> bool:
    """Whether a collective over `ranks` ranks is made; if not, its handle is done and holds the tensors."""
    calls, tensors, options = [], [torch.ones(2)], AllreduceOptions()
    options.reduceOp = operator
    group = Mock(size=lambda: ranks, rank=lambda: 0)
    work = pytorch.noting(lambda *given: calls.append(given), collective, 0)(group, tensors, options)
    assert calls or (work.wait() and work.is_completed() and work.get_future().wait() is tensors)
    return bool(calls)


@pytest.mark.parametrize("operator", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN])
def test_an_all_reduce_over_one_rank_is_made_outside_a_step_alone(operator):
    assert made("all_reduce", operator, 1)
    with pytorch.watched_collectives(lambda *_: None):
        assert not made("all_reduce", operator, 1)
        assert made("all_reduce", operator, 2)


def test_a_collective_that_changes_or_copies_the_tensor_is_made():
    with pytorch.watched_collectives(lambda *_: None):
        assert made("all_reduce", TWICE, 1)
        assert made("reduce_scatter", ReduceOp.SUM, 1)
