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
