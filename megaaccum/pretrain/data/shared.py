"""One reader for each model-parallel group: the other ranks of the group are sent what their stages read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from megaaccum.distributed.agreement import gathered
from megaaccum.errors import MegaaccumError
from megaaccum.platform import cpu
from megaaccum.pretrain.data.loader import Batch, MicrobatchLoader

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups

_DTYPES = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "document_starts": torch.bool,
    "padding_mask": torch.bool,
}
"""The parts of a micro-batch, in the order in which they are sent: wide ones first, so that each is aligned."""


class SharedLoader:
    """The micro-batches of a model-parallel group (tp x cp x pp), which see the same sequences.

    The first rank of the group reads. Each stage is sent one message a step: counts of tokens, and what the stage
    reads of the micro-batches, tokens and positions on the first, labels and masks on the last; there it goes over cp
    and tp. The reader does not wait for it to arrive. If the group is one rank, nothing is sent. The constructor and
    `try_next_step` are collective over the group.
    """

    def __init__(
        self,
        open_loader: Callable[[], MicrobatchLoader],
        groups: Groups,
        reads: Sequence[str],
        *,
        shape: tuple[int, int],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """open_loader: called on the rank that reads. reads: names that this rank's chunks read and that micro-batches
        have. shape: (sequences, tokens) of a micro-batch. clock: gives seconds."""
        self._pp, self._across = groups.pp, (groups.collection.cp, groups.tp)
        self._in_front = [group.rank() == 0 for group in self._across]
        self._is_alone = groups.pp.size() == groups.tp.size() == groups.collection.cp.size() == 1
        self._loader = open_loader() if groups.pp.rank() == 0 and all(self._in_front) else None
        self._shape, self._clock = shape, clock
        self._held: dict[int, list[Batch]] = {}
        """Steps that were sent, by the number of micro-batches before them."""
        self._sending: list[dist.Work] = []
        self._sent: dict[int, torch.Tensor] = {}
        self._reads = gathered(tuple(reads), groups.pp)
        self.read_seconds = 0.0 if self._loader is not None else math.nan
        """Seconds that this rank waited for its own reading of the last step; nan on ranks that receive them."""

    def try_next_step(self, num_microbatches: int, *, after: int = 0) -> tuple[list[Batch], MegaaccumError | None]:
        """The next step's micro-batches, the same ones until `commit`, or none and, on the rank that reads, the error.
        Parts that a rank's stages do not read are None there."""
        if len(held := self._held.get(after, [])) == num_microbatches:
            return held, None
        mine, problem = self._read(num_microbatches, after)
        if not self._is_alone:
            mine = self._held[after] = self._shared(num_microbatches, mine)
        return mine, problem

    def commit(self, num_samples: int) -> None:
        """Count `num_samples` sequences over all ranks, those of the next step, as consumed."""
        following = self._held.get(len(self._held.get(0, [])))
        self._held = {} if following is None else {0: following}
        if self._loader is not None:
            self._loader.commit(num_samples)

    def close(self) -> None:
        """End the reading. May be called again."""
        if self._loader is not None:
            self._loader.close()

    def _read(self, num_microbatches: int, after: int) -> tuple[list[Batch], MegaaccumError | None]:
        if self._loader is None:
            return [], None
        start = self._clock()
        found = self._loader.try_next_step(num_microbatches, after=after)
        self.read_seconds = self._clock() - start
        return found

    def _shared(self, num_microbatches: int, mine: list[Batch]) -> list[Batch]:
        """A step's micro-batches on this rank; none if the reader has none. mine: the reader's."""
        stage = self._pp.rank()
        if self._loader is not None:
            self._send(num_microbatches, mine)
            if any(group.size() > 1 for group in self._across):
                self._spread(self._packed(stage, num_microbatches, mine))
            return mine
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._parts(stage, num_microbatches).values())
        message = torch.empty(size, dtype=torch.uint8, device=cpu.device())
        if stage != 0 and all(self._in_front):
            for work in self._post(dist.irecv, {0: message}):
                work.wait()
        return self._unpacked(self._spread(message), num_microbatches)

    def _send(self, num_microbatches: int, mine: list[Batch]) -> None:
        """Send the first rank of every other stage its inputs. A message is kept until it has arrived."""
        for work in self._sending:
            work.wait()
        self._sent = {stage: self._packed(stage, num_microbatches, mine) for stage in range(1, self._pp.size())}
        self._sending = self._post(dist.isend, self._sent)

    def _post(self, send_or_receive: Callable[..., Any], messages: dict[int, torch.Tensor]) -> list[dist.Work]:
        """Start one message to or from each stage. As a batch they use NCCL's communicator of the pipeline; a single
        message would make one of two ranks for itself, which is pp - 1 on the first stage."""
        operations = [dist.P2POp(send_or_receive, each, group=self._pp, group_peer=i) for i, each in messages.items()]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _parts(self, stage: int, num_microbatches: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The (dtype, shape) of each part of the message to a stage, in order."""
        shape = (num_microbatches, *self._shape)
        named = {name: (dtype, shape) for name, dtype in _DTYPES.items() if name in self._reads[stage]}
        return {"num_tokens": (torch.int64, (num_microbatches,)), **named}

    def _packed(self, stage: int, num_microbatches: int, mine: list[Batch]) -> torch.Tensor:
        """The message to a stage: its parts of `mine` as bytes; counts of -1 if there are none."""
        parts = [
            torch.stack([cast("torch.Tensor", each[name]) for each in mine])
            if mine
            else torch.full(shape, -1).to(dtype)
            for name, (dtype, shape) in self._parts(stage, num_microbatches).items()
        ]
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).to(cpu.device(), non_blocking=True)

    def _unpacked(self, message: torch.Tensor, num_microbatches: int) -> list[Batch]:
        """The micro-batches of a message to this rank's stage: tensors that its chunks do not read are None."""
        parts = self._parts(self._pp.rank(), num_microbatches)
        pieces = message.split([dtype.itemsize * math.prod(shape) for dtype, shape in parts.values()])
        whole = {
            name: piece.view(dtype).view(shape)
            for (name, (dtype, shape)), piece in zip(parts.items(), pieces, strict=True)
        }
        whole |= {name: each.cpu() for name, each in whole.items() if name == "num_tokens" or each.dtype == torch.bool}
        if whole["num_tokens"][0] < 0:
            return []
        absent = dict.fromkeys(_DTYPES)
        return [absent | {name: each[m] for name, each in whole.items()} for m in range(num_microbatches)]

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` of the first rank over cp, then over tp."""
        cp, tp = self._across
        if cp.size() > 1 and tp.rank() == 0:
            dist.broadcast(tensor, group=cp, group_src=0)
        if tp.size() > 1:
            dist.broadcast(tensor, group=tp, group_src=0)
        return tensor
