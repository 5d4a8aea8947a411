"""Bytes of the tensors that a real step keeps, counted on a rank: what planner tests compare predictions with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.multiproc.parity import Case


@dataclass
class Ledger:
    """Bytes of storages that autograd keeps for backward passes; parameters are not counted."""

    ignored: set[int]
    live: Counter = field(default_factory=Counter)
    sizes: dict[int, int] = field(default_factory=dict)
    now: int = 0
    peak: int = 0
    shapes: Counter = field(default_factory=Counter)

    def pack(self, tensor: torch.Tensor) -> _Kept:
        return _Kept(self, tensor)

    @staticmethod
    def unpack(kept: _Kept) -> torch.Tensor:
        return kept.tensor

    def add(self, key: int, size: int) -> None:
        self.live[key] += 1
        if self.live[key] == 1:
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def drop(self, key: int) -> None:
        self.live[key] -= 1
        if not self.live[key]:
            self.now -= self.sizes.pop(key)


class _Kept:
    """A tensor in autograd's keeping: counted from its making to its end, once per storage."""

    def __init__(self, ledger: Ledger, tensor: torch.Tensor):
        self.tensor, self.ledger = tensor, ledger
        storage = tensor.untyped_storage()
        self.key = None if storage.data_ptr() in ledger.ignored else storage.data_ptr()
        if self.key is not None:
            if not ledger.live[self.key]:
                ledger.shapes[(tuple(tensor.shape), str(tensor.dtype), storage.nbytes())] += 1
            ledger.add(self.key, storage.nbytes())

    def __del__(self) -> None:
        if self.key is not None:
            self.ledger.drop(self.key)


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank: whole parameters and gradients of its stage, and the peak of what autograd kept."""

    pp_rank: int
    parameters: int
    gradients: int
    activations: int
    shapes: dict[Any, int]


def count(cases: list[Case]) -> list[Counted]:
    """A gradient of every case by the project's own stepper, on this rank. Collective."""
    return [_count(case) for case in cases]


def _count(case: Case) -> Counted:
    from tests.multiproc.parity import make, microbatches

    plan, groups, chunks, boundary, stepper = make(case)
    batches = microbatches(plan, groups.dp.rank())
    boundary.begin_step()
    params = [param for chunk in chunks for param in chunk.parameters()]
    gradients: dict[int, int] = {}
    hooks = [p.register_post_accumulate_grad_hook(lambda p: gradients.update({id(p): p.grad.nbytes})) for p in params]
    ledger = Ledger({param.untyped_storage().data_ptr() for param in params})
    whole = sum(param.nbytes for param in params)
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack):
        stepper.gradient(batches)
    for hook in hooks:
        hook.remove()
    assert ledger.now == 0, f"{ledger.now} bytes are still kept after the step"
    return Counted(groups.pp.rank(), whole, sum(gradients.values()), ledger.peak, dict(ledger.shapes))
