"""The fully_shard that backend fsdp2 drives is there, or the backend is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.sharding import fsdp2
from megaaccum.upstream import fsdp2 as torch_fsdp2


def test_an_older_torch_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp2._check_torch()
    monkeypatch.setattr(torch_fsdp2, "check", lambda: ["FSDPState._fsdp_param_groups is missing"])
    with pytest.raises(ConfigError, match=r"needs the fully_shard of torch 2\.13.*_fsdp_param_groups is missing"):
        fsdp2._check_torch()


def test_a_sum_that_the_stream_of_reductions_reads_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the backward made it, and would give its memory to the next layer's gradients."""

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

        def record_stream(self, stream: object) -> None:
            noted.append((stream, other.tolist()))

    noted: list[object] = []
    other, param = torch.zeros(2), torch.zeros(2)
    sums = SimpleNamespace(num_parts=lambda: 2, pop_others=lambda param: [torch.ones(2).as_subclass(OnGpu)])
    backend: Any = SimpleNamespace(_groups=SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 1)), sums=sums)
    monkeypatch.setattr(torch_fsdp2, "reduced", lambda module: [param])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "reductions")
    monkeypatch.setattr(torch, "zeros_like", lambda flat: other)
    assert fsdp2.Fsdp2Backend._others(backend, object(), param) == [other]  # type: ignore[arg-type]
    assert noted == [("reductions", [1.0, 1.0])], "after the read"
