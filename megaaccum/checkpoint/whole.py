"""Whole weights of a model in any layout, one parameter at a time: out of the ranks, and back into them.

A parameter's pieces (checkpoint/pieces.py) go to one rank, which joins them, and from there to all ranks where all want
it. So a rank holds its own part, and the parameter that is under way once or twice, however large the model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megaaccum.checkpoint.pieces import Cut, Piece, held_pieces, is_state_space
from megaaccum.distributed.agreement import distinct_values, gathered, raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import CheckpointError, as_product, listed
from megaaccum.sharding import ShardingBackend


class InParts(Protocol):
    """A whole tensor of which parts are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, piece: Piece, target: torch.Tensor) -> None:
        """Copy the elements of `piece` into `target`, which is flat."""


type Given = Mapping[str, torch.Tensor | InParts] | Iterable[tuple[str, torch.Tensor | InParts]]
"""Whole weights by name, or pairs that are made one at a time."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The pieces of one tensor that one rank sends. dtype: of the tensor in the model."""

    rank: int
    dtype: torch.dtype
    pieces: list[Piece]


def runs_of(whole: torch.Tensor, piece: Piece) -> Iterator[torch.Tensor]:
    """Views of the elements of `piece` in `whole`, the flattened parameter, in the piece's order: at most three."""
    cut, start, stop = piece.cut, piece.start, piece.stop
    if start == stop:
        return
    part = whole.view(cut.rows, cut.runs, -1)[:, cut.run]
    width = part.shape[1]
    first, skip = divmod(start, width)
    if skip:
        yield part[first, skip : min(skip + stop - start, width)]
        start, first = min(start + width - skip, stop), first + 1
    last, rest = divmod(stop, width)
    if start < stop and last > first:
        yield part[first:last]
        start = last * width
    if start < stop:
        yield part[last, :rest]


def copy_runs(flat: torch.Tensor, whole: torch.Tensor, piece: Piece, *, into_whole: bool) -> None:
    """Copy `flat`, the elements of `piece`, into `whole`, or from there."""
    runs = list(runs_of(whole, piece))
    for run, part in zip(runs, flat.split([run.numel() for run in runs]), strict=True):
        source, target = (part.view_as(run), run) if into_whole else (run, part.view_as(run))
        target.copy_(source)


