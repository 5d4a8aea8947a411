"""Pieces of a checkpoint: the elements of a whole parameter that one stored tensor holds, independent of the layout.

A piece's key identifies its elements for a rank of any other layout:

    decoder.layers.0.mlp.linear_fc2.weight/exp_avg/64x256/64:1of2/0:4096

This is the first moment of a 64 x 256 parameter. Flattened, it is cut into 64 rows, and each row into 2 runs, of which
this piece has number 1 (tensor parallelism over the input; over the output it is one row, `1:1of2`, and with a gate
two). The runs with one number are a tensor-parallel rank's part. The piece holds elements 0 to 4096 of that part
(ZeRO's cut).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.distributed.groups import Groups
from megaaccum.errors import CheckpointError, as_product, listed
from megaaccum.model import names
from megaaccum.sharding import ShardingBackend
from megaaccum.sharding.base import StatePiece
from megaaccum.sharding.ownership import MatrixUpdates

AT_ONCE = 1 << 24
"""Elements whose indices are computed at a time if tp changes: a few tensors of 8 bytes each."""
_OF_MATRICES = ("momentum_buffer", "soap_step_0")
"""Kinds that tell whether Muon or SOAP stepped a parameter."""
_STATE_SPACE = re.compile(r"\.mixer\.(in_proj|conv1d)[._]")
"""Parameters that consist of several matrices, each cut over tensor-parallel ranks, which `Cut` does not describe."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor-parallel rank's part of a whole parameter of `numel` elements: run number `run` of the `runs` equal ones
    in each of `rows` equal rows. A position counts elements of the part, an index elements of the whole."""

    numel: int
    rows: int = 1
    run: int = 0
    runs: int = 1

    @classmethod
    def from_param(cls, param: torch.nn.Parameter, groups: Groups) -> Self:
        """This rank's part of `param`."""
        shape, group = names.whole_shape(param, groups), names.tp_group(param, groups)
        if group.size() == 1 or not names.is_sharded_over_tp(param):
            return cls(math.prod(shape))
        axis, stride = param.partition_dim, getattr(param, "partition_stride", 1)  # type: ignore[attr-defined]
        return cls(math.prod(shape), math.prod(shape[:axis]) * stride, group.rank(), group.size())

    @property
    def _lengths(self) -> tuple[int, int]:
        """Elements of a row and of a run."""
        return self.numel // self.rows, self.numel // self.rows // self.runs

    def index[Number: (int, torch.Tensor)](self, position: Number) -> Number:
        """The index in the whole of the part's element at `position`."""
        row, run = self._lengths
        return position // run * row + self.run * run + position % run

    def position[Number: (int, torch.Tensor)](self, index: Number) -> Number:
        """The number of elements of the part before `index` of the whole: the position of that element if the part has
        it."""
        row, run = self._lengths
        column = index % row - self.run * run
        clamped = column.clamp(0, run) if isinstance(column, torch.Tensor) else min(max(column, 0), run)
        return index // row * run + clamped

    def has(self, index: torch.Tensor) -> torch.Tensor:
        """Whether the part holds elements `index` of the whole."""
        row, run = self._lengths
        return index % row // run == self.run

    def meets(self, other: Cut) -> bool:
        """Whether two cuts may share elements: the runs overlap, or are of other rows."""
        return self.rows != other.rows or (
            self.run * other.runs < (other.run + 1) * self.runs and other.run * self.runs < (self.run + 1) * other.runs
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one stored tensor: elements `start` to `stop` of a part of parameter `name`. kind: param, exp_avg,
    exp_avg_sq (Lion has none), Muon's momentum_buffer, or SOAP's `soap_L_0` and others of the parameter's matrix 0 (1,
    2), which are not cut."""

    name: str
    kind: str
    shape: tuple[int, ...]
    cut: Cut
    start: int
    stop: int

    @property
    def key(self) -> str:
        """The piece's key in the checkpoint."""
        cut = f"{self.cut.rows}:{self.cut.run}of{self.cut.runs}"
        return f"{self.name}/{self.kind}/{'x'.join(map(str, self.shape))}/{cut}/{self.start}:{self.stop}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The piece under `key`."""
        name, kind, sizes, cut, span = key.rsplit("/", 4)
        shape = tuple(map(int, sizes.split("x"))) if sizes else ()
        rows, _, runs = cut.partition(":")
        run, _, count = runs.partition("of")
        start, stop = map(int, span.split(":"))
        return cls(name, kind, shape, Cut(math.prod(shape), int(rows), int(run), int(count)), start, stop)

    def is_inside(self) -> bool:
        """Whether the elements are those of a parameter, cut into equal runs."""
        rows, run, runs, numel = self.cut.rows, self.cut.run, self.cut.runs, self.cut.numel
        is_cut = rows > 0 and 0 <= run < runs and numel % (rows * runs) == 0
        return is_cut and 0 <= self.start < self.stop <= numel // runs


