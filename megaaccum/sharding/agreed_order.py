"""Reductions that begin in the same order on every rank, whichever gradients the last backward of a rank brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megaaccum.platform import cpu

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups


class AgreedOrder:
    """Calls `reduce(param)` for each of `params` once per reduction, in one order on all ranks that reduce together.

    A parameter that some micro-batches skip (a tower for images, a head of its own) has a gradient in the last backward
    of some ranks alone. Ranks that reduced gradients as they come would add up those of different parameters, or wait
    for each other. The order is that in which gradients were complete on the first of them in the first reduction,
    which is made when all are. Later a complete gradient waits for those before it: for none if it comes in its turn,
    and to the end of the flush if one of them does not come.

    params: those that are trained, in the order of the model, as many on every rank.
    """

    def __init__(
        self, groups: Groups, params: Iterable[torch.nn.Parameter], reduce: Callable[[torch.nn.Parameter], None]
    ):
        # Ranks of tp reduce experts together if these are not cut over it. Otherwise a group that communicates anyway.
        self._among = groups.dp_cp if groups.layout.etp == groups.layout.tp else groups.collection.tp_dp_cp
        self._params, self._reduce = list(params), reduce
        self._order: list[torch.nn.Parameter] = []
        self._complete: dict[int, None] = {}
        """ids of the parameters with a complete gradient, in the order in which they were added."""
        self._begun = 0

    def begin(self) -> None:
        """Begin a reduction."""
        self._complete.clear()
        self._begun = 0

    def add(self, param: torch.nn.Parameter) -> None:
        """Reduce a complete gradient, and those that waited for it, if all before it in the order have begun."""
        self._complete[id(param)] = None
        while self._begun < len(self._order) and id(self._order[self._begun]) in self._complete:
            self._begun += 1
            self._reduce(self._order[self._begun - 1])

    def end(self) -> None:
        """Agree on the order if there is none. Every parameter has been added. Collective over these ranks."""
        if self._order or not self._params:
            return
        number = {id(param): number for number, param in enumerate(self._params)}
        mine = torch.tensor([number[key] for key in self._complete], device=cpu.device())
        dist.broadcast(mine, group=self._among, group_src=0)
        self._order = [self._params[number] for number in mine.tolist()]
        self.add(self._order[0])
