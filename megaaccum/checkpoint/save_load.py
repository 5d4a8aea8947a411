"""Checkpoints: written aside and then made current, in pieces keyed by a parameter's name in the whole model.

Every rank hands torch.distributed.checkpoint the pieces that only it holds, as plain tensors under
`NAME/KIND/tpR/START:STOP` (KIND: param, exp_avg, exp_avg_sq; START, STOP: elements of the flattened parameter). A load
reads the pieces that overlap what this rank holds, so pipeline, data-parallel and ZeRO layout may differ from those of
the save. What is not a tensor is JSON beside them.

    SAVE/step_0000120/   the pieces, .metadata and state.json
    SAVE/latest          the name of the folder to resume from, replaced in one rename
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager

from megaaccum.checkpoint.folders import Files, Progress, cause, latest, read_progress
from megaaccum.checkpoint.reader import CheckpointReader
from megaaccum.config.keys import names_where, value
from megaaccum.distributed import cpu, rng
from megaaccum.distributed.agreement import printed_once, raise_on_all_ranks
from megaaccum.errors import CheckpointError
from megaaccum.model import gpt
from megaaccum.model.flops import padded_vocab_size

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend
    from megaaccum.sharding.base import StatePiece

__all__ = [
    "BackgroundSave",
    "Progress",
    "is_elsewhere",
    "latest",
    "load",
    "prefix",
    "read_progress",
    "save",
    "shape_of",
]


def shape_of(plan: Plan, vocab_size: int) -> dict[str, Any]:
    """Everything that has to be equal between a checkpoint and the model that takes it (layouts of pp, dp and ZeRO may
    differ)."""
    fixed = {name: value(plan.config, name) for name in names_where(lambda facts: facts.fixed)}
    return fixed | {"vocab_size": padded_vocab_size(plan.config, vocab_size)}


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
    """torch's writer; where the system refuses a write, other ranks raise its own error.

    torch's zip format, closed over half a tensor, raises another one about offsets, and an error that crosses ranks
    comes without the one that it was raised in.
    """

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            origin: BaseException | None = error
            while origin is not None and not isinstance(origin, OSError):
                origin = origin.__context__
            raise origin or error from None


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

    Raises CheckpointError on every rank when it is of another model (naming each number that differs), a piece is
    missing, a file cannot be read, or it holds what no checkpoint holds.
    """
    progress, reader, wanted = raise_on_all_ranks(_open, current, backend, groups, shape, buffers or {}, only_weights)
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    read = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in wanted}
    states = {key: torch.empty(stored[key].size, dtype=torch.uint8) for key in _rng(groups) if key in stored}
    try:
        dcp.load(read | states, storage_reader=reader, process_group=groups.host)
    except CheckpointException as error:
        what = cause(error)
        if "eights only load failed" in what or "PytorchStreamReader" in what:  # torch then advises to trust the file
            what = "one of its .distcp files is damaged"
        raise printed_once(CheckpointError(f"{current} cannot be read: {what}")) from error
    _fill(backend, groups, read, only_weights)
    for name, buffer in (buffers or {}).items():
        if _BUFFER + name in read:
            _take(buffer, read[_BUFFER + name])
    backend.adopt_state(0 if only_weights else progress.num_updates)
    if only_weights:
        return progress
    rng.restore({key.rsplit("/", 1)[1]: state for key, state in states.items()})
    return progress


def _open(
    current: Path,
    backend: ShardingBackend,
    groups: Groups,
    shape: dict[str, Any],
    buffers: Buffers,
    only_weights: bool,
) -> tuple[Progress, CheckpointReader, list[str]]:
    """The checkpoint's entries, its reader, and the keys that this rank needs. No collective."""
    progress = read_progress(current)
    wrong = [
        f"{key} is {progress.shape.get(key)} in {current} and {shape[key]} in the configuration"
        for key in shape
        if progress.shape.get(key) != shape[key]
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong) + ": set what differs back, or start afresh with --no_load")
    reader = CheckpointReader(current)
    stored = reader.read_metadata().state_dict_metadata
    wanted = _overlapping(stored, backend, groups, only_weights) + _wanted_buffers(stored, buffers)
    if missing := [key for key in wanted if key not in stored]:
        raise CheckpointError(f"{current} lacks {', '.join(missing)}")
    if wrong := [f"{key[len(_BUFFER) :]} {size}" for key, size in _other_sizes(stored, buffers)]:
        raise CheckpointError(
            f"{current} has histories of another length ({', '.join(wrong[:2])}{', ...' if len(wrong) > 2 else ''}):"
            " set fp8_amax_history_len back, or start afresh with --no_load"
        )
    reader.check_files(set(wanted))
    return progress, reader, wanted


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


