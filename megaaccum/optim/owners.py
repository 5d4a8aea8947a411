"""The owner of each matrix under Muon: a pipeline stage's matrices are shared out among its ranks by the cost of their
Newton-Schulz iterations. Without torch: the planner prices layouts with it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Matrix:
    """A matrix that is orthogonalised alone: the whole of a parameter, or a part of a fused one.

    name: of the parameter in the whole model. part: its number in that parameter. rows, columns: over all
    tensor-parallel ranks.
    """

    name: str
    part: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def flops(self, steps: int) -> int:
        """Operations of `steps` Newton-Schulz steps: two products with the long side, one of the short side alone."""
        short, long = sorted((self.rows, self.columns))
        return steps * (4 * short * short * long + 2 * short**3)


def assign(matrices: Iterable[Matrix], ranks: int) -> list[list[Matrix]]:
    """The matrices of each rank, largest cost first: each goes to the rank with the least so far (longest processing
    time first, Graham 1969). The same on every rank that lists the same matrices in whatever order."""
    loads = [(0, rank) for rank in range(ranks)]
    owned: list[list[Matrix]] = [[] for _ in range(ranks)]
    for cost, matrix in sorted((-each.flops(1), each) for each in matrices):
        load, rank = heapq.heappop(loads)
        owned[rank].append(matrix)
        heapq.heappush(loads, (load - cost, rank))
    return owned


def rounds(owned: Sequence[Sequence[Matrix]], most: int) -> list[list[tuple[int, Matrix]]]:
    """(owner, matrix) of each round of exchanges: in a round no owner gets more than `most` elements, unless a single
    matrix is larger."""
    found: list[list[tuple[int, Matrix]]] = []
    for owner, matrices in enumerate(owned):
        number, filled = 0, 0
        for matrix in matrices:
            if filled and filled + matrix.numel > most:
                number, filled = number + 1, 0
            filled += matrix.numel
            while len(found) <= number:
                found.append([])
            found[number].append((owner, matrix))
    return found


def balance(owned: Sequence[Sequence[Matrix]]) -> float:
    """The cost of the busiest owner over the mean of all ranks; 1 without matrices."""
    costs = [sum(matrix.flops(1) for matrix in matrices) for matrices in owned]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0
