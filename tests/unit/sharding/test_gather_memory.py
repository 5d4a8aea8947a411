"""Memory of a gather: the stage and one piece of it, whatever the stage's size; twice the stage where it is one piece.

A gather comes between two calls of a step too (`resume_accumulation`), beside whole gradients.
"""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaaccum.upstream import zero_partitions

RANKS = 4
SIZES = [4_000, 1_000, 2_000, 9_000, 3_000, 1_000, 2_000, 6_000, 500, 1_500]
"""Elements of parameters: 30,000."""


class Held(TorchDispatchMode):
    """Elements of the tensors that are made inside and still held, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage.data_ptr()) in self._seen or not storage.nbytes():
            return
        elements = storage.nbytes() // 4
        self._seen.add(key)
        self.now += elements
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, elements)

    def _free(self, key: int, elements: int) -> None:
        self._seen.discard(key)
        self.now -= elements


class Group:
    """A group of RANKS ranks."""

    def size(self) -> int:
        return RANKS


def most_held(monkeypatch: pytest.MonkeyPatch, most_gathered: int) -> int:
    """The most elements at one time while a stage becomes whole, the ranks' parts aside."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    group = Group()
    params = []
    for number, size in enumerate(SIZES):
        param = torch.nn.Parameter(torch.empty(0))
        marks = dict(ds_id=number, ds_numel=size, ds_shape=torch.Size([size]), ds_process_group=group)
        part = torch.full((math.ceil(size / RANKS),), float(number))
        for name, value in (marks | {"ds_tensor": part, "ds_status": ZeroParamStatus.NOT_AVAILABLE}).items():
            setattr(param, name, value)
        params.append(param)

    def all_gather(rows: torch.Tensor, mine: torch.Tensor, **_: Any) -> Any:
        rows.view(RANKS, -1).copy_(mine)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(zero_partitions, "MOST_GATHERED", most_gathered)
    monkeypatch.setattr(zero_partitions.dist, "all_gather_into_tensor", all_gather)
    with Held() as held:
        zero_partitions.start_gather(params).wait()
    assert all(bool((param == number).all()) and param.numel() == SIZES[number] for number, param in enumerate(params))
    return held.most


def test_a_stage_in_pieces_needs_itself_and_one_piece_more(monkeypatch):
    whole, piece = sum(SIZES), 3_000
    parts = whole // RANKS  # each rank's own, joined for the collective
    assert most_held(monkeypatch, piece) <= whole + 2 * piece + parts + 100
    assert most_held(monkeypatch, 2 * whole) >= 2 * whole


def test_a_parameter_larger_than_a_piece_is_not_copied(monkeypatch):
    """The head, or an embedding, may be most of a stage."""
    monkeypatch.setattr("tests.unit.sharding.test_gather_memory.SIZES", [1_000, 20_000, 1_000, 500])
    assert most_held(monkeypatch, 4_000) <= 22_500 + 2 * 4_000 + 22_500 // RANKS
