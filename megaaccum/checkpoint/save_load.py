"""Saving and loading checkpoints.

Every rank hands torch.distributed.checkpoint the pieces that only it holds, as plain tensors (checkpoint/pieces.py has
their keys). A load reads the pieces that overlap what this rank holds, so every part of the layout may differ from that
of the save: tensor, pipeline, expert and data parallelism, ZeRO stage, backend. Everything that is not a tensor is JSON
beside them. Each tensor's SHA-256 is checked before the model changes.

    SAVE/step_0000120/   the pieces, .metadata and state.json
    SAVE/latest          the name of the folder to resume from, replaced in one rename
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megaaccum.checkpoint import pieces
from megaaccum.checkpoint.folders import DamagedCheckpoint, Files, Progress, latest, read_progress
from megaaccum.checkpoint.untrusted_reader import CheckpointReader
from megaaccum.config import Plan
from megaaccum.config.keys import values_where
from megaaccum.distributed import rng
from megaaccum.distributed.agreement import gathered, raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import CheckpointError, listed
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.sharding import ShardingBackend

__all__ = ["DamagedCheckpoint", "Progress", "latest", "load", "read_progress", "save", "shape_of"]


def shape_of(plan: Plan, vocab_size: int) -> dict[str, Any]:
    """The properties that must be equal between a checkpoint and the model that loads it, whatever their layouts.
    vocab_size: before padding."""
    fixed = values_where(plan.config, lambda facts: facts.fixed)
    return fixed | {"vocab_size": vocab_size, _PADDED: padded_vocab_size(plan.config, vocab_size)}


_PADDED = "padded vocab_size"


Buffers = dict[str, torch.Tensor]
"""{name in the whole model: tensor} of trained state that is no parameter; the same on all ranks of a stage. Names that
begin with fp8/ are amax histories and scales, which a checkpoint of a run without FP8 does not have."""


def save(
    folder: str | os.PathLike[str],
    backend: ShardingBackend,
    groups: Groups,
    progress: Progress,
    *,
    keep_last: int,
    retain: int | None = None,
    buffers: Buffers | None = None,
) -> Path:
    """Write a checkpoint of the run and make it current. Collective over the world.

    Raises CheckpointError on every rank if any rank could not write; the checkpoint before it then stays current.
    """
    written = written_tensors(backend, groups, buffers)
    files = Files(Path(folder), progress, keep_last, retain)
    try:
        files.prepare(written.values(), groups.host)
        # Rank 0 gathers the plans, each padded to the longest. Over NCCL that would be in its GPU's memory.
        dcp.save(written, storage_writer=Writer(files.aside), planner=plan_maker(), process_group=groups.host)
        raise_on_all_ranks(files.publish_on_rank0)
    except (CheckpointException, CheckpointError) as error:
        raise files.abandon(error) from error
    return files.target


def plan_maker() -> dcp.DefaultSavePlanner:
    """torch's planner, without the table that would restore a nested dict, which ours is not: rank 0 merges the tables
    of all ranks in a time that grows with the square of their number (torch 2.13), over an hour at 16,384."""
    return dcp.DefaultSavePlanner(flatten_state_dict=False)


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also records each written tensor's SHA-256 in `.metadata`.

    If the system refuses a write, it raises the OSError itself: torch's zip format, closed over half a tensor, raises
    another error about offsets, and an error that is sent to other ranks loses its __context__.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            origin: BaseException | None = error
            while origin is not None and not isinstance(origin, OSError):
                origin = origin.__context__
            raise origin or error from None
        for result in written.value():
            storage = result.storage_data
            with open(Path(self.path) / storage.relative_path, "rb") as file:
                file.seek(storage.offset)
                storage.sha256 = hashlib.sha256(file.read(storage.length)).hexdigest()
        return written

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: refuse hosts that do not share the folder, each with its own part."""
        parts = {each.storage_data.relative_path for part in results for each in part} - set(os.listdir(self.path))
        if names := sorted(name for name in parts if not (Path(self.path) / name).exists()):  # a list may be old
            raise CheckpointError(f"rank 0 does not see {listed(names)} of other ranks: hosts have to share the folder")
        super().finish(metadata, results)


