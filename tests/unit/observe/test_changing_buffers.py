"""Buffers that a forward changes, and one that it makes."""

import warnings

import torch

from megaaccum.observe.changing_buffers import ChangingBuffers


def test_a_buffer_that_the_first_forward_makes_is_not_compared_with_one_of_before():
    chunk = torch.nn.BatchNorm1d(3)
    looking = ChangingBuffers([chunk], is_loud=True)
    looking.begin_forward(0, 0)
    chunk.register_buffer("table", torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looking.end_forward(0, 0, None)
        looking.begin_forward(0, 1)
        chunk.running_mean += 1
        looking.end_forward(0, 1, None)  # only the first forward is looked at


def test_each_chunk_whose_first_forward_changes_a_buffer_is_named_by_one_rank():
    chunks = [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]
    for is_loud in (True, False):
        looking = ChangingBuffers(chunks, is_loud=is_loud)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for chunk in (1, 0):
                looking.begin_forward(chunk, 0)
                if chunk == 0:
                    chunks[chunk].running_var *= 2
                looking.end_forward(chunk, 0, None)
        assert [str(each.message).split(":")[0] for each in caught] == (
            ["the forward of a micro-batch changes running_var"] if is_loud else []
        )