def is_elsewhere(piece: StatePiece, groups: Groups) -> bool:
    """Whether another rank holds the same piece and writes it."""
    if piece.shape is not None:
        return False
    twice = names.is_tied_copy(piece.param) or (groups.tp.rank() > 0 and names.is_same_over_tp(piece.param))
    return twice or piece.replica > 0


def is_state_space(name: str) -> bool:
    """Whether the parameter consists of several matrices, so that no `Cut` describes its tensor-parallel parts."""
    return _STATE_SPACE.search(name) is not None


def held_pieces(
    backend: ShardingBackend, groups: Groups, *, only_weights: bool = False
) -> Iterator[tuple[Piece, torch.Tensor, bool]]:
    """(piece, flat view of its tensor, whether this rank writes it) for every piece on this rank."""
    for state in backend.state():
        shape, cut = _form(state, groups)
        writes = not is_elsewhere(state, groups)
        for kind, tensor in state.tensors.items():
            if kind == "param" or not only_weights:
                piece = Piece(state.name, kind, shape, cut, state.start, state.start + tensor.numel())
                yield piece, tensor, writes and tensor.numel() > 0


def _form(state: StatePiece, groups: Groups) -> tuple[tuple[int, ...], Cut]:
    if state.shape is not None:
        return state.shape, Cut(math.prod(state.shape))
    return tuple(names.whole_shape(state.param, groups)), Cut.from_param(state.param, groups)


def _start(piece: Piece) -> int:
    return piece.start


class StoredPieces:
    """The pieces of a checkpoint, by parameter, kind and cut."""

    def __init__(self, sizes: Mapping[str, Sequence[int]]):
        """Take the pieces under the keys of `sizes`. Raises CheckpointError if a key and its size do not fit."""
        self._pieces: dict[tuple[str, str], dict[Cut, list[Piece]]] = {}
        for key, size in sizes.items():
            try:
                piece = Piece.parse(key)
                is_one = piece.is_inside() and tuple(size) == (piece.stop - piece.start,)
            except ValueError:
                is_one = False
            if not is_one:
                raise CheckpointError(
                    f"the checkpoint has an unknown tensor {key[:200]!r} of size {size}: damaged, or another program's"
                )
            self._pieces.setdefault((piece.name, piece.kind), {}).setdefault(piece.cut, []).append(piece)
        self._kinds: dict[str, set[str]] = {}
        for (name, kind), by_cut in self._pieces.items():
            if kind != "param":
                self._kinds.setdefault(name, set()).add(kind)
            for pieces in by_cut.values():
                pieces.sort(key=_start)

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        weights = (by_cut for (_, kind), by_cut in self._pieces.items() if kind == "param")
        return sum(piece.stop - piece.start for by_cut in weights for pieces in by_cut.values() for piece in pieces)

    @property
    def names(self) -> set[str]:
        """Names of all parameters."""
        return {name for name, _ in self._pieces}

    def stepped_by(self, name: str) -> set[str]:
        """Kinds of a parameter's tensors that tell which optimizer stepped it."""
        return {kind for kind in self._kinds.get(name, ()) if kind in _OF_MATRICES or not kind.startswith("soap_")}

    def has(self, name: str, kind: str) -> bool:
        """Whether the checkpoint holds this tensor of a parameter."""
        return (name, kind) in self._pieces

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole shape of a parameter; None if the checkpoint has no parameter of that name."""
        by_cut = self._pieces.get((name, "param"))
        return next(iter(by_cut.values()))[0].shape if by_cut else None

    def has_cut(self, name: str, cut: Cut) -> bool:
        """Whether a parameter's weight was cut like `cut`, on whichever rank."""
        return any(replace(each, run=cut.run) == cut for each in self._pieces[name, "param"])

    def overlapping(self, wanted: Piece) -> list[tuple[Piece, int, int]]:
        """(piece, start, stop) for the stored pieces that hold elements of `wanted`, whose positions in the piece's
        part are in start to stop. Raises DamagedCheckpoint if elements are missing."""
        if wanted.start == wanted.stop:
            return []
        first, last = wanted.cut.index(wanted.start), wanted.cut.index(wanted.stop - 1)
        by_cut = self._pieces.get((wanted.name, wanted.kind), {})
        like = next(iter(by_cut), None)
        if like is None or like.numel != wanted.cut.numel or like.runs > len(by_cut):
            raise DamagedCheckpoint(f"the checkpoint lacks elements of {wanted.name} ({wanted.kind})")
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
    """Copy the elements that two pieces share into `target`, the flat view of `wanted`. source: the tensor of `stored`;
    only positions start to stop of its part are copied."""
    if stored.cut == wanted.cut:
        target[start - wanted.start : stop - wanted.start].copy_(source[start - stored.start : stop - stored.start])
        return
    for low in range(start, stop, AT_ONCE):
        positions = torch.arange(low, min(stop, low + AT_ONCE))
        indices = stored.cut.index(positions)
        to = wanted.cut.position(indices)
        mine = wanted.cut.has(indices) & (to >= wanted.start) & (to < wanted.stop)
        values = source[positions[mine] - stored.start].to(target.device, target.dtype)
        target[(to[mine] - wanted.start).to(target.device)] = values


