"""Checkpoints: written aside and then made current, in pieces keyed by what they are of the whole model.

Every rank hands torch.distributed.checkpoint the pieces that only it holds, as plain tensors (checkpoint/pieces.py has
their keys). A load reads the pieces that overlap what this rank holds, so the layout may differ from that of the save
in everything: tensor, pipeline, expert and data parallelism, ZeRO stage, backend. What is not a tensor is JSON beside
them. Each tensor's SHA-256 is checked before any of them changes the model.

    SAVE/step_0000120/   the pieces, .metadata and state.json
    SAVE/latest          the name of the folder to resume from, replaced in one rename
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from megaaccum.checkpoint import pieces
from megaaccum.checkpoint.folders import DamagedCheckpoint, Files, Progress, cause, latest, read_progress
from megaaccum.checkpoint.reader import CheckpointReader
from megaaccum.config.keys import names_where, value
from megaaccum.distributed import rng
from megaaccum.distributed.agreement import printed_once, raise_on_all_ranks
from megaaccum.errors import CheckpointError
from megaaccum.model.sizes import padded_vocab_size
from megaaccum.platform import cpu

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend

__all__ = ["BackgroundSave", "DamagedCheckpoint", "Progress", "latest", "load", "read_progress", "save", "shape_of"]


def shape_of(plan: Plan, vocab_size: int) -> dict[str, Any]:
    """Everything that has to be equal between a checkpoint and the model that takes it, whatever their layouts.
    vocab_size: before padding."""
    fixed = {name: value(plan.config, name) for name in names_where(lambda facts: facts.fixed)}
    return fixed | {"vocab_size": vocab_size, _PADDED: padded_vocab_size(plan.config, vocab_size)}


_PADDED = "padded vocab_size"


Buffers = dict[str, torch.Tensor]
"""{name in the whole model: tensor} of what training changes beside parameters; the same on all ranks of a stage. Names
that begin with fp8/ are those of amax histories and scales, which a checkpoint of a run without FP8 does not have."""


def save(
    folder: str | os.PathLike,
    backend: ShardingBackend,
    groups: Groups,
    progress: Progress,
    *,
    keep_last: int,
    retain: int | None = None,
    buffers: Buffers | None = None,
) -> Path:
    """Write a checkpoint of the run and make it current; collective over the world.

    Raises CheckpointError on every rank when any of them could not write; what was current before still is.
    """
    files = Files(Path(folder), progress, keep_last, retain)
    try:
        files.prepare()
        # Plans are gathered on rank 0, as many times the longest as there are ranks: over NCCL in its GPU's memory.
        dcp.save(_written(backend, groups, buffers), storage_writer=_Writer(files.aside), process_group=groups.host)
        raise_on_all_ranks(files.publish_on_rank0)
    except (CheckpointException, CheckpointError) as error:
        raise files.given_up(error) from error
    return files.target


class _Writer(dcp.FileSystemWriter):
    """torch's writer, and the SHA-256 of what then lies in the files, tensor by tensor, for `.metadata`.

    Where the system refuses a write, other ranks raise its own error: torch's zip format, closed over half a tensor,
    raises another one about offsets, and an error that crosses ranks comes without the one that it was raised in.
    """

    def write_data(self, plan, planner):
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


class BackgroundSave:
    """A checkpoint that is written while training goes on; it holds a copy of this rank's tensors until then.

    It becomes current as soon as all ranks have written, on rank 0's own thread. Constructed and finished on every
    rank; `group` is `groups.for_background`'s, and at most one BackgroundSave may use it at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        backend: ShardingBackend,
        groups: Groups,
        progress: Progress,
        *,
        keep_last: int,
        group: dist.ProcessGroup,
        retain: int | None = None,
        buffers: Buffers | None = None,
    ):
        """Copy the tensors and start to write. Raises CheckpointError on every rank when the folder cannot be made."""
        self._files = Files(Path(folder), progress, keep_last, retain)
        self._current: Future[None] = Future()
        try:
            self._files.prepare()
        except CheckpointError as error:
            raise self._files.given_up(error) from error
        writing = dcp.async_save(
            _written(backend, groups, buffers),
            storage_writer=_Writer(self._files.aside),
            process_group=group,
            async_stager=_Copies(),
        )
        assert isinstance(writing, Future)
        writing.add_done_callback(self._publish)

    def _publish(self, writing: Future) -> None:
        """On the writing thread. torch's save ends on a rank only when all ranks have written, or with an error on all
        of them."""
        try:
            writing.result()
            self._files.publish_on_rank0()
        except BaseException as error:
            self._current.set_exception(error)
        else:
            self._current.set_result(None)

    def finish(self) -> Path:
        """Wait until the checkpoint is current, and return its folder; collective over the world. Raises
        CheckpointError on every rank when any of them could not write; what was current before still is."""
        try:
            raise_on_all_ranks(self._result)
        except CheckpointError as error:
            raise self._files.given_up(error) from error
        return self._files.target

    def _result(self) -> None:
        try:
            self._current.result()
        except CheckpointException as error:
            raise CheckpointError(cause(error)) from error

    @property
    def target(self) -> Path:
        """The folder that it becomes."""
        return self._files.target

    def problem(self) -> CheckpointError | None:
        """Why it failed, if this rank knows that by now."""
        error = self._current.exception() if self._current.done() else None
        return self._files.given_up(error) if error is not None else None

    def wait(self, seconds: float) -> None:
        """Wait at most so long for this rank's part, whatever became of it: for a run that ends with another error."""
        wait_for([self._current], timeout=seconds)