def load(
    current: Path,
    backend: ShardingBackend,
    groups: Groups,
    *,
    shape: dict[str, Any],
    buffers: Buffers | None = None,
    only_weights: bool = False,
    new_momenta: bool = False,
    check: Callable[[], object] = list,
) -> Progress:
    """Read a checkpoint into the model, its `buffers` and the optimizer; collective over the world. only_weights: the
    optimizer's state begins, and this rank's random states stay. new_momenta: of AdamW's run, for one of
    Muon or SOAP, whose state begins. check: of its run, once its shape is the model's.

    Raises CheckpointError on every rank, with the model as it was: if the checkpoint is of another model, naming what
    differs; DamagedCheckpoint if a file or a piece is missing or not what was written.
    """
    buffers = buffers or {}
    progress = raise_on_all_ranks(read_progress, current)
    raise_on_all_ranks(_check_shape, current, progress.shape, shape, groups.tp.size())
    raise_on_all_ranks(check)
    reader = raise_on_all_ranks(CheckpointReader, current, progress.metadata_sha256)
    sizes = {key: each.size for key, each in reader.stored.items() if not key.startswith((_RNG, _BUFFER))}
    stored = raise_on_all_ranks(pieces.StoredPieces, sizes)
    fits = {"only_weights": only_weights, "new_momenta": new_momenta}
    raise_on_all_ranks(pieces.check_fit, current, stored, backend, groups, **fits)
    _check_size(current, stored, backend, groups)
    # Everything is read and checked before the model changes: an error leaves the model as it was.
    begun: list[tuple[pieces.Piece, torch.Tensor]] = []
    held: list[tuple[pieces.Piece, torch.Tensor]] = []
    for piece, tensor, _ in pieces.held_pieces(backend, groups):
        begins = only_weights or (new_momenta and not stored.has(piece.name, piece.kind))
        (begun if begins and piece.kind != "param" else held).append((piece, tensor))
    overlapping = raise_on_all_ranks(lambda: [stored.overlapping(piece) for piece, _ in held])
    states = {} if only_weights else _rng(groups)
    random = {key for key, now in states.items() if key in reader.stored and reader.stored[key].size == now.shape}
    keys = random.union(found.key for each in overlapping for found, _, _ in each)
    keys |= raise_on_all_ranks(_buffer_keys, current, reader, buffers)
    raise_on_all_ranks(reader.check_files, keys)
    read = raise_on_all_ranks(reader.read, keys)
    for piece, tensor in begun:
        tensor.zero_()
        if piece.kind.startswith("soap_Q"):  # an eigenbasis begins as the identity
            tensor.view(piece.shape).fill_diagonal_(1.0)
    for (piece, tensor), each in zip(held, overlapping, strict=True):
        for found, start, stop in each:
            pieces.copy(read[found.key], found, start, stop, piece, tensor)
    for name, buffer in buffers.items():
        if _BUFFER + name in read:
            buffer.detach().copy_(read[_BUFFER + name])  # in place: Transformer Engine holds views of its histories
    backend.adopt_state(0 if only_weights else progress.num_updates)
    rng.restore({key.rsplit("/", 1)[1]: read[key] for key in random})
    return progress


def _check_shape(current: Path, there: dict[str, Any], here: dict[str, Any], tp: int) -> None:
    """Check that the checkpoint is of this model. Raises CheckpointError, naming every difference."""
    wrong = sorted(key for key in here if there.get(key) != here[key])
    texts = [f"{key} is {there.get(key)} in {current}, but {here[key]} in the configuration" for key in wrong]
    if wrong == [_PADDED]:  # make_vocab_size_divisible_by * tp is another; padding is part of the softmax, so it stays
        rows = there[_PADDED]
        units = [n for n in range(1, rows // tp + 1) if rows % (n * tp) == 0 and rows - n * tp < here["vocab_size"]]
        remedy = f"set make_vocab_size_divisible_by to {units[-1]}" if units else f"no padding for tp {tp} gives {rows}"
        texts = [f"the vocabulary is padded to {rows} rows in {current}, but to {here[_PADDED]} at tp {tp} ({remedy})"]
    if wrong:
        raise CheckpointError("; ".join(texts) + ": set what differs back, or no_load to true to start afresh")


def _check_size(current: Path, stored: pieces.StoredPieces, backend: ShardingBackend, groups: Groups) -> None:
    """Check that the checkpoint has no more parameters than the model, over all stages. Collective over the world;
    raises CheckpointError on every rank."""
    mine = [piece for piece, _, writes in pieces.held_pieces(backend, groups, only_weights=True) if writes]
    total = torch.tensor(sum(piece.stop - piece.start for piece in mine))
    dist.all_reduce(total, group=groups.host)
    if int(total) == stored.numel:
        return
    sizes = f"{current} has {stored.numel:,} parameters, but the model has {int(total):,}"
    if names := sorted(stored.names.difference(*gathered({piece.name for piece in mine}, groups.host))):
        raise CheckpointError(f"{sizes}: the model has no {listed(names)}").printed_once()
    raise DamagedCheckpoint(f"{sizes} of the same names and shapes: elements are missing or there twice").printed_once()


def _buffer_keys(current: Path, reader: CheckpointReader, buffers: Buffers) -> set[str]:
    """Keys of `buffers` in the checkpoint. If it was written without FP8, FP8 histories begin afresh. Raises
    CheckpointError if a buffer is missing or has another size."""
    stored = reader.stored
    had_fp8 = any(key.startswith(_BUFFER + "fp8/") for key in stored)
    shapes = {
        _BUFFER + name: buffer.shape for name, buffer in buffers.items() if had_fp8 or not name.startswith("fp8/")
    }
    if missing := sorted(shapes.keys() - stored.keys()):
        raise CheckpointError(f"{current} lacks {listed(missing)}")
    wrong = [f"{key[len(_BUFFER) :]} {tuple(stored[key].size)}" for key in shapes if stored[key].size != shapes[key]]
    if wrong:
        raise CheckpointError(
            f"{current} has histories of another length ({listed(wrong)}): set fp8_amax_history_len back, or no_load to"
            " true to start afresh"
        )
    return set(shapes)


_BUFFER, _RNG = "buffer/", "rng/"


def written_tensors(backend: ShardingBackend, groups: Groups, buffers: Buffers | None) -> dict[str, torch.Tensor]:
    """All tensors that this rank writes, by key."""
    first = groups.tp.rank() == 0 and groups.dp_cp.rank() == 0
    whole = {_BUFFER + name: buffer for name, buffer in (buffers or {}).items()} if first else {}
    mine = {piece.key: tensor for piece, tensor, writes in pieces.held_pieces(backend, groups) if writes}
    return mine | whole | _rng(groups)


# --- random states ---------------------------------------------------------------------------------------------------


def _rng(groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's random states, keyed by its position in the layout: only the same position loads them."""
    place = f"{_RNG}pp{groups.pp.rank()}/dp{groups.dp_cp.rank()}/tp{groups.tp.rank()}/"
    return {place + name: state for name, state in rng.snapshot().items()}
