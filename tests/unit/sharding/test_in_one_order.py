"""Sums in one order under torch DDP: the future that its hook returns."""

from types import SimpleNamespace

import torch

from megaaccum.sharding import in_one_order
from megaaccum.upstream.zero12 import Zero12


def test_who_waits_for_a_sum_on_a_gpu_waits_for_its_stream(monkeypatch):
    """A future without devices is done when the host has launched the sum: DDP would copy what is not there yet."""
    asked = []

    class Future:
        def __init__(self, *, devices):
            asked.append(devices)

        def set_result(self, result) -> None:
            asked.append(result)

    monkeypatch.setattr(torch.futures, "Future", Future)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    in_one_order.finished_future(on_gpu)
    assert asked == [[torch.device("cuda", 1)], on_gpu]


def test_on_a_cpu_it_is_done():
    assert in_one_order.finished_future(torch.ones(2)).wait().tolist() == [1, 1]


def test_a_parameter_is_cut_for_the_ranks_that_own_some_of_it():
    """A part for each of 1,024 ranks took ten seconds of a step with 1,000 parameters."""
    param = torch.nn.Parameter(torch.zeros(10))
    empty = {rank: {} for rank in range(1024)}
    optimizer = SimpleNamespace(
        get_param_id=lambda param: 7,
        partition_size=[8],
        param_to_partition_ids=[{7: [3, 4]}],
        grad_start_offset=[empty | {3: {7: 0}, 4: {7: 6}}],
        grad_partition_insertion_offset=[empty | {3: {7: 2}, 4: {7: 0}}],
    )
    driver = SimpleNamespace(optimizer=optimizer, _group_of={id(param): 0})
    assert list(Zero12.cuts(driver, param)) == [(3, 0, 6), (4, 6, 10)]
