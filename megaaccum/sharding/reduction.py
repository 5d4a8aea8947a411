"""Sums of gradients over ranks: into partitions, by reduce-scatter or in a fixed order, and those that are no
data-parallel reduction's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.sharding.sum_tree import AnyOrder, exchange_rows, order_of

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.base import ShardingBackend

Share = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter with a whole gradient, and this rank's flat partition (padded: equally long on all ranks) of its sum."""


class PartitionReducer:
    """Adds whole gradients, summed over `group`, to partitions. One sum is under way at a time, under the compute that
    follows; `wait` before the partitions are read.

    Where the plan has an order, the rows received from each rank are added in it, so that the result is bit-equal from
    run to run on any backend (an all-to-all of a row per rank moves the bytes of a reduce-scatter); else the order is
    the collective's. sums: holds sums that are sent besides param.grad.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup, sums: AnyOrder):
        sharding = plan.config.sharding
        # A group of one rank has nothing to round.
        self._dtype = names.DTYPES[sharding.grad_reduce_dtype if group.size() > 1 else sharding.grad_accum_dtype]
        self._group, self._order, self._sums = group, order_of(plan, group), sums
        self._finish: Callable[[], None] | None = None

    def add(self, shares: list[Share]) -> None:
        """Start to add `shares`, whose gradients are taken (param.grad is None afterwards; None counts as zero).
        Every rank of the group names the same parameters in the same order."""
        partitions = [partition for _, partition in shares]
        if self._order is not None:
            add, dtype = self._order.add, partitions[0].dtype
            self.exchange(shares, lambda theirs: _add(partitions, add(theirs, dtype)), self._order.counts)
            return
        rows = self._rows(shares)
        self.wait()
        mine = rows.new_empty(rows.shape[2])
        work = dist.reduce_scatter_tensor(mine, rows.view(-1), group=self._group, async_op=True)
        self._finish = partial(_finish, work, rows, partial(_add, partitions), mine)

    def exchange(
        self, shares: list[Share], take: Callable[[torch.Tensor], None], counts: Sequence[int] | None = None
    ) -> None:
        """Exchange the bucket, but pass the received rows [rows of all ranks, elements of this rank's partitions] to
        `take` instead of adding them to the partitions. counts: how many each rank sends, by default one."""
        rows = self._rows(shares)
        self.wait()
        theirs, work = exchange_rows(rows, counts or [1] * self._group.size(), self._group, async_op=True)
        self._finish = partial(_finish, work, rows, take, theirs)

    def wait(self) -> None:
        """Until the partitions hold everything that was added."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _rows(self, shares: list[Share]) -> torch.Tensor:
        """[ranks, partial sums of this one, elements of a rank's partitions]: rank r sums row r."""
        widths = [partition.numel() for _, partition in shares]
        parts = self._sums.num_parts(shares[0][0])
        rows = torch.zeros(self._group.size(), parts, sum(widths), dtype=self._dtype, device=cpu.device())
        for (param, _), column in zip(shares, rows.split(widths, dim=2), strict=True):
            for number, grad in enumerate((param.grad, *self._sums.pop_others(param))):
                if grad is not None:
                    fill(column[:, number], grad.view(-1))
            param.grad = None
        return rows


def sum_over_tp(backend: ShardingBackend, groups: Groups) -> None:
    """Add up the gradients of parameters of which each tp rank saw only a part of the sequence or of the heads."""
    if groups.tp.size() > 1:
        all_reduce_together([s.grad for s in backend.shards() if names.is_partial_over_tp(s.name, s.param)], groups.tp)


def sum_tied_copies(backend: ShardingBackend, groups: Groups) -> None:
    """Add up the gradients of the two copies of a tied embedding, where both are cut alike: on the first and the last
    stage, or both on this rank (a V)."""
    tied = [shard for shard in backend.shards() if names.is_tied(shard.param)]
    copies = [shard.grad for shard in tied if names.is_tied_copy(shard.param)]
    originals = [shard.grad for shard in tied if not names.is_tied_copy(shard.param)]
    if copies and originals:
        copies[0].copy_(originals[0].add_(copies[0]))
    elif groups.embedding is not None and groups.embedding.size() > 1:
        all_reduce_together(copies + originals, groups.embedding)


def all_reduce_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over `group`, all in one collective; they may lie in host memory (an offloaded optimizer)."""
    if not (tensors := [t for t in tensors if t.numel()]):
        return
    flat = torch.cat([t.view(-1) for t in tensors]).to(cpu.device())
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.view(-1).copy_(total)


def fill(column: torch.Tensor, flat: torch.Tensor) -> None:
    """Cut `flat` over the rows of `column` [ranks, width]; what is beyond its end stays as it is. Two copies at most,
    however many ranks there are."""
    width = column.shape[1]
    full, rest = divmod(flat.numel(), width) if width else (0, 0)
    column[:full].copy_(flat[: full * width].view(full, width))
    if rest:
        column[full, :rest].copy_(flat[full * width :])


def _finish(work: Any, sent: torch.Tensor, take: Callable[[torch.Tensor], None], received: torch.Tensor) -> None:
    """Let `take` have what is received, on this rank's device, wherever partitions are. sent: kept until then."""
    work.wait()
    take(received)


def _add(partitions: list[torch.Tensor], total: torch.Tensor) -> None:
    for partition, part in zip(partitions, total.split([p.numel() for p in partitions]), strict=True):
        partition.add_(part.to(partition.device))