# --- pieces ----------------------------------------------------------------------------------------------------------


_BUFFER, _RNG = "buffer/", "rng/"


def _written(backend: ShardingBackend, groups: Groups, buffers: Buffers | None) -> dict[str, torch.Tensor]:
    """All that this rank writes."""
    first = groups.tp.rank() == 0 and groups.dp_cp.rank() == 0
    whole = {_BUFFER + name: buffer for name, buffer in (buffers or {}).items()} if first else {}
    return _pieces(backend, groups) | whole | _rng(groups)


def prefix(name: str, kind: str, param: torch.nn.Parameter, groups: Groups) -> str:
    """Beginning of the keys of a parameter's pieces."""
    rank = groups.tp.rank() if gpt.is_sharded_over_tp(param) else 0
    return f"{name}/{kind}/tp{rank}/"


def is_elsewhere(piece: StatePiece, backend: ShardingBackend, groups: Groups) -> bool:
    """Whether another rank holds the same piece, and writes it."""
    twice = gpt.is_tied_copy(piece.param) or (groups.tp.rank() > 0 and gpt.is_same_over_tp(piece.param))
    return twice or backend.replica > 0 or piece.replica > 0


def _pieces(backend: ShardingBackend, groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's pieces, without those that another rank writes too."""
    pieces = {}
    for piece in backend.state():
        if is_elsewhere(piece, backend, groups):
            continue
        for kind, tensor in piece.tensors.items():
            if tensor.numel():
                stop = piece.start + tensor.numel()
                pieces[prefix(piece.name, kind, piece.param, groups) + f"{piece.start}:{stop}"] = tensor
    return pieces


def _ranges(stored: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """{prefix: sorted (start, stop) of the stored pieces}."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, what in stored.items():
        if isinstance(what, TensorStorageMetadata) and not key.startswith((_RNG, _BUFFER)):
            prefix, _, span = key.rpartition("/")
            start, stop = span.split(":")
            found.setdefault(prefix + "/", []).append((int(start), int(stop)))
    return {prefix: sorted(spans) for prefix, spans in found.items()}


def _parts(backend: ShardingBackend, groups: Groups, only_weights: bool = False):
    """(prefix, start, flat view) of every tensor that this rank holds."""
    for piece in backend.state():
        for kind, tensor in piece.tensors.items():
            if only_weights and kind != "param":
                continue
            yield prefix(piece.name, kind, piece.param, groups), piece.start, tensor


def _overlapping(
    stored: dict[str, Any], backend: ShardingBackend, groups: Groups, only_weights: bool = False
) -> list[str]:
    """Keys of the stored pieces that cover what this rank holds. Raises CheckpointError where they leave a hole."""
    ranges = _ranges(stored)
    keys: dict[str, None] = {}  # ordered, without repeats
    for prefix, start, tensor in _parts(backend, groups, only_weights):
        position, stop = start, start + tensor.numel()
        for low, high in ranges.get(prefix, []):
            if low <= position < high and position < stop:
                keys[f"{prefix}{low}:{high}"] = None
                position = high
        if position < stop:
            raise CheckpointError(f"the checkpoint lacks elements {position} to {stop} of {prefix.rstrip('/')}")
    return list(keys)


def _fill(backend: ShardingBackend, groups: Groups, read: dict[str, torch.Tensor], only_weights: bool = False) -> None:
    ranges = _ranges({key: TensorStorageMetadata(None, t.size(), []) for key, t in read.items()})  # type: ignore[arg-type]
    for prefix, start, tensor in _parts(backend, groups, only_weights):
        stop = start + tensor.numel()
        for low, high in ranges.get(prefix, []):
            first, last = max(low, start), min(high, stop)
            if first < last:
                tensor[first - start : last - start].copy_(read[f"{prefix}{low}:{high}"][first - low : last - low])


# --- random states ---------------------------------------------------------------------------------------------------


def _rng(groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's random states, keyed by its place, so that only the same place takes them up again."""
    place = f"{_RNG}pp{groups.pp.rank()}/dp{groups.dp_cp.rank()}/tp{groups.tp.rank()}/"
    return {place + name: state for name, state in rng.snapshot().items()}
