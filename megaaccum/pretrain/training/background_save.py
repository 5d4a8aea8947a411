"""Checkpoints that are written while training continues (`async_save`)."""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from megaaccum.checkpoint.folders import Files, Progress, cause
from megaaccum.checkpoint.save_load import Buffers, Writer, plan_maker, written_tensors
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import CheckpointError
from megaaccum.platform import cpu
from megaaccum.sharding import ShardingBackend
from megaaccum.upstream import pytorch


class BackgroundSave:
    """A checkpoint that is written while training continues, from a copy of this rank's tensors.

    It becomes current as soon as all ranks have written, on a thread of rank 0. Construct and finish it on every rank.
    `group` is `groups.for_background`'s; only one BackgroundSave may use it at a time. target: the final folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], backend: ShardingBackend, groups: Groups, progress: Progress, *,
        keep_last: int, group: dist.ProcessGroup, retain: int | None = None, buffers: Buffers | None = None,
    ):  # fmt: skip
        """Copy the tensors and start writing. Raises CheckpointError on every rank if the folder cannot be created."""
        pytorch.unwatched.add(group)  # what its thread sends is no step's
        written = written_tensors(backend, groups, buffers)
        self._files = Files(Path(folder), progress, keep_last, retain)
        self.target = self._files.target
        self._current: Future[None] = Future()
        try:
            self._files.prepare(written.values(), groups.host)
        except CheckpointError as error:
            raise self._files.abandon(error) from error
        writing = dcp.async_save(
            written, storage_writer=Writer(self._files.aside), planner=plan_maker(), process_group=group,
            async_stager=_Copies(),
        )  # fmt: skip
        assert isinstance(writing, Future)
        writing.add_done_callback(self._publish)

    def _publish(self, writing: Future[Any]) -> None:
        """Runs on the writing thread. torch's save ends on a rank only after all ranks have written, or with an error
        on all ranks."""
        try:
            writing.result()
            self._files.publish_on_rank0()
            self._current.set_result(None)
        except BaseException as error:
            self._current.set_exception(error)

    def finish(self) -> Path:
        """Wait until the checkpoint is current, and return its folder. Collective over the world. Raises
        CheckpointError on every rank if any rank could not write; the checkpoint before it then stays current."""
        try:
            raise_on_all_ranks(self._result)
        except CheckpointError as error:
            raise self._files.abandon(error) from error
        return self._files.target

    def _result(self) -> None:
        try:
            self._current.result()
        except CheckpointException as error:
            raise CheckpointError(cause(error)) from error

    def problem(self) -> CheckpointError | None:
        """The error of the save, if this rank knows of one already."""
        error = self._current.exception() if self._current.done() else None
        return self._files.abandon(error) if error is not None else None

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for this rank's part and ignore its outcome: for a run that ends with another error."""
        wait_for([self._current], timeout=seconds)


class _Copies(AsyncStager):
    """The stager of `dcp.async_save`: copies this rank's tensors to host memory before training may change them.

    torch's own stager copies the whole storage of each view, but the pieces are views of one flat buffer.
    """

    def __init__(self) -> None:
        self._synchronize_after_execute = False  # `stage` returns when the copies are made

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy from a GPU into pinned memory, which torch caches for the next save, with one synchronization for all
        tensors. (Copies into pageable memory synchronize one by one, through the driver's buffer, at a fraction of the
        speed.)"""
        on_gpu = cpu.has_accelerator()
        copies = {}
        for key, tensor in state_dict.items():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu and not tensor.is_cpu)
            copies[key] = copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has waited."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
