"""The folders of checkpoints: written aside, then made current in one rename, with the ones before it still there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaaccum.data.files import sync
from megaaccum.distributed.agreement import printed_once, raise_on_all_ranks
from megaaccum.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands, next to its tensors. step: committed optimizer steps; consumed_samples: over all ranks;
    lr_schedule: its state; data: digest of the dataset; shape: what a model must share to take these tensors;
    transaction: state of Transaction (skipped steps, loss scale, guards), batch_ramp: that of the batch warm-up
    (Plan.ramp_state), each empty in a checkpoint from before it."""

    step: int
    consumed_samples: int
    lr_schedule: dict[str, Any]
    data: str
    shape: dict[str, Any]
    transaction: dict[str, Any] = field(default_factory=dict)
    batch_ramp: dict[str, Any] = field(default_factory=dict)

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights: what Adam's bias correction counts."""
        return self.transaction.get("num_updates", self.step)


def latest(folder: str | os.PathLike) -> Path | None:
    """The checkpoint that `folder` calls current; None where there is none. Raises CheckpointError when it is named
    but not there."""
    pointer = Path(folder) / "latest"
    if not pointer.exists():
        return None
    current = Path(folder) / pointer.read_text().strip()
    if not (current / "state.json").exists():
        raise CheckpointError(
            f"{pointer} names {current.name}, which is not a whole checkpoint: write the name of another folder of "
            f"{folder} into it, or start afresh with --no_load"
        )
    return current


def read_progress(current: Path) -> Progress:
    """A checkpoint's record beside its tensors. Raises CheckpointError when it is not a whole one of this format."""
    path = current / "state.json"
    try:
        state = json.loads(path.read_text())
        if state.pop("format", None) != FORMAT:
            raise CheckpointError(f"{current} was written in another format than {FORMAT}")
        return Progress(**state)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


class Files:
    """The folders of one checkpoint that is being written: `aside`, and `target`, which it becomes.

    Built on every rank; global rank 0 moves and removes.
    """

    def __init__(self, folder: Path, progress: Progress, keep_last: int, retain: int | None = None):
        self._folder, self._progress, self._keep_last, self._retain = folder, progress, keep_last, retain
        name = f"step_{progress.step:07d}"
        self.aside = folder / f"{name}.tmp"
        self.target = folder / name
        # A run that starts afresh in a folder comes by the steps of the one before: whatever is current stays until
        # the new one is.
        number = 1
        while self.target.exists():
            number += 1
            self.target = folder / f"{name}-{number}"

    def prepare(self) -> None:
        """Make `aside`, empty. Collective over the world; raises CheckpointError on every rank."""
        raise_on_all_ranks(_on_rank0, self._make_empty, f"cannot make the folder {self.aside}")

    def publish_on_rank0(self) -> None:
        """Make what was written current. Call it on every rank; raises CheckpointError on rank 0 alone."""
        _on_rank0(self._publish, f"cannot make {self.target} current")

    def given_up(self, error: BaseException) -> CheckpointError:
        """The error to raise on every rank, once the space that the attempt took is free again."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.aside, ignore_errors=True)
        try:
            current = latest(self._folder)
        except CheckpointError:
            current = None
        still = f"the last good checkpoint is {current}" if current else "there is no earlier checkpoint"
        what = f"the checkpoint of step {self._progress.step} could not be written: {cause(error)}"
        return printed_once(CheckpointError(f"{what} ({self._space()}); {still}"))

    def _space(self) -> str:
        """Free bytes where checkpoints are written, as seen by this rank's host."""
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return f"{self._folder}: {error.strerror}"
        return f"{free / 2**30:,.2f} GiB are free in {self._folder}"

    def _make_empty(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob("step_*.tmp"):  # of runs that were killed: only one is written at a time
            shutil.rmtree(left, ignore_errors=True)
        self.aside.mkdir()

    def _publish(self) -> None:
        write_text(self.aside / "state.json", json.dumps({"format": FORMAT} | asdict(self._progress), indent=1))
        self.aside.rename(self.target)
        sync(self._folder)  # after a power cut the name in `latest` is there only with what it names
        write_text(self._folder / "latest", self.target.name + "\n")
        others = [p for p in self._folder.glob("step_*") if p.is_dir() and p.suffix != ".tmp" and p != self.target]
        same_step = [p for p in others if p.name.partition("-")[0] == self.target.name.partition("-")[0]]
        older = sorted((p for p in others if p not in same_step and not self._is_retained(p)), key=_written_at)
        surplus = older[: max(0, len(older) - self._keep_last + 1)] if self._keep_last > 0 else []
        for folder in same_step + surplus:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_retained(self, checkpoint: Path) -> bool:
        """Whether it is kept for good (save_retain_interval)."""
        step = checkpoint.name.removeprefix("step_").partition("-")[0]
        return self._retain is not None and int(step) % self._retain == 0


def _written_at(checkpoint: Path) -> int:
    """Time in ns; a folder without a state.json, which is no checkpoint, comes first."""
    state = checkpoint / "state.json"
    return state.stat().st_mtime_ns if state.exists() else 0


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one, never a part."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def cause(error: BaseException) -> str:
    """The line that a reader can act on, out of the tracebacks of all ranks that torch collects."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _on_rank0(action: Callable[[], None], failure: str) -> None:
    """Run `action` on global rank 0. Raises CheckpointError there when the disk refuses."""
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"{failure}: {error.strerror or error}") from error
