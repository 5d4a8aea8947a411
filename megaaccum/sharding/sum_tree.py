"""Sums in one order, whatever the layout (`reproducible: layout`).

The micro-batches of the global batch, in its order, are the leaves of a binary tree: the first half of them, the second
half, and so on. Its shape depends on their number alone. A data-parallel rank holds a run of them (resident), which is
a subtree where the number of ranks is a power of two, and else a few subtrees, of which each crosses ranks; or shards
of all of them (streaming). Floating-point addition of two numbers does not depend on which comes first, so neither does
a node on when its children arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.errors import FlushError
from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.upstream import pytorch

Node = tuple[int, int]
"""The leaves below it: from the first, up to the second."""


@cache
def _above(count: int) -> dict[Node, tuple[Node, Node]]:
    """{node: (its sibling, its parent)} of the tree of `count` leaves; the root has neither."""

    def below(node: Node) -> Iterator[tuple[Node, tuple[Node, Node]]]:
        start, stop = node
        if stop - start > 1:
            left, right = (start, (start + stop) // 2), ((start + stop) // 2, stop)
            yield left, (right, node)
            yield right, (left, node)
            yield from below(left)
            yield from below(right)

    return dict(below((0, count)))


@cache
def nodes_of(count: int, run: Node) -> tuple[Node, ...]:
    """The largest nodes of the tree of `count` leaves that hold leaves of `run` alone, in order."""
    start, stop = run

    def inside(node: Node) -> Iterator[Node]:
        first, last = node
        if start <= first and last <= stop:
            yield node
        elif first < stop and start < last:
            middle = (first + last) // 2
            yield from inside((first, middle))
            yield from inside((middle, last))

    return tuple(inside((0, count)))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of `each` leaves that `ranks` ranks hold, one rank's after the other's. blocks: of each sequence, that
    have gradients of their own; the leaves of the first block come before those of the second. cp: ranks, one after the
    other, that share a sequence; each has a run in each of its blocks. sources: ranks, one after the other, that send
    their tokens to one; it then has the runs of all of them, and is numbered among those like it."""

    each: int
    ranks: int
    blocks: int = 1
    cp: int = 1
    sources: int = 1

    @property
    def of_a_block(self) -> int:
        """Leaves of a block, of all ranks."""
        return self.each * self.ranks // self.cp

    @property
    def leaves(self) -> int:
        """Leaves of all ranks."""
        return self.of_a_block * self.blocks

    def starts(self, rank: int) -> list[int]:
        """The first leaf of each run of a rank: of the first block, those of all sources, and so on."""
        count, found = self.blocks // self.cp, []
        for number, source in product(range(count), range(rank * self.sources, (rank + 1) * self.sources)):
            first, cp_rank = divmod(source, self.cp)
            found.append((cp_rank * count + number) * self.of_a_block + first * self.each)
        return found

    def nodes(self, rank: int) -> tuple[Node, ...]:
        """The nodes of a rank's runs that remain when all possible additions are done."""
        runs: list[Node] = []
        for start in sorted(self.starts(rank)):
            joins = runs and runs[-1][1] == start  # one run ends where the next begins
            runs.append((runs.pop()[0] if joins else start, start + self.each))
        return tuple(node for run in runs for node in nodes_of(self.leaves, run))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many nodes each rank has."""
        return tuple(len(self.nodes(rank)) for rank in range(self.ranks // self.sources))

    def add(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum, in a precision, of `rows` [nodes of all ranks, elements], one rank's after the other's, which are
        overwritten. Sums of fewer than all are in the precision of the rows."""
        tree = SumTree(self.leaves, None if rows.dtype is dtype else rows.dtype)
        nodes = [node for rank in range(self.ranks // self.sources) for node in self.nodes(rank)]
        for node, row in zip(nodes, rows, strict=True):
            tree.add(node, row)
        total = tree.total()
        assert total is not None
        return total


class SumTree:
    """Adds up the tensors of `count` leaves, or those below some nodes, which may come in any order. rounded: the
    precision of leaves and of all sums but that of all leaves, which is FP32; None is that of the tensors that come."""

    def __init__(self, count: int, rounded: torch.dtype | None = None, *, nodes: tuple[Node, ...] | None = None):
        self._above, self._root, self._rounded = _above(count), (0, count), rounded
        self._run = (self._root,) if nodes is None else nodes
        self._missing = set(self._run)
        self._nodes: dict[Node, torch.Tensor] = {}
        self._came: set[Node] = set()

    def add(self, place: int | Node, tensor: torch.Tensor, *, lent: bool = False) -> bool:
        """Take the tensor of a leaf, or the sum of a node, which is overwritten; lent: a copy of it, where it cannot
        be added at once. Returns whether all are there. Raises FlushError if a leaf comes twice."""
        node, given = (place, place + 1) if isinstance(place, int) else place, tensor
        if node in self._came:
            raise FlushError(
                "reproducible layout: a parameter has a second gradient in one micro-batch, as of a layer that runs"
                " twice in reentrant checkpoints, or under fsdp2 with sync streaming: set sync to resident, and the"
                " checkpoints' use_reentrant to False"
            )
        self._came.add(node)
        if self._rounded is not None and node != self._root:
            tensor = tensor.to(self._rounded)
        while node != self._root:
            sibling, parent = self._above[node]
            if sibling not in self._nodes:
                break
            tensor = self._in_precision_of(parent, self._nodes.pop(sibling)).add_(tensor)
            node = parent
        self._nodes[node] = tensor.clone() if lent and tensor is given else tensor
        self._missing.discard(node)
        return not self._missing

    def total(self) -> torch.Tensor | None:
        """Pop the sum of a run that is one subtree; None if nothing was added."""
        (total,) = self.totals()
        return total

    def totals(self) -> list[torch.Tensor | None]:
        """Pop the sums of the run's nodes."""
        nodes, self._nodes = self._nodes, {}

        def of(node: Node) -> torch.Tensor | None:
            if node in nodes or node[1] - node[0] == 1:
                return nodes.get(node)
            middle = sum(node) // 2
            first, second = of((node[0], middle)), of((middle, node[1]))
            if first is None or second is None:
                return second if first is None else first
            return self._in_precision_of(node, first).add_(second)

        return [None if (total := of(node)) is None else self._in_precision_of(node, total) for node in self._run]

    def _in_precision_of(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the precision of the sum of `node`."""
        return tensor.float() if self._rounded is not None and node == self._root else tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        yield from self._nodes.values()

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums that it holds."""
        return sum(tensor.nbytes for tensor in self._nodes.values())


class AnyOrder:
    """Gradients of micro-batches in whatever order autograd and the collectives add them up: the stand-in for
    MicrobatchSums if no order is asked for. Keeps nothing."""

    in_one_order = False
    count = 1
    rounded: torch.dtype | None = None
    of_backward = 0
    """The micro-batch of the backward, I or W that runs."""
    in_last_flush = True
    """Whether the flush that runs has the step's last micro-batch."""

    def num_parts(self, param: torch.nn.Parameter | None = None) -> int:
        return 1

    @property
    def microbatch(self) -> int:
        return 0

    def clear(self) -> None: ...

    def missing(self, count: int) -> str:
        return ""

    def begin_flush(self, first: int, stop: int) -> None: ...

    def begin_weight_grad(self, index: int) -> None: ...

    def accept(self, param: torch.nn.Parameter) -> bool:
        return True

    def give_back(self, param: torch.nn.Parameter) -> None: ...

    def others(self, param: torch.nn.Parameter) -> list[torch.Tensor | None]:
        return []

    def pop_others(self, param: torch.nn.Parameter) -> list[torch.Tensor | None]:
        return []

    def total(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        return iter(())


class MicrobatchSums(AnyOrder):
    """The gradients of a rank's micro-batches, each parameter's in a tree of its own, until they are reduced.

    The micro-batch whose forward or backward begins is announced. A parameter's gradient is taken from it after each
    backward, and given back as the sum when the last has come; where this rank's run is several subtrees, as that of
    the first, and `others` has the rest. rounded: as SumTree's. runs: of all ranks, whatever micro-batches each has;
    its `sources` are those of experts with ranks of their own. rank: this one's number among them. Gradients of each of
    a rank's runs come from its number (`wgrad.tokens_from`).
    """

    in_one_order = True

    def __init__(self, rounded: torch.dtype | None = None, runs: Runs | None = None, rank: int = 0):
        self.rounded = rounded
        self.count = 1
        """This rank's micro-batches of the step."""
        self._runs, self._rank = runs or Runs(1, 1), rank
        self._first = self._forward = 0
        self._trees: dict[int, tuple[SumTree, list[int]]] = {}
        """By parameter, with the first leaf of each of this rank's runs."""
        self._done: set[int] = set()
        self._others: dict[int, list[torch.Tensor | None]] = {}

    @classmethod
    def from_plan(cls, plan: Plan, groups: Groups) -> AnyOrder:
        """The sums of a plan that asks for one order in every layout, else AnyOrder. With messages of 16 bits all that
        may have to cross ranks is rounded, even if it does not cross."""
        sharding = plan.config.sharding
        if sharding.reproducible != "layout":
            return AnyOrder()
        rounded = torch.bfloat16 if sharding.grad_reduce_dtype == "bf16" else None
        if not plan.in_runs:
            return cls(rounded)
        blocks, ranks = sharding.reproducible_context_blocks or 1, groups.dp_cp.size()
        return cls(rounded, Runs(1, ranks, blocks, plan.layout.cp, plan.layout.ep), groups.dp_cp.rank())

    def _runs_of(self, param: torch.nn.Parameter | None) -> tuple[Runs, int]:
        """The runs of the ranks that hold a parameter, and which of them is this rank's."""
        sources = self._runs.sources if param is not None and names.is_expert(param) else 1
        return replace(self._runs, each=self.count, sources=sources), self._rank // sources

    def num_parts(self, param: torch.nn.Parameter | None = None) -> int:
        """Number of sums of this rank's runs of gradients of `param`, by default of a dense parameter."""
        runs, rank = self._runs_of(param)
        return len(runs.nodes(rank))

    def clear(self) -> None:
        """Drop all sums, at the beginning of a step."""
        self._trees.clear()
        self._done.clear()
        self._others.clear()

    def missing(self, count: int) -> str:
        """Why `count` micro-batches do not make the step's sums; empty where they do."""
        if count == self.count:
            return ""
        return (
            f"each rank had {count} micro-batches, and reproducible layout adds up the {self.count} of the plan: give"
            " it as many, or set reproducible to none."
        )

    def begin_flush(self, first: int, stop: int) -> None:
        """A flush begins, of the micro-batches `first` to `stop` - 1 of the step."""
        self._first, self.in_last_flush = first, stop == self.count

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        """Note that the forward of micro-batch `microbatch` of the step begins."""
        self._forward = microbatch

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Note that gradients from now on are those of micro-batch `microbatch` of the step."""
        self.of_backward = microbatch

    def begin_weight_grad(self, index: int) -> None:
        """The same, in a W of micro-batch `index` of the flush."""
        self.of_backward = self._first + index

    @property
    def microbatch(self) -> int:
        """Which one runs, in a recomputed forward that of the backward."""
        return self.of_backward if pytorch.in_backward() else self._forward

    def accept(self, param: torch.nn.Parameter) -> bool:
        """Take the current micro-batch's gradient from `param.grad`. True if it was the last: the sum is there."""
        if id(param) in self._done or param.grad is None:
            return id(param) in self._done
        grad, param.grad = param.grad, None
        if is_last := self.add(param, grad):
            self.give_back(param)
        return is_last

    def give_back(self, param: torch.nn.Parameter) -> None:
        """Put the parameter's sum into `param.grad`; it may have no gradient from some micro-batches."""
        if id(param) not in self._done and (total := self.total(param)) is not None:
            param.grad = total.to(param.grad_dtype or param.dtype)

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Add the current micro-batch's gradient, which is overwritten. Returns whether all are there."""
        if id(param) not in self._trees:
            runs, rank = self._runs_of(param)
            self._trees[id(param)] = SumTree(runs.leaves, self.rounded, nodes=runs.nodes(rank)), runs.starts(rank)
        tree, starts = self._trees[id(param)]
        return tree.add(starts[wgrad.source()] + self.of_backward, grad)

    def total(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Pop the parameter's sum; if the run is several subtrees, the sum of the first."""
        self._done.add(id(param))
        if id(param) not in self._trees:
            return None
        first, *others = self._trees.pop(id(param))[0].totals()
        if others:
            self._others[id(param)] = others
        return first

    def others(self, param: torch.nn.Parameter) -> list[torch.Tensor | None]:
        """The sums of this rank's other subtrees; None where no gradient came."""
        return self._others.get(id(param), [None] * (self.num_parts(param) - 1))

    def pop_others(self, param: torch.nn.Parameter) -> list[torch.Tensor | None]:
        """The same, and let go of them."""
        return self._others.pop(id(param), None) or self.others(param)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        for tree, _ in self._trees.values():
            yield from tree.tensors()
        yield from (each for others in self._others.values() for each in others if each is not None)


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which rows from all ranks are added. counts: rows that each rank sends. add: returns the sum, in a
    precision, of all rows [rows, elements] in the order of ranks; it may overwrite them."""

    counts: Sequence[int]
    add: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def in_rank_order(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows, one after the other."""
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total += row
    return total


def order_of(plan: Plan, group: dist.ProcessGroup) -> Order | None:
    """The order in which `plan` adds rows from the ranks of `group`; None leaves it to the collective."""
    sharding = plan.config.sharding
    if sharding.reproducible == "layout":
        each, ranks, cp = plan.batch.num_microbatches, plan.layout.dp * plan.layout.cp, plan.layout.cp
        runs = Runs(each, ranks, sharding.reproducible_context_blocks or 1, cp, ranks // group.size())
        return Order(runs.counts, runs.add)
    return Order([1] * group.size(), in_rank_order) if sharding.deterministic else None


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
