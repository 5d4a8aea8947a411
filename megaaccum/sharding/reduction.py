"""Sums of gradients over ranks: into partitions, by reduce-scatter or in a fixed order, and those that are no
data-parallel reduction's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.sharding.sum_tree import MicrobatchSums, Runs, SumTree
from megaaccum.upstream import zero, zero12

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.base import ShardingBackend

Share = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter with a whole gradient, and this rank's flat partition (padded: equally long on all ranks) of its sum."""


OtherSums = Callable[[torch.Tensor], list[torch.Tensor]]
"""A rank's other partial sums of the gradients in a flat tensor, each laid out like it."""


@dataclass(frozen=True, slots=True)
class RowSum:
    """How what came from each rank is added up. counts: rows that each rank sends. add: the sum, in a precision, of
    all of them [rows, elements], one rank's after the other's, which it may overwrite."""

    counts: Sequence[int]
    add: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def in_rank_order(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows, one after the other."""
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total += row
    return total


def rows_in_order(plan: Plan) -> RowSum | None:
    """How `plan` adds up what came from each rank; None leaves it to the collective."""
    sharding, ranks = plan.config.sharding, plan.layout.dp * plan.layout.cp
    if sharding.reproducible == "layout":
        runs = Runs(plan.batch.num_microbatches, ranks)
        return RowSum(runs.counts, runs.add)
    return RowSum([1] * ranks, in_rank_order) if sharding.deterministic else None


def exchange_rows(
    rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Send rows[r] of `rows` [ranks, own rows, elements] to rank r. Returns [all rows, elements], those of each rank
    after those of the one before, and what is waited for. counts: how many each rank sends."""
    theirs, flat = rows.new_empty(sum(counts), rows.shape[2]), rows.view(-1)
    if len(set(counts)) == 1:
        return theirs, dist.all_to_all_single(theirs.view(-1), flat, group=group, async_op=async_op)
    taken = [count * rows.shape[2] for count in counts]
    sent = [flat.numel() // len(rows)] * len(rows)
    return theirs, dist.all_to_all_single(theirs.view(-1), flat, taken, sent, group=group, async_op=async_op)


class PartitionReducer:
    """Adds whole gradients, summed over `group`, to partitions. One sum is under way at a time, under the compute that
    follows; `wait` before the partitions are read.

    dtype: precision in which gradients cross ranks. order: adds up what came from each rank, so that the result is the
    same to the bit from run to run on any backend (an all-to-all of a row per rank moves the bytes of a
    reduce-scatter); None leaves the order to the collective. sums: has what is sent beside param.grad.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        *,
        order: RowSum | None,
        sums: MicrobatchSums | None = None,
    ):
        self._group = group
        self._dtype = dtype
        self._order, self._sums = order, sums
        self._finish: Callable[[], None] | None = None

    @classmethod
    def of(cls, plan: Plan, groups: Groups, sums: MicrobatchSums | None) -> PartitionReducer:
        sharding = plan.config.sharding
        crosses = groups.dp_cp.size() > 1  # else nothing is to be rounded
        dtype = names.DTYPES[sharding.grad_reduce_dtype if crosses else sharding.grad_accum_dtype]
        return cls(groups.dp_cp, dtype, order=rows_in_order(plan), sums=sums)

    def add(self, shares: list[Share]) -> None:
        """Start to add `shares`, whose gradients are taken (param.grad is None afterwards; None counts as zero).
        Every rank of the group names the same parameters in the same order."""
        rows = self._rows(shares)
        self.wait()
        partitions = [partition for _, partition in shares]
        if self._order is None:
            self._start_reduce_scatter(rows, partitions)
        else:
            counts, add = self._order.counts, self._order.add
            self._start_exchange(rows, counts, lambda theirs: _add(partitions, add(theirs, partitions[0].dtype)))

    def exchange(self, shares: list[Share], take: Callable[[torch.Tensor], None]) -> None:
        """The same, but call `take` with [ranks, elements of this rank's partitions], what came from each rank, instead
        of adding it to the partitions."""
        rows = self._rows(shares)
        self.wait()
        self._start_exchange(rows, [1] * self._group.size(), take)

    def wait(self) -> None:
        """Until the partitions hold everything that was added."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _rows(self, shares: list[Share]) -> torch.Tensor:
        """[ranks, partial sums of this one, elements of a rank's partitions]: row r is what rank r is to sum."""
        parts = 1 if self._sums is None else self._sums.num_parts
        widths = [partition.numel() for _, partition in shares]
        rows = torch.zeros(self._group.size(), parts, sum(widths), dtype=self._dtype, device=cpu.device())
        for (param, _), column in zip(shares, rows.split(widths, dim=2), strict=True):
            for number, grad in enumerate((param.grad, *take_others(self._sums, param))):
                if grad is not None:
                    fill(column[:, number], grad.view(-1))
            param.grad = None
        return rows

    def _start_reduce_scatter(self, rows: torch.Tensor, partitions: list[torch.Tensor]) -> None:
        mine = rows.new_empty(rows.shape[2])
        work = dist.reduce_scatter_tensor(mine, rows.view(-1), group=self._group, async_op=True)

        def finish(rows=rows) -> None:  # holds `rows` until they are sent
            work.wait()
            _add(partitions, mine)

        self._finish = finish

    def _start_exchange(self, rows: torch.Tensor, counts: Sequence[int], take: Callable[[torch.Tensor], None]) -> None:
        theirs, work = exchange_rows(rows, counts, self._group, async_op=True)

        def finish(rows=rows) -> None:
            work.wait()
            take(theirs)  # on this rank's device, wherever the partitions are

        self._finish = finish


class InOrder(zero.Zero3):
    """The parts of a ZeRO-3 engine whose gradients are summed in one order instead of by DeepSpeed's reducer: sums,
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


class RunsInOrder(zero12.Zero12):
    """The same for ZeRO-1 and -2, where a rank owns a run of each group of parameters, so that most parameters are
    summed on one rank."""

    def __init__(
        self,
        engine,
        group: dist.ProcessGroup,
        accumulate_in: torch.dtype,
        order: RowSum,
        sums: MicrobatchSums | None,
        bucket: int,
    ):
        super().__init__(engine, accumulate_in)
        self._ranks, self._order, self._sums, self._bucket = group, order, sums, bucket
        self._pending: list[torch.nn.Parameter] = []

    def begin_reduction(self) -> None:
        self._handed_over.clear()
        self.begin_partitions()

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Put the gradient into the bucket; a full bucket is sent."""
        self._handed_over.add(id(param))
        self._pending.append(param)
        if sum(waiting.numel() for waiting in self._pending) >= self._bucket:
            self._send()

    def finish_reduction(self) -> None:
        self._send()
        self.give_partitions()

    def _cut(self, param: torch.nn.Parameter) -> list[list[torch.Tensor]]:
        """Each rank's part of each of this one's partial sums of the gradient."""
        assert param.grad is not None
        sums = [param.grad, *take_others(self._sums, param)]
        flats = [(torch.zeros_like(param.grad) if each is None else each).view(-1) for each in sums]
        return [[flat[start:stop] for flat in flats] for start, stop in self.cuts(param)]

    def _send(self) -> None:
        """One all-to-all of what each rank owns of the bucket."""
        params, self._pending = self._pending, []
        if not params:
            return
        cut = zip(*map(self._cut, params), strict=True)  # of each rank, each parameter's sums
        parts = [torch.cat([each for sums in zip(*of_rank, strict=True) for each in sums]) for of_rank in cut]
        counts, rank = self._order.counts, self._ranks.rank()
        mine = parts[rank].numel() // counts[rank]
        theirs = parts[0].new_empty(sum(counts) * mine)
        taken, sent = [count * mine for count in counts], [part.numel() for part in parts]
        for param in params:
            param.grad = None
        dist.all_to_all_single(theirs, torch.cat(parts), taken, sent, group=self._ranks)
        if mine:
            total = self._order.add(theirs.view(-1, mine), theirs.dtype)
            places = [self.gradient_partition(param) for param in params]
            for place, part in zip(places, total.split([place.numel() for place in places]), strict=True):
                place.copy_(part)


class ScatterInOrder:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`: an all-to-all, and a sum of rows. others: of the
    input, what is sent beside it."""

    def __init__(self, order: RowSum, others: OtherSums = lambda flat: []):
        self._order, self._others = order, others

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False) -> None:
        """Add up each rank's piece of `input_tensor` into `output_tensor`; op: SUM or AVG."""
        flats = [input_tensor, *self._others(input_tensor)]
        output_tensor.copy_(_summed_piece(flats, group, self._order))
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class ScatterIntoTree(ScatterInOrder):
    """The same for the gradients of single micro-batches: they wait in a tree over those of all ranks. It gives zeros,
    to which fully_shard adds, until the last has come, and then the sum."""

    def __init__(self, sums: MicrobatchSums, place: Callable[[int, int], int]):
        self._sums, self._place = sums, place
        self._tree: SumTree | None = None

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False) -> None:
        rows = torch.empty_like(input_tensor).view(group.size(), -1)
        dist.all_to_all_single(rows, input_tensor.view_as(rows), group=group)
        self._tree = self._tree or SumTree(self._sums.count * group.size())
        for rank, row in enumerate(rows):
            is_last = self._tree.add(self._place(self._sums.of_backward, rank), row, lent=True)
        total = self._tree.total() if is_last else None
        if total is None:
            output_tensor.zero_()
            return
        self._tree = None
        output_tensor.copy_(total)

    def clear(self) -> None:
        """Drop what came, at the beginning of a step."""
        self._tree = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        if self._tree is not None:
            yield from self._tree.tensors()


def sum_in_order(
    order: RowSum, sums: MicrobatchSums | None, group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for torch DDP: the sum over `group`, each rank adding its piece up."""
    flat = bucket.buffer()
    flats = [flat, *others_like(flat, bucket.parameters(), bucket.gradients(), sums)]  # type: ignore[arg-type]
    padded = [torch.nn.functional.pad(each, (0, -flat.numel() % group.size())) for each in flats]
    mine = _summed_piece(padded, group, order)
    dist.all_gather_into_tensor(padded[0], mine.clone(), group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(padded[0][: flat.numel()])
    return done


def others_like(
    flat: torch.Tensor,
    params: Sequence[torch.nn.Parameter],
    views: Sequence[torch.Tensor],
    sums: MicrobatchSums | None,
) -> list[torch.Tensor]:
    """OtherSums of `flat`, in which the gradient of each of `params` is one of `views`."""
    if sums is None or sums.num_parts == 1:
        return []
    starts = [view.storage_offset() - flat.storage_offset() for view in views]
    found = [torch.zeros_like(flat) for _ in range(sums.num_parts - 1)]
    for param, start in zip(params, starts, strict=True):
        for other, part in zip(found, sums.take_others(param), strict=True):
            if part is not None:
                other[start : start + part.numel()] = part.view(-1)
    return found


def take_others(sums: MicrobatchSums | None, param: torch.nn.Parameter) -> list[torch.Tensor | None]:
    """Of this rank's partial sums of the gradient, those that `param.grad` has not, which are given away."""
    return [] if sums is None else sums.take_others(param)


def _summed_piece(flats: Sequence[torch.Tensor], group: dist.ProcessGroup, order: RowSum) -> torch.Tensor:
    """This rank's piece, flat.numel() / ranks elements, of the sum of all ranks' `flats`."""
    cut = [flat.view(group.size(), 1, -1) for flat in flats]
    rows = torch.cat(cut, dim=1) if len(cut) > 1 else cut[0]
    theirs, _ = exchange_rows(rows, order.counts, group)
    return order.add(theirs, rows.dtype)


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
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
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


def _add(partitions: list[torch.Tensor], total: torch.Tensor) -> None:
    for partition, part in zip(partitions, total.split([p.numel() for p in partitions]), strict=True):
        partition.add_(part.to(partition.device))
