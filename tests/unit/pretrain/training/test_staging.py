"""Copies of tensors from which a checkpoint is written while training continues; the GPU is a stand-in."""

from types import SimpleNamespace

import pytest
import torch

from megaaccum.platform import cpu
from megaaccum.pretrain.training import background_save


def test_copies_do_not_change_with_the_tensors():
    flat = torch.arange(6.0)
    copies = background_save._Copies().stage({"a": flat[:3], "b": flat[3:]})
    flat.zero_()
    assert copies["a"].tolist() == [0, 1, 2]
    assert copies["b"].tolist() == [3, 4, 5]
    assert copies["b"].untyped_storage().nbytes() == 12  # and not all of what it is a view of


def test_a_gpu_is_waited_for_once_and_copied_into_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    pinned, waits = [], []
    empty_like = torch.empty_like

    def noting(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty_like(tensor, device=device)

    class OnGpu(torch.Tensor):
        is_cpu = False

    monkeypatch.setattr(torch, "empty_like", noting)
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waits.append(1)))
    there = {str(number): torch.ones(2).as_subclass(OnGpu) for number in range(3)}
    background_save._Copies().stage(there | {"random state": torch.ones(2)})
    assert pinned == [True] * 3 + [False]
    assert waits == [1]
