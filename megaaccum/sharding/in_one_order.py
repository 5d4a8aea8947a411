"""The reductions of each engine with sums in one order: `deterministic` adds in rank order, `reproducible: layout`
along the tree of micro-batches (sum_tree.py). They take the place of the engine's own, one per backend.

Each is an all-to-all of rows, which moves the bytes of a reduce-scatter, and a sum of what arrived on the rank that
keeps it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.model import names
from megaaccum.sharding.experts import ReducerByRanks
from megaaccum.sharding.sum_tree import AnyOrder, Order, SumTree, exchange_rows, order_of
from megaaccum.upstream import zero, zero12

OtherSums = Callable[[torch.Tensor], list[torch.Tensor]]
"""A rank's other partial sums of the gradients in a flat tensor, each laid out like it."""


class _InOneOrder(zero.ZeroDriver):
    """The driver of a ZeRO engine whose gradients are summed in one order instead of by DeepSpeed's reducer: sums, not
    averages. bucket: elements that are summed in one collective."""

    def __init__(self, *args: Any, bucket: int):
        super().__init__(*args)
        self._bucket = bucket
        self._pending: list[torch.nn.Parameter] = []

    def begin_reduction(self) -> None:
        self.begin_partitions()

    def reduce(self, param: torch.nn.Parameter) -> None:
        """Put the gradient into the bucket, which is sent when it is full, or experts come after dense parameters or
        the other way round."""
        if self._pending and names.is_expert(self._pending[-1]) != names.is_expert(param):
            self._send_bucket()
        self._pending.append(param)
        if sum(map(self.numel, self._pending)) >= self._bucket:
            self._send_bucket()

    def finish_reduction(self) -> None:
        self._send_bucket()
        self.give_partitions()

    def _send_bucket(self) -> None:
        params, self._pending = self._pending, []
        if params:
            self._send(params)

    @abstractmethod
    def _send(self, params: list[torch.nn.Parameter]) -> None:
        """Start to add the gradients of `params` up in the ranks' partitions."""


class Zero3InOneOrder(_InOneOrder, zero.Zero3):
    """ZeRO-3, where a rank owns a part of every parameter."""

    def __init__(self, engine: Any, plan: Plan, groups: Groups, sums: AnyOrder):
        super().__init__(engine, bucket=plan.config.sharding.reduce_bucket_size)
        self._reducer = ReducerByRanks(plan, groups, sums)

    def _send(self, params: list[torch.nn.Parameter]) -> None:
        self._reducer.add([(param, self.accumulator(param)) for param in params])

    def give_partitions(self) -> None:
        self._reducer.wait()
        super().give_partitions()


class Zero12InOneOrder(_InOneOrder, zero12.Zero12):
    """ZeRO-1 and -2, where a rank owns a run of each group of parameters, so that most parameters are summed on one
    rank."""

    def __init__(self, engine: Any, plan: Plan, groups: Groups, sums: AnyOrder):
        sharding = plan.config.sharding
        super().__init__(engine, names.DTYPES[sharding.grad_accum_dtype], bucket=sharding.reduce_bucket_size)
        self._plan, self._groups, self._sums = plan, groups, sums

    def _cut(self, param: torch.nn.Parameter) -> list[tuple[int, int, torch.Tensor]]:
        """(rank, number of the sum, part): what each rank owns of this one's partial sums of the gradient, which are
        let go of."""
        grad, param.grad = param.grad, None
        assert grad is not None
        sums = [grad, *self._sums.pop_others(param)]
        flats = [(torch.zeros_like(grad) if each is None else each).view(-1) for each in sums]
        return [(rank, n, flat[start:stop]) for rank, start, stop in self.cuts(param) for n, flat in enumerate(flats)]

    def _send(self, params: list[torch.nn.Parameter]) -> None:
        """Make one all-to-all that sends each rank that holds the parameters its part of their gradients."""
        group = names.dp_group(params[0], self._groups)
        order = order_of(self._plan, group)
        assert order is not None
        counts, rank = order.counts, group.rank()
        cut = sorted((each for param in params for each in self._cut(param)), key=lambda each: each[:2])
        sent = [0] * group.size()
        for owner, _, part in cut:
            sent[owner] += part.numel()
        flat, mine = torch.cat([part for *_, part in cut]), sent[rank] // counts[rank]
        theirs = flat.new_empty(sum(counts) * mine)
        dist.all_to_all_single(theirs, flat, [count * mine for count in counts], sent, group=group)
        if mine:
            total = order.add(theirs.view(-1, mine), theirs.dtype)
            places = [self.gradient_partition(param) for param in params]
            torch._foreach_copy_(places, total.split([place.numel() for place in places]))


class ReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`: an all-to-all, and a sum of rows. others: of the
    input, what is sent beside it."""

    def __init__(self, order: Order, others: OtherSums = lambda flat: []):
        self._order, self._others = order, others

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add up each rank's piece of `input_tensor` into `output_tensor`; op: SUM or AVG."""
        self._sum(input_tensor, group, output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()

    def _sum(self, flat: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor) -> None:
        out.copy_(_summed_piece([flat, *self._others(flat)], group, self._order))


class StreamedReduceScatter(ReduceScatter):
    """The same for the gradients of single micro-batches: they wait in a tree over those of all ranks. It gives zeros,
    to which fully_shard adds, until the last has come, and then the sum."""

    def __init__(self, sums: AnyOrder, place: Callable[[int, int], int]):
        self._sums, self._place = sums, place
        self._tree: SumTree | None = None

    def _sum(self, flat: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor) -> None:
        rows = torch.empty_like(flat).view(group.size(), -1)
        dist.all_to_all_single(rows, flat.view_as(rows), group=group)
        self._tree = self._tree or SumTree(self._sums.count * group.size())
        for rank, row in enumerate(rows):
            is_last = self._tree.add(self._place(self._sums.of_backward, rank), row, lent=True)
        if (total := self._tree.total() if is_last else None) is None:
            out.zero_()
            return
        self._tree = None
        out.copy_(total)

    def clear(self) -> None:
        """Drop all gradients, at the beginning of a step."""
        self._tree = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        if self._tree is not None:
            yield from self._tree.tensors()


def all_reduce_hook(
    order: Order, sums: AnyOrder, group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for torch DDP: the sum over `group`, each rank adding its piece up."""
    flat = bucket.buffer()
    flats = [flat, *others_like(flat, bucket.parameters(), bucket.gradients(), sums)]  # type: ignore[arg-type]
    padded = [torch.nn.functional.pad(each, (0, -flat.numel() % group.size())) for each in flats]
    dist.all_gather_into_tensor(padded[0], _summed_piece(padded, group, order), group=group)
    return finished_future(padded[0][: flat.numel()])


def finished_future(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has `result`. On a GPU, who waits for it waits for the stream that computes it."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else [])
    future.set_result(result)
    return future


def others_like(
    flat: torch.Tensor, params: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor], sums: AnyOrder
) -> list[torch.Tensor]:
    """OtherSums of `flat`, in which the gradient of each of `params` is one of `views`."""
    if sums.num_parts() == 1:
        return []
    starts = [view.storage_offset() - flat.storage_offset() for view in views]
    found = [torch.zeros_like(flat) for _ in range(sums.num_parts() - 1)]
    for param, start in zip(params, starts, strict=True):
        for other, part in zip(found, sums.pop_others(param), strict=True):
            if part is not None:
                other[start : start + part.numel()] = part.view(-1)
    return found


def _summed_piece(flats: Sequence[torch.Tensor], group: dist.ProcessGroup, order: Order) -> torch.Tensor:
    """This rank's piece, flat.numel() / ranks elements, of the sum of all ranks' `flats`."""
    cut = [flat.view(group.size(), 1, -1) for flat in flats]
    rows = torch.cat(cut, dim=1) if len(cut) > 1 else cut[0]
    theirs, _ = exchange_rows(rows, order.counts, group)
    return order.add(theirs, rows.dtype)
