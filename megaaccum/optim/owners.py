"""The owner of each matrix under Muon and SOAP: a pipeline stage's matrices are shared out among its ranks by the cost
of their updates. And where momenta live. Without torch: the planner prices layouts with it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megaaccum.config.schema import Config


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

    def soap_flops(self) -> int:
        """Operations of a step of SOAP: ten products of the matrix with a side's square, and for each square two
        products and a QR decomposition (8/3 n^3 with its factor, Golub and Van Loan, "Matrix Computations", 5.2)."""
        sides = self.rows, self.columns
        return 10 * self.numel * sum(sides) + sum(4 * side**3 + 8 * side**3 // 3 for side in sides)

    @property
    def soap_elements(self) -> int:
        """Elements of SOAP's state: two moments, and for each side a square of sums and one of eigenvectors."""
        return 2 * (self.numel + self.rows**2 + self.columns**2)


Cost = Callable[[Matrix], int]
COSTS: dict[str, Cost] = {"muon": partial(Matrix.flops, steps=1), "soap": Matrix.soap_flops}
"""The measure by which matrices are shared out, for each optimizer that steps them whole and the rest by AdamW."""


def at_owners(config: Config, num_microbatches: int) -> bool:
    """Whether a matrix' gradient is reduced straight to its owner, who keeps the momentum; else the momentum lives
    where the backend's shards do.

    Not with torch DDP, where all ranks have the whole gradient; with sums in one order, which each backend makes in its
    own shards; with an optimizer in host memory; if weights are added to gradients; and not where replicas stream more
    than two micro-batches, which would cross between replicas one by one.
    """
    keys, sharding = config.optimizer, config.sharding
    adds_weights = keys.muon_weight_decay_method == "l2"
    streams = sharding.sync == "streaming" and sharding.data_parallel_replicas > 1 and num_microbatches > 2
    elsewhere = sharding.backend == "ddp" or sharding.deterministic or sharding.offload_optimizer != "none"
    return keys.optimizer == "muon" and not (elsewhere or adds_weights or streams)


def assign(
    matrices: Iterable[Matrix],
    ranks: int,
    holders: Mapping[str, tuple[int, ...]] | None = None,
    cost: Cost = COSTS["muon"],
) -> list[list[Matrix]]:
    """The matrices of each rank, largest cost first: those of a parameter go together to the rank with the least so far
    (longest processing time first, Graham 1969). The same on every rank that lists the same matrices in whatever order.
    holders: by name, the ranks among which the owner is chosen; all by default."""
    by_name: defaultdict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_name[matrix.name].append(matrix)
    loads, everyone = [0] * ranks, tuple(range(ranks))
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    owned: list[list[Matrix]] = [[] for _ in range(ranks)]
    for load, name in sorted((-sum(map(cost, its)), name) for name, its in by_name.items()):
        if (among := everyone if holders is None else holders[name]) not in heaps:
            heaps[among] = sorted((loads[rank], rank) for rank in among)
        heap = heaps[among]
        while heap[0][0] != (now := loads[heap[0][1]]):  # it was given a matrix from another heap
            heapq.heapreplace(heap, (now, heap[0][1]))
        rank = heap[0][1]
        owned[rank] += sorted(by_name[name])
        loads[rank] -= load
        heapq.heapreplace(heap, (loads[rank], rank))
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


def balance(owned: Sequence[Sequence[Matrix]], cost: Cost = COSTS["muon"]) -> float:
    """The cost of the busiest owner over the mean of all ranks; 1 without matrices."""
    costs = [sum(map(cost, matrices)) for matrices in owned]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0
