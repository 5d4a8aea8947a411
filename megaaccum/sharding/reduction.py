"""Sums of gradients over ranks: into partitions, by reduce-scatter or in a fixed order, and those that are no
data-parallel reduction's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaaccum import upstream
from megaaccum.distributed import cpu
from megaaccum.model import gpt

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.base import ShardingBackend

Share = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter with a whole gradient, and this rank's flat partition (padded: equally long on all ranks) of its sum."""


class PartitionReducer:
    """Adds whole gradients, summed over `group`, to partitions. One sum is under way at a time, under the compute that
    follows; `wait` before the partitions are read.

    dtype: precision in which gradients cross ranks. deterministic: ranks are added in rank order, so that the result
    is the same to the bit from run to run on any backend (an all-to-all moves the bytes of a reduce-scatter).
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, *, deterministic: bool):
        self._group = group
        self._dtype = dtype
        self._deterministic = deterministic
        self._finish: Callable[[], None] | None = None

    @classmethod
    def of(cls, plan: Plan, groups: Groups) -> PartitionReducer:
        sharding = plan.config.sharding
        return cls(groups.dp_cp, gpt.DTYPES[sharding.grad_reduce_dtype], deterministic=sharding.deterministic)

    def add(self, shares: list[Share]) -> None:
        """Start to add `shares`, whose gradients are taken (param.grad is None afterwards; None counts as zero).
        Every rank of the group names the same parameters in the same order."""
        rows = self._rows(shares)
        self.wait()
        partitions = [partition for _, partition in shares]
        if self._deterministic:
            self._start_in_rank_order(rows, partitions)
        else:
            self._start_reduce_scatter(rows, partitions)

    def wait(self) -> None:
        """Until the partitions hold everything that was added."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _rows(self, shares: list[Share]) -> torch.Tensor:
        """[ranks, elements of a rank's partitions]: row r is what rank r is to sum."""
        ranks = self._group.size()
        widths = [partition.numel() for _, partition in shares]
        rows = torch.zeros(ranks, sum(widths), dtype=self._dtype, device=cpu.device())
        for (param, _), column in zip(shares, rows.split(widths, dim=1), strict=True):
            if param.grad is not None:
                _fill(column, param.grad.view(-1))
                param.grad = None
        return rows

    def _start_reduce_scatter(self, rows: torch.Tensor, partitions: list[torch.Tensor]) -> None:
        mine = rows.new_empty(rows.shape[1])
        work = dist.reduce_scatter_tensor(mine, rows.view(-1), group=self._group, async_op=True)

        def finish(rows=rows) -> None:  # holds `rows` until they are sent
            work.wait()
            _add(partitions, mine)

        self._finish = finish

    def _start_in_rank_order(self, rows: torch.Tensor, partitions: list[torch.Tensor]) -> None:
        theirs = torch.empty_like(rows)
        work = dist.all_to_all_single(theirs, rows, group=self._group, async_op=True)

        def finish(rows=rows) -> None:
            work.wait()
            total = theirs[0].to(partitions[0].dtype)  # on this rank's device, wherever the partitions are
            for row in theirs[1:]:
                total += row
            _add(partitions, total)

        self._finish = finish


class InRankOrder(upstream.Zero3):
    """The parts of a ZeRO-3 engine whose gradients are summed in rank order instead of by DeepSpeed's reducer: sums,
    not averages. bucket: elements that are summed in one collective."""

    def __init__(self, engine, reducer: PartitionReducer, bucket: int):
        super().__init__(engine)
        self._reducer, self._bucket = reducer, bucket
        self._pending: list[torch.nn.Parameter] = []

    def begin_reduction(self) -> None:
        self._handed_over.clear()
        self.begin_accumulation()

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Put the gradient into the bucket; a full bucket is sent."""
        self._handed_over.add(id(param))
        self._pending.append(param)
        if sum(self.numel(waiting) for waiting in self._pending) >= self._bucket:
            self._send()

    def finish_reduction(self) -> None:
        self._send()
        self._reducer.wait()
        self.finish_accumulation()

    def _send(self) -> None:
        if self._pending:
            self._reducer.add([(param, self.accumulator(param)) for param in self._pending])
        self._pending = []


class InRankOrderScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`: an all-to-all, and a sum in rank order."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False) -> None:
        """Add up each rank's piece of `input_tensor` into `output_tensor`; op: SUM or AVG."""
        output_tensor.copy_(_sum_in_rank_order(input_tensor, group))
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


def average_in_rank_order(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for torch DDP: the average over `group`, each rank adding its piece up in rank order."""
    flat, ranks = bucket.buffer(), group.size()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))
    mine = _sum_in_rank_order(padded, group) / ranks
    dist.all_gather_into_tensor(padded, mine, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(padded[: flat.numel()])
    return done


def _sum_in_rank_order(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece, flat.numel() / ranks elements, of the sum of all ranks' `flat`."""
    theirs = torch.empty_like(flat)
    dist.all_to_all_single(theirs, flat, group=group)
    rows = theirs.view(group.size(), -1)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_over_tp(backend: ShardingBackend, groups: Groups) -> None:
    """Add up the gradients of parameters of which each tp rank saw only a part of the sequence or of the heads."""
    if groups.tp.size() > 1:
        all_reduce_together([s.grad for s in backend.shards() if gpt.is_partial_over_tp(s.name, s.param)], groups.tp)


def sum_tied_copies(backend: ShardingBackend, groups: Groups) -> None:
    """Add up the gradients of the two copies of a tied embedding, where both are cut alike: on the first and the last
    stage, or both on this rank (a V)."""
    tied = [shard for shard in backend.shards() if gpt.is_tied(shard.param)]
    copies = [shard.grad for shard in tied if gpt.is_tied_copy(shard.param)]
    originals = [shard.grad for shard in tied if not gpt.is_tied_copy(shard.param)]
    if copies and originals:
        copies[0].copy_(originals[0].add_(copies[0]))
    elif groups.embedding is not None and groups.embedding.size() > 1:
        all_reduce_together(copies + originals, groups.embedding)


def all_reduce_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over `group`, all in one collective; they may lie in host memory (an offloaded optimizer)."""
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return
    flat = torch.cat([t.view(-1) for t in tensors]).to(cpu.device())
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.view(-1).copy_(total)


def _fill(column: torch.Tensor, flat: torch.Tensor) -> None:
    """Cut `flat` over the rows of `column` [ranks, width]; what is beyond its end stays as it is. Two copies at most,
    however many ranks there are."""
    width = column.shape[1]
    full, rest = divmod(flat.numel(), width) if width else (0, 0)
    column[:full].copy_(flat[: full * width].view(full, width))
    if rest:
        column[full, :rest].copy_(flat[full * width :])


def _add(partitions: list[torch.Tensor], total: torch.Tensor) -> None:
    for partition, part in zip(partitions, total.split([p.numel() for p in partitions]), strict=True):
        partition.add_(part.to(partition.device))
