"""Muon and SOAP under every sharding: each matrix is made whole on one rank, its owner, where Newton-Schulz, or SOAP's
step, runs once per step.

A matrix' gradient is reduced straight to the ranks that keep its momentum (owner_sums.py): its owner, and under tensor
parallelism the ranks beside it, whose parts come to the owner by an all-to-all over the ranks of the stage
(tp x cp x dp). If the backend's own reduction has to stay (`owners.at_owners`), the momentum lives where the shard
lives, and what the iteration needs crosses by the same all-to-all. So do gradients under SOAP, whose state is that of
whole matrices and lives at the owner. The update comes back to the shards by another, in place of the gradient. The
backend's own step then applies it, and gathers weights as always.

Exchanges are made in rounds: while an owner iterates, what it needs next arrives and what it made before goes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaaccum.distributed.agreement import gathered
from megaaccum.model import names
from megaaccum.optim import owners
from megaaccum.optim.muon import Part
from megaaccum.optim.owners import Matrix
from megaaccum.optim.soap import Soap
from megaaccum.platform import cpu
from megaaccum.sharding.base import StatePiece
from megaaccum.upstream import emerging

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding.base import ShardingBackend

Run = tuple[int, int, int]
"""Elements of a shard that lie in one matrix: (first in the shard, first in this tp rank's part of the matrix, how
many)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's piece of a parameter.

    rows, columns: of the tensor-parallel part. axis: along which `num_tp` ranks cut it. tp: which part this is.
    start, numel: the piece's range in the flattened part; a rank may hold nothing of it. dp: the rank's number among
    those with the same part.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int
    columns: int
    axis: int
    num_tp: int
    tp: int
    start: int
    numel: int
    dp: int = field(default=0, compare=False)

    def matrices(self) -> list[Matrix]:
        """The whole matrices of the parameter."""
        down, across = (self.num_tp if self.axis == axis else 1 for axis in (0, 1))
        return [
            Matrix(self.name, number, self.rows // part.period * part.length * down, self.columns * across)
            for number, part in enumerate(self.parts)
        ]

    def runs(self, number: int) -> list[Run]:
        """The elements of the piece that lie in matrix `number`."""
        part, stop, found = self.parts[number], self.start + self.numel, []
        period, length = part.period * self.columns, part.length * self.columns
        for group in range(self.start // period, -(-stop // period) if self.numel else 0):
            begin = group * period + part.offset * self.columns
            low, high = max(self.start, begin), min(stop, begin + length)
            if low < high:
                found.append((low - self.start, group * length + low - begin, high - low))
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that cross between a shard and the owner of a matrix. tp: the tensor-parallel part; run: where they lie
    in the shard and in that part."""

    matrix: Matrix
    tp: int
    run: Run

    @property
    def numel(self) -> int:
        return self.run[2]


Moves = list[list[Move]]
"""By the rank of the stage that they come from or go to."""


@dataclass(slots=True)
class Round:
    """The moves of one round on this rank: it `gives` to owners and `gets` as an owner of `mine`; then it `returns` to
    all ranks that hold a piece, and gets `updates` of its own shards."""

    mine: list[Matrix]
    gives: Moves
    gets: Moves
    returns: Moves
    updates: Moves


@dataclass(slots=True)
class Transfer:
    """An all-to-all under way. sent: kept until it has arrived."""

    received: torch.Tensor
    sent: torch.Tensor
    work: Any
    moves: list[Move]

    def arrived(self) -> Iterator[tuple[Move, torch.Tensor]]:
        """Wait, and give each move with its elements."""
        if self.work is not None:
            self.work.wait()
        yield from zip(self.moves, self.received.split([move.numel for move in self.moves]), strict=True)


class MatrixUpdates:
    """Puts Muon's or SOAP's updates in place of the gradients of the matrices that a backend holds.

    owned: the matrices of each rank of the stage. to_owners, back: bytes that this rank receives in a step's exchanges.
    kind: of a tensor that a checkpoint has of each of its parameters. num_calls: matrices that this rank has iterated.
    soap: the state of its own, under SOAP. summary: what Muon or SOAP and AdamW step, for the start of a run.
    Construction is collective over the stage and the pipeline.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend):
        self._keys, self._backend = plan.config.optimizer, backend
        self._dtype = names.DTYPES["fp64" if plan.config.sharding.params_dtype == "fp64" else "fp32"]
        # A product in BF16 ends in BF16: its result crosses in that precision, and nothing is rounded.
        is_muon = self._keys.optimizer == "muon"
        in_bf16 = is_muon and self._keys.muon_fp32_matmul_prec == "medium" and self._dtype is torch.float32
        self._wire = torch.bfloat16 if in_bf16 else self._dtype
        self._group = groups.collection.tp_dp_cp
        everyone = gathered((_held(groups, chunks, backend), _others(chunks)), self._group)
        held = [pieces for pieces, _ in everyone]
        self._form = {matrix: each for pieces in held for each in pieces for matrix in each.matrices()}
        at_owners = owners.at_owners(plan.config, plan.batch.num_microbatches)
        holders = _Holders(held, self._group.rank(), at_owners)
        self.owned = owners.assign(self._form, self._group.size(), holders.ranks, owners.COSTS[self._keys.optimizer])
        mine = () if is_muon else self.owned[self._group.rank()]
        self.soap = {matrix: Soap(self._keys, matrix.rows, matrix.columns) for matrix in mine}
        self._rounds = [holders.round(each) for each in owners.rounds(self.owned, self._keys.muon_bucket_size)]
        self._stays = at_owners and all(form.num_tp == 1 for form in self._form.values())
        """Whether all that an owner needs is on it."""
        if at_owners:
            homes, named = holders.homes(self.owned), list(names.named_parameters(chunks))
            backend.at_owners.keep(plan, homes, named, backend.reduction_divisor)
        self.to_owners = self._dtype.itemsize * self._received(each.gets for each in self._rounds)
        self.back = self._wire.itemsize * self._received(each.updates for each in self._rounds)
        self.num_calls, self.kind = 0, "momentum_buffer" if is_muon else "soap_step_0"
        others = {name: kind for _, mine in everyone for name, kind in mine.items()}
        self._params = dict(names.named_parameters(chunks))
        self.summary = _summary(groups, self._keys.optimizer, self.owned, others, at_owners or not is_muon)

    def _received(self, moves: Iterable[Moves]) -> int:
        """Elements of moves that come from other ranks."""
        others = [each for ways in moves for rank, each in enumerate(ways) if rank != self._group.rank()]
        return sum(move.numel for each in others for move in each)

    @torch.no_grad()
    def orthogonalise(self) -> None:
        """Move the momenta on by the reduced gradients, and replace the gradients of matrices by their updates."""
        grads = {shard.name: shard.grad for shard in self._backend.own_shards() if names.is_matrix(shard.param)}
        inputs = self._with_momentum(grads) if self._keys.optimizer == "muon" else grads
        coming = [self._fetch(self._rounds[0], inputs)] if self._rounds else []
        going: list[Transfer] = []
        for number, step in enumerate(self._rounds):
            parts = self._parts(step.mine, coming.pop())
            coming += [self._fetch(later, inputs) for later in self._rounds[number + 1 : number + 2]]
            results = {matrix: self.iterate(matrix, parts[matrix]) for matrix in step.mine}
            going.append(self._send(step.returns, step.updates, self._cut(results), self._wire))
            if number:
                self._write(going.pop(0), grads)
        for last in going:
            self._write(last, grads)

    def _with_momentum(self, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The averages that are to be orthogonalised: of each parameter what this rank keeps."""
        keys, inputs = self._keys, {}
        groups = [group for group in self._backend.param_groups if group.get("matrices")]
        decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
        for piece in self._backend.state():
            if "momentum_buffer" in piece.tensors:
                owned, momentum = self._backend.at_owners.owned.get(piece.name), piece.tensors["momentum_buffer"]
                grad = grads[piece.name] if owned is None else owned.grad
                assert grad is not None
                if keys.muon_weight_decay_method == "l2":
                    grad.add_(piece.tensors["param"] * decays[piece.name])
                momentum.lerp_(grad, 1 - keys.muon_momentum)
                inputs[piece.name] = grad.lerp_(momentum, keys.muon_momentum) if keys.muon_nesterov else momentum
        return inputs

    def _send(
        self, out: Moves, back: Moves, read: Callable[[Move], torch.Tensor], dtype: torch.dtype | None = None
    ) -> Transfer:
        """Start to send what `read` gives of the moves `out`, and to receive `back`."""
        dtype = dtype or self._dtype
        pieces = [read(move).to(cpu.device(), dtype) for moves in out for move in moves]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=cpu.device())
        theirs, mine = ([sum(move.numel for move in moves) for moves in each] for each in (back, out))
        received = sent.new_empty(sum(theirs))
        work = dist.all_to_all_single(received, sent, theirs, mine, group=self._group, async_op=True)
        self._backend.memory.note("buffers", sent.nbytes + received.nbytes)
        return Transfer(received, sent, work, [move for moves in back for move in moves])

    def _fetch(self, step: Round, inputs: dict[str, torch.Tensor]) -> Transfer:
        """Start to bring this rank what it iterates in a round."""

        def read(move: Move) -> torch.Tensor:
            return inputs[move.matrix.name].narrow(0, move.run[0], move.numel)

        if not self._stays:
            return self._send(step.gives, step.gets, read)
        moves = [move for each in step.gets for move in each]
        mine = torch.cat([read(move) for move in moves]) if moves else torch.empty(0)
        return Transfer(mine, mine, None, moves)

    def _parts(self, mine: list[Matrix], transfer: Transfer) -> dict[Matrix, list[torch.Tensor]]:
        """The tensor-parallel parts of this round's own matrices, whole and flat."""
        parts: dict[Matrix, list[torch.Tensor]] = {}
        for matrix in mine:
            parts[matrix] = list(transfer.received.new_empty(matrix.numel).chunk(self._form[matrix].num_tp))
        for move, elements in transfer.arrived():
            parts[move.matrix][move.tp].narrow(0, move.run[1], move.numel).copy_(elements)
        return parts

    def iterate(self, matrix: Matrix, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The update of a whole matrix, from its momentum or gradient: tensor-parallel parts, flat."""
        form = self._form[matrix]
        self.num_calls += 1
        whole = torch.cat([part.view(-1, form.columns) for part in parts], dim=form.axis)
        if matrix in self.soap:
            found = self.soap[matrix].update(whole)
        else:
            found = emerging.newton_schulz(
                whole,
                steps=self._keys.muon_num_ns_steps,
                coefficients=self._keys.muon_coefficient_type,
                precision=self._keys.muon_fp32_matmul_prec,
            )
        return [part.reshape(-1) for part in found.chunk(form.num_tp, dim=form.axis)]

    @staticmethod
    def _cut(results: dict[Matrix, list[torch.Tensor]]) -> Callable[[Move], torch.Tensor]:
        """A function that reads a move's elements from the results."""
        return lambda move: results[move.matrix][move.tp].narrow(0, move.run[1], move.numel)

    def _write(self, transfer: Transfer, grads: dict[str, torch.Tensor]) -> None:
        """Put the updates that have arrived in place of the gradients, Muon's scaled."""
        for move, elements in transfer.arrived():
            target = grads[move.matrix.name].narrow(0, move.run[0], move.numel).copy_(elements)
            if self._keys.optimizer == "muon":
                scale = emerging.scale_factor(move.matrix.rows, move.matrix.columns, self._keys.muon_scale_mode)
                target.mul_(scale * self._keys.muon_extra_scale_factor)

    def state(self) -> Iterator[StatePiece]:
        """SOAP's state of this rank's matrices, by the names of their parameters and their numbers in these."""
        for matrix, soap in self.soap.items():
            param = self._params[matrix.name]
            for kind, tensor in soap.tensors.items():
                named = {f"soap_{kind}_{matrix.part}": tensor.view(-1)}
                yield StatePiece(matrix.name, param, 0, named, shape=tuple(tensor.shape))


class _Holders:
    """Which ranks of the stage hold which piece of each parameter. me: this one. ranks: by name, those that hold any
    part of it. at_owners: what is orthogonalised is whole on the owner, and under tensor parallelism on the ranks of
    the same data-parallel number; else in the pieces."""

    def __init__(self, held: list[list[Held]], me: int, at_owners: bool):
        self._me, self._size, self._at_owners = me, len(held), at_owners
        self._held = [{each.name: each for each in pieces} for pieces in held]
        self._pieces: dict[str, dict[Held, list[int]]] = {}
        self._beside: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, pieces in enumerate(held):
            for each in pieces:
                ranks[each.name].append(rank)
                self._beside[each.name, each.dp].append(rank)
                if each.numel:
                    self._pieces.setdefault(each.name, {}).setdefault(each, []).append(rank)
        self.ranks = {name: tuple(found) for name, found in ranks.items()}

    def homes(self, owned: list[list[Matrix]]) -> dict[str, int]:
        """By name of each parameter, the data-parallel number of the ranks that keep it."""
        of_rank = ((self._held[rank], matrix.name) for rank, matrices in enumerate(owned) for matrix in matrices)
        return {name: held[name].dp for held, name in of_rank}

    def round(self, members: list[tuple[int, Matrix]]) -> Round:
        """The moves of this rank in a round of (owner, matrix)."""
        none: Iterator[Moves] = ([[] for _ in range(self._size)] for _ in range(4))
        found = Round([matrix for owner, matrix in members if owner == self._me], *none)
        for owner, matrix in members:
            for sender, each in self._sources(owner, matrix):
                for run in each.runs(matrix.part):
                    move = Move(matrix, each.tp, run)
                    if sender == self._me:
                        found.gives[owner].append(move)
                    if owner == self._me:
                        found.gets[sender].append(move)
            for each in self._mine(owner, matrix):
                ranks = self._pieces[matrix.name][each]
                for run in each.runs(matrix.part):
                    move = Move(matrix, each.tp, run)
                    for rank in ranks if owner == self._me else ():
                        found.returns[rank].append(move)
                    if self._me in ranks:
                        found.updates[owner].append(move)
        return found

    def _mine(self, owner: int, matrix: Matrix) -> Iterable[Held]:
        """The pieces that this rank sends or receives updates of: as the owner all of them, else its own."""
        own = self._held[self._me].get(matrix.name)
        mine = [own] if own is not None and own.numel else []
        return self._pieces[matrix.name] if owner == self._me else mine

    def _sources(self, owner: int, matrix: Matrix) -> Iterator[tuple[int, Held]]:
        """(rank, piece) of what is orthogonalised and this rank sends or receives."""
        if self._at_owners:
            its = self._held[owner][matrix.name]
            for rank in self._beside[matrix.name, its.dp] if its.num_tp > 1 else [owner]:
                if self._me in (owner, rank):
                    each = self._held[rank][matrix.name]
                    yield rank, replace(each, start=0, numel=each.rows * each.columns)
            return
        for each in self._mine(owner, matrix):
            ranks = self._pieces[matrix.name][each]
            # Of equal pieces that of the owner needs no way; else owners ask different replicas.
            yield owner if owner in ranks else ranks[owner % len(ranks)], each


def _held(groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend) -> list[Held]:
    """This rank's pieces of matrices; of one of which it has nothing, an empty piece."""
    ranges = {piece.name: (piece.start, piece.tensors["param"].numel()) for piece in backend.own_state()}
    found = []
    for name, param in names.named_parameters(chunks):
        if names.is_matrix(param):
            marked: Any = param
            rows, columns = getattr(param, "ds_shape", param.shape)
            among = names.tp_group(param, groups)
            is_cut = among.size() > 1 and names.is_sharded_over_tp(param)
            axis, num_tp, tp = (marked.partition_dim, among.size(), among.rank()) if is_cut else (0, 1, 0)
            parts = tuple(Part(*part) for part in marked.matrix_parts)
            dp = names.dp_group(param, groups).rank()
            found.append(Held(name, parts, rows, columns, axis, num_tp, tp, *ranges.get(name, (0, 0)), dp))
    return found


_KINDS = {"embedding": "embeddings", "output_layer": "heads", "norm": "norms", ".bias": "biases", "router": "routers"}


def _others(chunks: list[torch.nn.Module]) -> dict[str, str]:
    """{name: kind} of the trained parameters that are no matrices."""
    return {
        name: next((kind for word, kind in _KINDS.items() if word in name), "others")
        for name, param in names.named_parameters(chunks)
        if param.requires_grad and not names.is_matrix(param) and not names.is_tied_copy(param)
    }


def _summary(groups: Groups, optimizer: str, owned: list[list[Matrix]], others: dict[str, str], at_owners: bool) -> str:
    """Counts of what Muon or SOAP and AdamW step in the whole model, where momenta live, and the owners' balance.
    Collective over the pipeline."""
    kinds = [*_KINDS.values(), "others"]
    matrices = [matrix for each in owned for matrix in each]
    counts = [len(matrices), sum(matrix.numel for matrix in matrices), *map([*others.values()].count, kinds)]
    total = torch.tensor(counts, dtype=torch.int64, device=cpu.device())
    dist.all_reduce(total, group=groups.pp)
    number, numel, *rest = total.tolist()
    shown = ", ".join(f"{count} {kind}" for count, kind in zip(rest, kinds, strict=True) if count)
    busiest = owners.balance(owned, owners.COSTS[optimizer])
    return (
        f"optimizer: {optimizer} {number} matrices ({numel:,} elements; the busiest owner of this stage has"
        f" {busiest:.2f} times the mean cost; momenta {'at owners' if at_owners else 'in shards'}),"
        f" adam {shown or 'nothing'}"
    )
