"""Gradients of matrices reduced straight to their owners, who keep the momenta: no shard of either crosses again.

A backend hands a matrix' whole gradient over where it would put it into its own reduction; sums go to the owner bucket
by bucket, in the same backward. One reduction to a rank moves each element once per other rank, as a reduce-scatter
does (a ring or a chain; NCCL pipelines it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.model import names
from megaaccum.platform import cpu


@dataclass(slots=True)
class Owned:
    """A matrix parameter that this rank owns, or of which it keeps a tensor-parallel part for the owner. grad: the sum
    so far, flat; None before the first."""

    param: torch.nn.Parameter
    momentum: torch.Tensor
    grad: torch.Tensor | None = None

    def add(self, own: torch.Tensor, total: torch.Tensor) -> None:
        """Add a sum over ranks, which may be a part of a larger tensor. own: what this rank gave, whose memory it may
        have."""
        if self.grad is None:
            self.grad = (own if own.dtype is self.momentum.dtype else torch.empty_like(self.momentum)).copy_(total)
        else:
            self.grad.add_(total)


class _Part(NamedTuple):
    """A flat tensor to be summed on rank `to` of a group, which takes the sum."""

    to: int
    flat: torch.Tensor
    take: Callable[[torch.Tensor], object]


class OwnerSums:
    """Sums each matrix' gradient on the rank that keeps it. Every rank of a group adds the same parameters in the same
    order. owned: by name, what this rank keeps; nothing before `keep`."""

    def __init__(self, groups: Groups):
        self._groups = groups
        self._homes: dict[int, tuple[str, int]] = {}
        self.owned: dict[str, Owned] = {}
        self._among: dist.ProcessGroup | None = None
        self._pending: list[_Part] = []
        self._sent: list[tuple[Any, torch.Tensor, list[_Part]]] = []

    def keep(
        self, plan: Plan, homes: Mapping[str, int], named: list[tuple[str, torch.nn.Parameter]], divisor: int
    ) -> None:
        """Take the gradients of parameters from now on. homes: by name, the data-parallel number of the rank that keeps
        it. divisor: of a sum over all ranks, as the backend's own reduction has it."""
        sharding = plan.config.sharding
        dtype = names.DTYPES["fp64" if sharding.params_dtype == "fp64" else "fp32"]
        self._crosses = dtype if dtype is torch.float64 else names.DTYPES[sharding.grad_reduce_dtype]
        self._divisor, self._bucket = divisor, sharding.reduce_bucket_size
        for name, param in (each for each in named if each[0] in homes):
            self._homes[id(param)] = name, homes[name]
            if homes[name] == names.dp_group(param, self._groups).rank():
                numel = int(getattr(param, "ds_numel", param.numel()))
                self.owned[name] = Owned(param, torch.zeros(numel, dtype=dtype, device=cpu.device()))

    def takes(self, param: torch.nn.Parameter) -> bool:
        """Whether this is a matrix, whose gradient `add` takes."""
        return id(param) in self._homes

    def begin(self) -> None:
        """Begin new sums."""
        self._pending, self._sent = [], []
        for owned in self.owned.values():
            owned.grad = None

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Take a matrix' whole gradient, which may be overwritten, and send the bucket if it is full."""
        name, to = self._homes[id(param)]
        flat = grad.reshape(-1)
        take = partial(self.owned[name].add, flat) if name in self.owned else lambda total: None  # its owner takes it
        self.add_part(names.dp_group(param, self._groups), to, flat, take)
        if sum(part.flat.numel() for part in self._pending) >= self._bucket:
            self.send()

    def add_part(
        self, group: dist.ProcessGroup, to: int, flat: torch.Tensor, take: Callable[[torch.Tensor], object]
    ) -> None:
        """Sum `flat` on rank `to` of the group in the next bucket, and let `take` have the sum there."""
        if self._among is not group:
            self.send()
        self._among = group
        self._pending.append(_Part(to, flat, take))

    def send(self) -> None:
        """Start to sum what was added: one reduction for each rank that keeps some of it."""
        parts, self._pending = self._pending, []
        self._wait()
        by_rank: defaultdict[int, list[_Part]] = defaultdict(list)
        for part in parts:
            by_rank[part.to].append(part)
        for to, its in by_rank.items():
            assert self._among is not None
            flat = (torch.cat([part.flat for part in its]) if len(its) > 1 else its[0].flat).to(self._crosses)
            work = dist.reduce(flat, group=self._among, group_dst=to, async_op=True)
            self._sent.append((work, flat, its if to == self._among.rank() else []))

    def finish(self) -> None:
        """Send what is left, and wait until owners have all sums."""
        self.send()
        self._wait()

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        for work, flat, parts in sent:
            work.wait()
            start = 0
            if parts and self._divisor > 1:
                flat.div_(self._divisor)
            for part in parts:
                part.take(flat[start : start + part.flat.numel()])
                start += part.flat.numel()
