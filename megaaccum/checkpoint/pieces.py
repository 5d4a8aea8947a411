"""The pieces of a checkpoint: which elements of which whole parameter each tensor in it holds, whatever the layout.

A piece's key says all that a rank of another layout needs:

    decoder.layers.0.mlp.linear_fc2.weight/exp_avg/64x256/64:1of2/0:4096

The first moment of this parameter, whole 64 x 256. Flattened and cut into 64 rows, each row into 2 runs of which this
is number 1 (tensor parallelism over the input; over the output it is one row, `1:1of2`, and with a gate two). The runs
in a row are this tensor-parallel rank's part; the piece holds its elements 0 to 4096 (ZeRO's cut).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.errors import CheckpointError
from megaaccum.model import names

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend
    from megaaccum.sharding.base import StatePiece

_AT_ONCE = 1 << 24
"""Elements whose places are computed together where tp changes: 8 bytes each, a few times over."""
_STATE_SPACE = re.compile(r"\.mixer\.(in_proj|conv1d)\.")
"""Several matrices in one, each cut over tensor-parallel ranks: not as `Cut` describes it."""
_SHOWN = 4
"""Parameters that a message names."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor-parallel rank's part of a whole parameter of `numel` elements: run number `run` of the `runs` equal ones
    in each of `rows` equal rows. Positions count in the part, indices in the whole."""

    numel: int
    rows: int = 1
    run: int = 0
    runs: int = 1

    @classmethod
    def of(cls, param: torch.nn.Parameter, groups: Groups) -> Self:
        """This rank's part."""
        shape = names.whole_shape(param, groups)
        if groups.tp.size() == 1 or not names.is_sharded_over_tp(param):
            return cls(math.prod(shape))
        axis, stride = param.partition_dim, param.partition_stride  # type: ignore[attr-defined]
        return cls(math.prod(shape), math.prod(shape[:axis]) * stride, groups.tp.rank(), groups.tp.size())

    @property
    def _lengths(self) -> tuple[int, int]:
        """Elements of a row and of a run."""
        return self.numel // self.rows, self.numel // self.rows // self.runs

    def index[Number: (int, torch.Tensor)](self, position: Number) -> Number:
        """Where in the whole an element of the part is."""
        row, run = self._lengths
        return position // run * row + self.run * run + position % run

    def position[Number: (int, torch.Tensor)](self, index: Number) -> Number:
        """How many elements of the part come before an element of the whole; of one that it has, its position."""
        row, run = self._lengths
        column = index % row - self.run * run
        clamped = column.clamp(0, run) if isinstance(column, torch.Tensor) else min(max(column, 0), run)
        return index // row * run + clamped

    def has(self, index: torch.Tensor) -> torch.Tensor:
        """Whether elements of the whole are in the part."""
        row, run = self._lengths
        return index % row // run == self.run

    def meets(self, other: Cut) -> bool:
        """Whether the runs of two cuts into the same rows overlap."""
        return (
            self.run * other.runs < (other.run + 1) * self.runs and other.run * self.runs < (self.run + 1) * other.runs
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one stored tensor: elements `start` to `stop` of a part of parameter `name`. kind: param, exp_avg
    or exp_avg_sq."""

    name: str
    kind: str
    shape: tuple[int, ...]
    cut: Cut
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its key in the checkpoint."""
        shape = "x".join(map(str, self.shape)) or "1"
        cut = f"{self.cut.rows}:{self.cut.run}of{self.cut.runs}"
        return f"{self.name}/{self.kind}/{shape}/{cut}/{self.start}:{self.stop}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The piece under `key`."""
        name, kind, sizes, cut, span = key.rsplit("/", 4)
        shape = tuple(map(int, sizes.split("x")))
        rows, _, runs = cut.partition(":")
        run, _, count = runs.partition("of")
        start, stop = map(int, span.split(":"))
        return cls(name, kind, shape, Cut(math.prod(shape), int(rows), int(run), int(count)), start, stop)


def is_elsewhere(piece: StatePiece, backend: ShardingBackend, groups: Groups) -> bool:
    """Whether another rank holds the same piece, and writes it."""
    twice = names.is_tied_copy(piece.param) or (groups.tp.rank() > 0 and names.is_same_over_tp(piece.param))
    return twice or backend.replica > 0 or piece.replica > 0


def own(
    backend: ShardingBackend, groups: Groups, *, only_weights: bool = False
) -> Iterator[tuple[Piece, torch.Tensor, bool]]:
    """(piece, its flat view, whether this rank is the one that writes it) of everything that this rank holds."""
    for state in backend.state():
        shape, cut = names.whole_shape(state.param, groups), Cut.of(state.param, groups)
        writes = not is_elsewhere(state, backend, groups)
        for kind, tensor in state.tensors.items():
            if kind == "param" or not only_weights:
                piece = Piece(state.name, kind, tuple(shape), cut, state.start, state.start + tensor.numel())
                yield piece, tensor, writes and tensor.numel() > 0


def _start(piece: Piece) -> int:
    return piece.start


class Stored:
    """The pieces of a checkpoint by what they are parts of."""

    def __init__(self, keys: Iterable[str]):
        self._pieces: dict[tuple[str, str], dict[Cut, list[Piece]]] = {}
        for key in keys:
            piece = Piece.parse(key)
            self._pieces.setdefault((piece.name, piece.kind), {}).setdefault(piece.cut, []).append(piece)
        for by_cut in self._pieces.values():
            for pieces in by_cut.values():
                pieces.sort(key=_start)

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        weights = (by_cut for (_, kind), by_cut in self._pieces.items() if kind == "param")
        return sum(piece.stop - piece.start for by_cut in weights for pieces in by_cut.values() for piece in pieces)

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return {name for name, _ in self._pieces}

    def is_trained(self, name: str) -> bool:
        """Whether the checkpoint has moments of a parameter."""
        return (name, "exp_avg") in self._pieces

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole shape of a parameter, None if the checkpoint has none of that name."""
        by_cut = self._pieces.get((name, "param"))
        return next(iter(by_cut.values()))[0].shape if by_cut else None

    def has_cut(self, name: str, cut: Cut) -> bool:
        """Whether a parameter's weight was cut like that, but for the rank."""
        return any(replace(each, run=cut.run) == cut for each in self._pieces[name, "param"])

    def covering(self, wanted: Piece) -> list[tuple[Piece, int, int]]:
        """(piece, start, stop) of the stored pieces that hold elements of `wanted`: of those elements the positions in
        the piece's part lie between start and stop. Raises DamagedCheckpoint where they leave a hole."""
        if wanted.start == wanted.stop:
            return []
        first, last = wanted.cut.index(wanted.start), wanted.cut.index(wanted.stop - 1)
        by_cut = self._pieces[wanted.name, wanted.kind]
        like = next(iter(by_cut))
        found = []
        for run in range(like.runs):
            cut = replace(like, run=run)
            position, stop = cut.position(first), cut.position(last + 1)
            if not cut.meets(wanted.cut):
                continue
            pieces = by_cut.get(cut, [])
            for index in range(max(bisect.bisect_right(pieces, position, key=_start) - 1, 0), len(pieces)):
                piece = pieces[index]
                if position >= stop or not piece.start <= position < piece.stop:
                    break
                found.append((piece, position, min(piece.stop, stop)))
                position = piece.stop
            if position < stop:
                raise DamagedCheckpoint(
                    f"the checkpoint lacks elements {position} to {stop} of {wanted.name} ({wanted.kind}, run {run})"
                )
        return found


def copy(source: torch.Tensor, stored: Piece, start: int, stop: int, wanted: Piece, target: torch.Tensor) -> None:
    """Copy what two pieces share into `target`, the flat view of `wanted`. source: the tensor of `stored`, of which
    positions start to stop of its part matter."""
    if stored.cut == wanted.cut:
        target[start - wanted.start : stop - wanted.start].copy_(source[start - stored.start : stop - stored.start])
        return
    for low in range(start, stop, _AT_ONCE):
        positions = torch.arange(low, min(stop, low + _AT_ONCE))
        indices = stored.cut.index(positions)
        to = wanted.cut.position(indices)
        mine = wanted.cut.has(indices) & (to >= wanted.start) & (to < wanted.stop)
        values = source[positions[mine] - stored.start].to(target.device, target.dtype)
        target[(to[mine] - wanted.start).to(target.device)] = values


def check_fit(current: Path, stored: Stored, backend: ShardingBackend, groups: Groups, *, only_weights: bool) -> None:
    """Check that this rank's parameters are in the checkpoint `current` with their shapes, and (but for only_weights)
    trained there if they are here. Raises CheckpointError, naming what differs."""
    wrong = []
    for state in backend.state():
        name, here, there = state.name, tuple(names.whole_shape(state.param, groups)), stored.shape(state.name)
        if there is None:
            wrong.append(f"{current} has no {name}")
        elif there != here:
            wrong.append(f"{name} is {_by(there)} in {current} and {_by(here)} in the model")
        elif stored.is_trained(name) != state.param.requires_grad and not only_weights:
            words = ("trained", "frozen") if stored.is_trained(name) else ("frozen", "trained")
            wrong.append(f"{name} is {words[0]} in {current} and {words[1]} in the model")
        elif _STATE_SPACE.search(name) and not stored.has_cut(name, Cut.of(state.param, groups)):
            wrong.append(f"{name} of a state-space layer is cut otherwise in {current}: set tp back")
    if wrong:
        raise CheckpointError(
            "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if wrong[_SHOWN:] else "")
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
