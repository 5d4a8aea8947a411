"""Reductions that begin in the same order on every rank, whichever gradients the last backward of a rank brings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.sharding.expert_turns import ExpertTurns


class AgreedOrder:
    """Calls `reduce(param)` for each of `params` once per reduction, in one order on all ranks that reduce together.

    A parameter that some micro-batches skip (a tower for images, a head of its own) has a gradient in the last backward
    of some ranks alone. Ranks that reduced gradients as they come would add up those of different parameters, or wait
    for each other. The order is that in which gradients were complete on the first of them in the first reduction,
    which is made when all are. Later a complete gradient waits for those before it: for none if it comes in its turn,
    and to the end of the flush if one of them does not come.

    A reduction may hold up the backward that it begins in (ZeRO, and all on a CPU) until every rank has begun it, at
    the latest where its last flush ends: `end` comes before anything else that ranks do together. Ranks of expert
    parallelism exchange tokens in that backward: one that waits for a parameter that the other skips would hang both.
    There, and on a CPU, reductions begin after the backward if the first step's micro-batches do not all use the same
    dense parameters.

    params: those of `chunks` that are trained, in the order of the model, as many on every rank. uses: gradients of
    each in the first step, by id, which the caller counts.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: Iterable[torch.nn.Module],
        params: Iterable[torch.nn.Parameter],
        reduce: Callable[[torch.nn.Parameter], None],
    ):
        # Ranks of tp reduce experts together if these are not cut over it. Otherwise a group that communicates anyway.
        self._among = groups.dp_cp if plan.layout.etp == plan.layout.tp else groups.collection.tp_dp_cp
        self._params, self._reduce = list(params), reduce
        chunks, in_pieces = list(chunks), plan.config.parallel.overlap_moe_expert_parallel_comm
        self._turns = ExpertTurns(chunks, self.add, splits=plan.layout.splits_backward, in_pieces=in_pieces)
        self.uses: Counter[int] = Counter()
        self._can_hang, self._at_end = plan.layout.ep > 1 or not cpu.has_accelerator(), False
        self._order: list[torch.nn.Parameter] = []
        self._complete: dict[int, None] = {}
        """ids of the parameters with a complete gradient, in the order in which they were added."""
        self._begun = 0
        overlaps = any(getattr(getattr(chunk, "config", None), "moe_shared_expert_overlap", False) for chunk in chunks)
        self._of_streams = cpu.has_accelerator() and overlaps
        self._ready: dict[int, torch.cuda.Event] = {}
        """When each gradient is complete on a GPU whose streams are several, by id."""

    def begin(self) -> None:
        """Begin a reduction."""
        self._turns.begin()
        self._complete.clear()
        self.uses.clear()
        self._begun = 0

    def came(self, param: torch.nn.Parameter) -> None:
        """Take note of a parameter's final gradient. Raises FlushError if it was complete without it."""
        if self._of_streams:  # it may be handed over from another one's stream
            self._ready[id(param)] = torch.cuda.current_stream().record_event()
        self._turns.came(param)

    def add(self, param: torch.nn.Parameter) -> None:
        """Reduce a complete gradient, and those that waited for it, if all before it in the order have begun; none yet
        if reductions begin after the backward."""
        self._complete[id(param)] = None
        if not self._at_end:
            self._reduce_in_turn()

    def end(self) -> None:
        """Reduce what is left: gradients that have not come are complete without. Collective in the first reduction."""
        for param in self._params:
            self._turns.finish(param)
        if self._params and not self._order:
            self._order = self._agreed()
            self._at_end = self._can_hang and self._some_are_skipped()
        self._reduce_in_turn()

    @property
    def counts_uses(self) -> bool:
        """Whether `uses` is still to be counted."""
        return self._can_hang and not self._order

    def _some_are_skipped(self) -> bool:
        """Whether dense parameters have fewer uses than there were micro-batches, or other ones on another rank."""
        uses = [self.uses[id(param)] for param in self._params if not names.is_expert(param)]
        most = torch.tensor([uses, [-count for count in uses]], dtype=torch.int64, device=cpu.device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._among)
        counts = set(most[0].tolist()) - {0}
        return bool((most[0] != -most[1]).any()) or any(count % min(counts) for count in counts)

    def _reduce_in_turn(self) -> None:
        while self._begun < len(self._order) and id(self._order[self._begun]) in self._complete:
            param = self._order[self._begun]
            self._begun += 1
            if (ready := self._ready.pop(id(param), None)) is not None:
                ready.wait()
            self._reduce(param)

    def _agreed(self) -> list[torch.nn.Parameter]:
        """The parameters in the order in which the first rank has added them."""
        number = {id(param): number for number, param in enumerate(self._params)}
        order = torch.tensor([number[key] for key in self._complete], dtype=torch.int64, device=cpu.device())
        dist.broadcast(order, group=self._among, group_src=0)
        return [self._params[number] for number in order.tolist()]
