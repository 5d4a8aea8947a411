"""Sums in one order, whatever the layout (`reproducible: layout`).

The micro-batches of the global batch, in its order, are the leaves of a binary tree: the first half of them, the second
half, and so on. Its shape depends on their number alone. A data-parallel rank holds a run of them (resident), which is
a subtree where the number of ranks is a power of two; or shards of all of them (streaming). Floating-point addition of
two numbers does not depend on which comes first, so neither does a node on when its children arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import torch

from megaaccum import upstream

if TYPE_CHECKING:
    from megaaccum.config import Plan

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


def tree_sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of `parts` in a precision; sums of fewer than all are in that of `parts`. The first of each pair is
    overwritten."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    middle, rounded = len(parts) // 2, parts[0].dtype
    return tree_sum(parts[:middle], rounded).to(dtype).add_(tree_sum(parts[middle:], rounded))


class SumTree:
    """Adds up the tensors of `count` leaves, which may come in any order. rounded: the precision of leaves and of all
    sums but the last, which is FP32; None is that of the tensors that come."""

    def __init__(self, count: int, rounded: torch.dtype | None = None):
        self._above, self._root, self._rounded = _above(count), (0, count), rounded
        self._nodes: dict[Node, torch.Tensor] = {}

    def add(self, leaf: int, tensor: torch.Tensor, *, lent: bool = False) -> bool:
        """Take the tensor of `leaf`, which is overwritten; lent: a copy of it, where it cannot be added at once.
        Returns whether all are there."""
        node, given = (leaf, leaf + 1), tensor
        if self._rounded is not None and node != self._root:
            tensor = tensor.to(self._rounded)
        while node != self._root:
            sibling, parent = self._above[node]
            if sibling not in self._nodes:
                break
            tensor = self._in_precision_of(parent, self._nodes.pop(sibling)).add_(tensor)
            node = parent
        lent = lent and tensor is given
        assert node not in self._nodes, f"leaf {leaf} came twice"
        self._nodes[node] = tensor.clone() if lent else tensor
        return node == self._root

    def total(self) -> torch.Tensor | None:
        """The sum of what came, which is given away; None if nothing did."""
        nodes, self._nodes = self._nodes, {}

        def of(node: Node) -> torch.Tensor | None:
            if node in nodes or node[1] - node[0] == 1:
                return nodes.get(node)
            middle = sum(node) // 2
            first, second = of((node[0], middle)), of((middle, node[1]))
            if first is None or second is None:
                return second if first is None else first
            return self._in_precision_of(node, first).add_(second)

        total = of(self._root)
        return None if total is None else self._in_precision_of(self._root, total)

    def _in_precision_of(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the precision of the sum of `node`."""
        return tensor.float() if self._rounded is not None and node == self._root else tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        yield from self._nodes.values()

    @property
    def nbytes(self) -> int:
        """Of the partial sums that it holds."""
        return sum(tensor.nbytes for tensor in self._nodes.values())


class MicrobatchSums:
    """The gradients of a rank's micro-batches, each parameter's in a tree of its own, until they are reduced.

    The micro-batch whose forward or backward begins is announced. A parameter's gradient is taken from it after each
    backward, and given back as the sum when the last has come. rounded: as SumTree's.
    """

    def __init__(self, rounded: torch.dtype | None = None) -> None:
        self.rounded = rounded
        self.count = 1
        """This rank's micro-batches of the step."""
        self._first = self._forward = self._backward = 0
        self._trees: dict[int, SumTree] = {}
        self._done: set[int] = set()

    @classmethod
    def of(cls, plan: Plan) -> Self | None:
        """Those of a plan that asks for one order in every layout; else None. With messages of 16 bits all that may
        have to cross ranks is rounded, also where it does not."""
        sharding = plan.config.sharding
        if sharding.reproducible != "layout":
            return None
        return cls(torch.bfloat16 if sharding.grad_reduce_dtype == "bf16" else None)

    def clear(self) -> None:
        """Drop what came, at the beginning of a step."""
        self._trees.clear()
        self._done.clear()

    def missing(self, count: int) -> str:
        """Why `count` micro-batches do not make the step's sums; empty where they do."""
        if count == self.count:
            return ""
        return (
            f"each rank had {count} micro-batches, and reproducible layout adds up the {self.count} of the plan: give"
            " it as many, or set reproducible to none."
        )

    def begin_flush(self, first: int) -> None:
        """A flush begins, whose first micro-batch is number `first` of the step."""
        self._first = first

    def begin_forward(self, index: int) -> None:
        """The forward of micro-batch `index` of the step begins."""
        self._forward = index

    def begin_backward(self, index: int) -> None:
        """Gradients that come now are of micro-batch `index` of the step."""
        self._backward = index

    def begin_weight_grad(self, index: int) -> None:
        """The same, in a W of micro-batch `index` of the flush."""
        self._backward = self._first + index

    @property
    def of_backward(self) -> int:
        """The micro-batch of the backward, I or W that runs."""
        return self._backward

    @property
    def microbatch(self) -> int:
        """Which one runs, in a recomputed forward that of the backward."""
        return self._backward if upstream.in_backward() else self._forward

    def take(self, param: torch.nn.Parameter) -> bool:
        """Take the current micro-batch's gradient from `param.grad`. True where it was the last: the sum is there."""
        if id(param) in self._done or param.grad is None:
            return id(param) in self._done
        grad, param.grad = param.grad, None
        is_last = self.add(param, grad)
        if is_last:
            self.give_back(param)
        return is_last

    def give_back(self, param: torch.nn.Parameter) -> None:
        """Put the sum of what came into `param.grad`; some micro-batches may have given it no gradient."""
        if id(param) not in self._done:
            param.grad = self.total(param)

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        """Add the current micro-batch's gradient, which is overwritten. Returns whether all are there."""
        return self._trees.setdefault(id(param), SumTree(self.count, self.rounded)).add(self._backward, grad)

    def total(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """The sum of what came, which is given away."""
        self._done.add(id(param))
        tree = self._trees.pop(id(param), None)
        return None if tree is None else tree.total()

    def tensors(self) -> Iterator[torch.Tensor]:
        """The partial sums that it holds."""
        for tree in self._trees.values():
            yield from tree.tensors()