class _Copies(AsyncStager):
    """The tensors that `dcp.async_save` is to write: copies in host memory, made before training may change the
    tensors.

    torch's own stager copies the whole storage of each view; the pieces are views of one flat buffer.
    """

    def __init__(self) -> None:
        self._synchronize_after_execute = False  # `stage` returns when the copies are made

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """From a GPU into pinned memory, which torch keeps for the next save, with one wait for all of them: copies
        into other memory wait one by one, and go through the driver's buffer at a fraction of the speed."""
        on_gpu = cpu.has_accelerator()
        copies = {}
        for key, tensor in state_dict.items():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu and not tensor.is_cpu)
            copies[key] = copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""
        return

    def close(self) -> None:
        """Nothing to release."""
        return


def load(
    current: Path,
    backend: ShardingBackend,
    groups: Groups,
    *,
    shape: dict[str, Any],
    buffers: Buffers | None = None,
    only_weights: bool = False,
) -> Progress:
    """Read a checkpoint into the model, its `buffers` and the optimizer; collective over the world. only_weights: the
    optimizer's moments and this rank's random states stay as they are at a start.

    Raises CheckpointError on every rank, with the model as it was: when the checkpoint is of another model, naming what
    differs; DamagedCheckpoint when a file or a piece is missing or not what was written.
    """
    progress = raise_on_all_ranks(read_progress, current)
    reader, stored = raise_on_all_ranks(_open, current, progress, backend, groups, shape, only_weights)
    _check_size(current, stored, backend, groups)
    _take_up(current, progress, reader, stored, backend, groups, buffers or {}, only_weights)
    return progress


def _open(
    current: Path,
    progress: Progress,
    backend: ShardingBackend,
    groups: Groups,
    shape: dict[str, Any],
    only_weights: bool,
) -> tuple[CheckpointReader, pieces.Stored]:
    """The tensors of `current`, which is found to be one of this model. Raises CheckpointError."""
    if wrong := _other_shape(current, progress.shape, shape, groups.tp.size()):
        raise CheckpointError("; ".join(wrong) + ": set what differs back, or start afresh with --no_load")
    reader = CheckpointReader(current, progress.metadata_sha256)
    stored = pieces.Stored(key for key in reader.stored if not key.startswith((_RNG, _BUFFER)))
    pieces.check_fit(current, stored, backend, groups, only_weights=only_weights)
    return reader, stored


def _other_shape(current: Path, there: dict[str, Any], here: dict[str, Any], tp: int) -> list[str]:
    """The differences between a checkpoint's model and this one, as texts."""
    wrong = sorted(key for key in here if there.get(key) != here[key])
    if wrong == [_PADDED]:
        return [_other_padding(current, there, here, tp)]
    return [f"{key} is {there.get(key)} in {current} and {here[key]} in the configuration" for key in wrong]


