"""Marks of parameters that say how tensor parallelism cuts them, given by Megatron-core or left out."""

from __future__ import annotations

import pytest
import torch

from megaaccum.model import names


@pytest.mark.parametrize(
    ("marks", "is_partial"),
    [
        ({"sequence_parallel": True}, True),
        ({"sequence_parallel": True, "average_gradients_across_tp_domain": True}, False),
        ({}, False),
    ],
)
def test_a_gradient_that_each_tp_rank_has_whole_is_not_summed(marks, is_partial):
    """The indexer of sparse attention gathers the sequence; Megatron averages what its ranks have alike."""
    param = torch.nn.Parameter(torch.zeros(2))
    vars(param).update(marks)
    assert names.is_partial_over_tp("layers.0.indexer.linear_wk.weight", param) is is_partial


def test_offsets_of_a_softmax_are_cut_over_tp():
    chunk = torch.nn.Module()
    chunk.softmax_offset, chunk.bias = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    names.mark_cut_offsets(chunk)
    assert names.is_sharded_over_tp(chunk.softmax_offset) and not names.is_sharded_over_tp(chunk.bias)
