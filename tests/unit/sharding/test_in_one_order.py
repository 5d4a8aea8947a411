"""Sums in one order under torch DDP: the future that its hook returns."""

from types import SimpleNamespace

import torch

from megaaccum.sharding import in_one_order


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
