"""Results of loss functions, and numbers that lie in host memory on a machine with a GPU."""

import pytest
import torch

from megaaccum.errors import StepError
from megaaccum.step import loss
from megaaccum.step.loss import ReportReducer, Tally, read_triple
from tests.support.device_lint import following, on_gpu


def devices(tensors: list[torch.Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


def test_a_report_of_some_microbatches_is_added_up_on_the_device(monkeypatch):
    """A count as a number of Python, which a micro-batch without images leaves out, or gives as a tensor."""
    stacked: list[set[str]] = []
    stack = torch.stack
    with following():
        monkeypatch.setattr(loss, "gathered", lambda mine: [mine])
        monkeypatch.setattr(torch, "stack", lambda tensors: (stacked.append(devices(tensors)), stack(tensors))[1])
        tally, reducer = Tally(), ReportReducer({"images": "sum"})
        for reports in ({"images": 3}, {}, {"images": on_gpu(torch.tensor(2))}):
            _, weight, kept = read_triple((on_gpu(torch.ones(())), torch.tensor(4.0), reports))
            tally.weights.append(weight)
            tally.reports.append(kept)
        reducer.register(tally)
        sums = reducer.sums(tally)
        assert stacked == [{"cuda"}] * 2 and devices(tally.weights) == {"cuda"}
    assert sums[0].item() == 5.0


def test_the_host_waits_for_no_weight():
    """`to` from memory that is not pinned waits until the device has done everything before."""
    pinned: list[float] = []

    class Pinned(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.pin_memory:
                pinned.append(float(args[0]))
            return func(*args, **(kwargs or {}))

    with following(), Pinned():
        read_triple((on_gpu(torch.ones(())), torch.tensor(4.0), {}))
        Tally().add(5.0)
    assert pinned == [4.0, 5.0]


def test_a_tensor_of_one_element_is_a_number_and_one_of_two_is_none():
    total, weight, _ = read_triple((torch.ones(1), torch.ones(1), {}))
    assert total.shape == weight.shape == ()
    with pytest.raises(StepError, match=r"weight has to be one number, not a tensor of shape \(2,\)"):
        read_triple((torch.ones(()), torch.ones(2), {}))
