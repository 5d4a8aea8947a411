"""One reader for each model-parallel group: the other ranks of the group are sent what their stages read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.data.loader import Batch, MicrobatchLoader
from megaaccum.distributed import cpu
from megaaccum.errors import MegaaccumError

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups

_DTYPES = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "document_starts": torch.bool,
}
"""The parts of a micro-batch, in the order in which they are sent."""


class SharedLoader:
    """The micro-batches of a model-parallel group (tp x cp x pp), which see the same sequences.

    The first rank of the group reads. A step's micro-batches go to each stage that reads them, tokens and positions to
    the first, labels and masks to the last, and there over cp and tp; their counts of tokens go to every rank. Where
    the group is one rank, nothing is sent. Made and used by all ranks of the group alike: making it and `try_next_step`
    are collective over it.
    """

    def __init__(
        self,
        open_loader: Callable[[], MicrobatchLoader],
        groups: Groups,
        reads: Sequence[str],
        *,
        shape: tuple[int, int],
        has_documents: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """open_loader: called on the rank that reads. reads: names that this rank's chunks read. shape: (sequences,
        tokens) of a micro-batch. has_documents: it has document_starts. clock: gives seconds."""
        self._pp, self._across = groups.pp, (groups.collection.cp, groups.tp)
        self._in_front = [group.rank() == 0 for group in self._across]
        self._is_alone = groups.pp.size() == groups.tp.size() == groups.collection.cp.size() == 1
        self._loader = open_loader() if groups.pp.rank() == 0 and all(self._in_front) else None
        self._shape, self._has_documents, self._clock = shape, has_documents, clock
        self._held: list[Batch] | None = None
        self._reads: list[Any] = [None] * groups.pp.size()
        dist.all_gather_object(self._reads, tuple(reads), group=groups.pp)
        self.read_seconds = 0.0 if self._loader is not None else math.nan
        """Seconds that this rank waited for its own reading of the last step; nan where it is sent micro-batches."""

    def try_next_step(self, num_microbatches: int) -> tuple[list[Batch], MegaaccumError | None]:
        """As MicrobatchLoader's: the next step's micro-batches, the same ones until `commit`, or, on the rank that
        reads, why there are none. What a rank's stages do not read is None there."""
        if self._held is not None and len(self._held) == num_microbatches:
            return self._held, None
        mine, problem = self._read(num_microbatches)
        if self._is_alone or (counts := self._counts(num_microbatches, mine)) is None:
            return mine, problem
        parts = [name for name in _DTYPES if name != "document_starts" or self._has_documents]
        received = {name: self._sent(name, num_microbatches, mine) for name in parts}
        if self._loader is None:
            mine = [
                {name: None if each is None else each[m] for name, each in received.items()} | {"num_tokens": counts[m]}
                for m in range(num_microbatches)
            ]
        self._held = mine
        return mine, None

    def commit(self, num_samples: int) -> None:
        """Counts `num_samples` sequences over all ranks as consumed."""
        self._held = None
        if self._loader is not None:
            self._loader.commit(num_samples)

    def close(self) -> None:
        """Ends the reading. May be called again."""
        if self._loader is not None:
            self._loader.close()

    def _read(self, num_microbatches: int) -> tuple[list[Batch], MegaaccumError | None]:
        if self._loader is None:
            return [], None
        start = self._clock()
        found = self._loader.try_next_step(num_microbatches)
        self.read_seconds = self._clock() - start
        return found

    def _counts(self, num_microbatches: int, mine: list[Batch]) -> torch.Tensor | None:
        """Tokens of each micro-batch, on every rank, in host memory; None where the reader has none to give."""
        head = torch.full((num_microbatches + 1,), -1, dtype=torch.int64)
        if mine:
            head[0] = 0
            head[1:] = torch.stack([_there(each["num_tokens"]) for each in mine])
        head = head.to(cpu.device())
        if all(self._in_front) and self._pp.size() > 1:
            dist.broadcast(head, group=self._pp, group_src=0)
        head = self._spread(head).cpu()
        return None if head[0] < 0 else head[1:]

    def _sent(self, name: str, num_microbatches: int, mine: list[Batch]) -> torch.Tensor | None:
        """That part of all micro-batches of a step, [micro-batches, sequences, tokens], where this rank's stages read
        it and it comes from another."""
        readers = [rank for rank, names in enumerate(self._reads) if name in names]
        is_reader, stage = self._loader is not None, self._pp.rank()
        if not (is_reader or stage in readers):
            return None
        if is_reader:
            whole = torch.stack([_there(each[name]) for each in mine]).to(cpu.device(), non_blocking=True)
            for rank in readers:
                if rank != stage:
                    dist.send(whole, group=self._pp, group_dst=rank)
        else:
            whole = torch.empty(num_microbatches, *self._shape, dtype=_DTYPES[name], device=cpu.device())
            if stage != 0 and all(self._in_front):
                dist.recv(whole, group=self._pp, group_src=0)
        if stage in readers:
            whole = self._spread(whole)
        return whole.cpu() if name == "document_starts" else whole

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of the first rank over cp, and of those over tp."""
        cp, tp = self._across
        if cp.size() > 1 and tp.rank() == 0:
            dist.broadcast(tensor, group=cp, group_src=0)
        if tp.size() > 1:
            dist.broadcast(tensor, group=tp, group_src=0)
        return tensor


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