def check_fit(
    current: Path,
    stored: StoredPieces,
    backend: ShardingBackend,
    groups: Groups,
    *,
    only_weights: bool,
    new_momenta: bool,
) -> None:
    """Check that the checkpoint `current` has this rank's parameters with their shapes and, unless only_weights, with
    moments exactly if they are trained here. new_momenta: momenta of matrices that it lacks begin at zero. Raises
    CheckpointError, naming what differs."""
    wrong = []
    for state in backend.own_state():
        name, here, there = state.name, tuple(names.whole_shape(state.param, groups)), stored.shape(state.name)
        if there is None:
            wrong.append(f"{current} has no {name}")
        elif (there or (1,)) != (here or (1,)):  # a scalar is a vector of one element
            wrong.append(f"{name} is {as_product(there)} in {current}, but {as_product(here)} in the model")
        elif not only_weights and (text := _differs(current, stored, state, backend.matrices, new_momenta)):
            wrong.append(text)
        elif is_state_space(name) and not stored.has_cut(name, Cut.from_param(state.param, groups)):
            wrong.append(f"{name} of a state-space layer is cut otherwise in {current}: set tp back")
    if wrong:
        raise CheckpointError(listed(wrong, "; "))


def _kinds(state: StatePiece, matrices: MatrixUpdates | None) -> set[str]:
    """Kinds that tell which optimizer steps a parameter here; none if it is frozen, or if nothing is kept (SGD)."""
    is_matrix = matrices is not None and names.is_matrix(state.param) and state.param.requires_grad
    return {matrices.kind} if matrices is not None and is_matrix else set(state.tensors.keys() - {"param"})


def _differs(
    current: Path, stored: StoredPieces, state: StatePiece, matrices: MatrixUpdates | None, new_momenta: bool
) -> str:
    """How a parameter's state in a checkpoint differs in kind from the model's; empty if it does not."""
    name, own, there = state.name, _kinds(state, matrices), stored.stepped_by(state.name)
    if there and not state.param.requires_grad:
        return f"{name} is trained in {current}, but frozen in the model"
    if there == own or (there and new_momenta and matrices is not None and names.is_matrix(state.param)):
        return ""
    keeps, kept = (" and ".join(sorted(kinds)) for kinds in (own, there))
    return (
        f"{name} has {kept or 'no optimizer state'}, not {keeps or 'nothing'}, in {current}, where another optimizer"
        f" stepped it{'' if there else ', or none did'}: set optimizer, freeze or muon_matrices back (override"
        " optimizer leads from adam to muon and soap), or no_load_optim to true"
    )