class WholeWeights:
    """The weights on all ranks by their names in the whole model. Built on every rank; collective over the world.

    dtypes: of each parameter of this rank in the model, in which it is given. buffers: trained state that is no
    parameter, the same on all ranks of a stage. Raises CheckpointError on every rank for parameters that no `Cut`
    describes.
    """

    def __init__(
        self,
        backend: ShardingBackend,
        groups: Groups,
        dtypes: Mapping[str, torch.dtype],
        buffers: Mapping[str, torch.Tensor],
    ):
        self._group = groups.host
        self._mine: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
        for piece, tensor, writes in held_pieces(backend, groups, only_weights=True):
            if writes:
                self._mine.setdefault(piece.name, []).append((piece, tensor))
        if groups.tp.rank() == 0 and groups.dp_cp.rank() == 0:
            self._mine |= {name: [(_whole(name, each), each.reshape(-1))] for name, each in buffers.items()}
        given = {name: dtypes.get(name, parts[0][1].dtype) for name, parts in self._mine.items()}
        raise_on_all_ranks(_check_cuts, self._mine, groups.tp.size())
        listed = {name: (given[name], [piece for piece, _ in parts]) for name, parts in self._mine.items()}
        self._shares: dict[str, list[_Share]] = {}
        for rank, theirs in enumerate(gathered(listed, self._group)):
            for name, (dtype, pieces) in theirs.items():
                self._shares.setdefault(name, []).append(_Share(rank, dtype, pieces))

    def stream(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor in host memory), stage after stage, on rank `rank` alone or, with None, on every rank.
        dtype: of all tensors that are floating point; default: as in the model. To be consumed on every rank."""
        for name, shares in self._shares.items():
            kind = dtype if dtype is not None and shares[0].dtype.is_floating_point else shares[0].dtype
            joined = self._join(name, shares, kind, shares[0].rank if rank is None else rank)
            if rank is None:
                joined = torch.empty(shares[0].pieces[0].shape, dtype=kind) if joined is None else joined
                dist.broadcast(joined, shares[0].rank, group=self._group)
            if joined is not None:
                yield name, joined

    def _join(self, name: str, shares: list[_Share], dtype: torch.dtype, to: int) -> torch.Tensor | None:
        """The whole tensor on rank `to`; None elsewhere."""
        me = dist.get_rank()
        mine = [(piece, tensor.detach().to("cpu", dtype)) for piece, tensor in self._mine.get(name, ())]
        if me != to:
            for _, tensor in mine:
                dist.send(tensor.contiguous(), to, group=self._group)
            return None
        whole = torch.empty(shares[0].pieces[0].shape, dtype=dtype)
        for share in shares:
            for number, piece in enumerate(share.pieces):
                if share.rank == me:
                    part = mine[number][1]
                else:
                    part = torch.empty(piece.stop - piece.start, dtype=dtype)
                    dist.recv(part, share.rank, group=self._group)
                copy_runs(part, whole.view(-1), piece, into_whole=True)
        return whole


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, "param", tuple(tensor.shape), Cut(tensor.numel()), 0, tensor.numel())


def _check_cuts(names: Iterable[str], tp: int) -> None:
    if tp > 1 and (found := [name for name in names if is_state_space(name)]):
        raise CheckpointError(
            f"{listed(found)}: parameters of state-space layers are joined only without tensor parallelism:"
            " load the checkpoint with tensor_model_parallel_size 1"
        )


def put(
    weights: Given,
    backend: ShardingBackend,
    groups: Groups,
    buffers: Mapping[str, torch.Tensor],
    *,
    only_weights: bool = True,
) -> None:
    """Copy whole weights into this rank's pieces and `buffers`; `backend.adopt_state` makes them the model. Each rank
    consumes its own `weights` and may leave out what other stages hold. Collective over the world at the end. Raises
    CheckpointError on every rank if a name is unknown to all ranks, missing, there twice or of another shape: some of
    this rank's pieces may then have changed. Without only_weights, the optimizer's tensors too, as in NAME/exp_avg."""
    waiting: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
    for piece, tensor, _ in held_pieces(backend, groups, only_weights=only_weights):
        name = piece.name if piece.kind == "param" else f"{piece.name}/{piece.kind}"
        waiting.setdefault(name, []).append((piece, tensor))
    waiting |= {name: [(_whole(name, buffer), buffer.view(-1))] for name, buffer in buffers.items()}
    known = set().union(*distinct_values(sorted(waiting), groups.host))
    raise_on_all_ranks(_put, weights, waiting, known, groups.tp.size())


def _put(
    weights: Given,
    waiting: dict[str, list[tuple[Piece, torch.Tensor]]],
    known: set[str],
    tp: int,
) -> None:
    _check_cuts(waiting, tp)
    problems = []  # raised at the end: the weights may be another engine's, whose ranks make each of them together
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if name not in known:
            problems.append(f"the model has no parameter {name} (it is there twice, or of another model)")
        for piece, target in waiting.pop(name, []):
            if tuple(tensor.shape) != piece.shape:
                problems.append(f"{name} is {as_product(tensor.shape)}, but {as_product(piece.shape)} in the model")
            elif isinstance(tensor, torch.Tensor):
                copy_runs(target.detach(), tensor.detach().reshape(-1), piece, into_whole=False)
            else:
                tensor.read(piece, target.detach())
        known.discard(name)
    if waiting:
        problems.append(f"the weights lack {listed(sorted(waiting))}")
    if problems:
        raise CheckpointError(problems[0])