def _other_padding(current: Path, there: dict[str, Any], here: dict[str, Any], tp: int) -> str:
    """make_vocab_size_divisible_by * tp is another: rows of the padding take part in the softmax, so they stay."""
    vocabulary, rows = here["vocab_size"], there[_PADDED]
    fitting = [unit for unit in range(1, rows // tp + 1) if rows % (unit * tp) == 0 and rows - unit * tp < vocabulary]
    remedy = f"set make_vocab_size_divisible_by to {fitting[-1]}" if fitting else f"no padding for tp {tp} gives {rows}"
    return f"the vocabulary is padded to {rows} rows in {current} and to {here[_PADDED]} at tp {tp} ({remedy})"


def _check_size(current: Path, stored: pieces.Stored, backend: ShardingBackend, groups: Groups) -> None:
    """Check that the checkpoint has no more parameters than the model, over all stages. Collective over the world;
    raises CheckpointError on every rank."""
    mine = [piece for piece, _, writes in pieces.own(backend, groups, only_weights=True) if writes]
    total = torch.tensor(sum(piece.stop - piece.start for piece in mine))
    dist.all_reduce(total, group=groups.host)
    if int(total) == stored.numel:
        return
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, {piece.name for piece in mine}, group=groups.host)
    names = sorted(stored.names.difference(*everyone))
    raise printed_once(
        CheckpointError(
            f"{current} has {stored.numel:,} parameters and the model {int(total):,}; the model has no"
            f" {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        )
    )


def _take_up(
    current: Path,
    progress: Progress,
    reader: CheckpointReader,
    stored: pieces.Stored,
    backend: ShardingBackend,
    groups: Groups,
    buffers: Buffers,
    only_weights: bool,
) -> None:
    """Read all that this rank needs, and then change the model."""
    held = list(pieces.own(backend, groups, only_weights=only_weights))
    covering = raise_on_all_ranks(lambda: [stored.covering(piece) for piece, _, _ in held])
    wanted = {found.key for each in covering for found, _, _ in each}
    random = [key for key in _rng(groups) if key in reader.stored and not only_weights]
    keys = raise_on_all_ranks(_with_buffers, current, reader, buffers, wanted | set(random))
    read = raise_on_all_ranks(reader.read, keys)
    for (piece, tensor, _), each in zip(held, covering, strict=True):
        for found, start, stop in each:
            pieces.copy(read[found.key], found, start, stop, piece, tensor)
    for name, buffer in buffers.items():
        if _BUFFER + name in read:
            _take(buffer, read[_BUFFER + name])
    backend.adopt_state(0 if only_weights else progress.num_updates)
    rng.restore({key.rsplit("/", 1)[1]: read[key] for key in random})


def _with_buffers(current: Path, reader: CheckpointReader, buffers: Buffers, keys: set[str]) -> set[str]:
    """`keys` and those of the buffers, all of which are found to be there. Raises CheckpointError."""
    keys = keys.union(_wanted_buffers(reader.stored, buffers))
    if missing := sorted(keys - reader.stored.keys()):
        raise CheckpointError(f"{current} lacks {', '.join(missing[:_SHOWN])}")
    if wrong := [f"{key[len(_BUFFER) :]} {size}" for key, size in _other_sizes(reader.stored, buffers)]:
        raise CheckpointError(
            f"{current} has histories of another length ({', '.join(wrong[:2])}{', ...' if len(wrong) > 2 else ''}):"
            " set fp8_amax_history_len back, or start afresh with --no_load"
        )
    reader.check_files(keys)
    return keys


def _wanted_buffers(stored: dict[str, Any], buffers: Buffers) -> list[str]:
    """Keys of the buffers that have to be there. A run that was without FP8 goes on with fresh histories."""
    had_fp8 = any(key.startswith(_BUFFER + "fp8/") for key in stored)
    return [_BUFFER + name for name in buffers if had_fp8 or not name.startswith("fp8/")]


def _other_sizes(stored: dict[str, Any], buffers: Buffers) -> list[tuple[str, tuple[int, ...]]]:
    """(key, size stored) of buffers that are stored with another size."""
    keys = [(_BUFFER + name, buffer.shape) for name, buffer in buffers.items() if _BUFFER + name in stored]
    return [(key, tuple(stored[key].size)) for key, shape in keys if stored[key].size != shape]


def _take(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.dtype == value.dtype:
        buffer.detach().copy_(value)  # in place: Transformer Engine holds views of its histories
    else:
        buffer.data = value.to(buffer.device)  # DeepSpeed has cast an FP32 buffer of a BF16 model


_BUFFER, _RNG = "buffer/", "rng/"
_SHOWN = 4
"""Names that a message lists."""


def _written(backend: ShardingBackend, groups: Groups, buffers: Buffers | None) -> dict[str, torch.Tensor]:
    """All that this rank writes."""
    first = groups.tp.rank() == 0 and groups.dp_cp.rank() == 0
    whole = {_BUFFER + name: buffer for name, buffer in (buffers or {}).items()} if first else {}
    mine = {piece.key: tensor for piece, tensor, writes in pieces.own(backend, groups) if writes}
    return mine | whole | _rng(groups)


# --- random states ---------------------------------------------------------------------------------------------------


def _rng(groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's random states, keyed by its place, so that only the same place takes them up again."""
    place = f"{_RNG}pp{groups.pp.rank()}/dp{groups.dp_cp.rank()}/tp{groups.tp.rank()}/"
    return {place + name: state for name, state in rng.snapshot().items()}
