"""Checkpoint folders: a checkpoint is written aside and becomes current in one rename; earlier ones stay until then."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.distributed.agreement import raise_together
from megaaccum.errors import CheckpointError
from megaaccum.platform.files import free_bytes, open_regular, set_aside, sync
from megaaccum.texts import parse_json, replace_text
from megaaccum.units import amount

FORMAT = 2


class UnwrittenCheckpoint(CheckpointError):
    """A checkpoint could not be written; the one before it stays current."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete, or its bytes are not those that were written. The one before it may be usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A checkpoint's record beside its tensors. step: committed optimizer steps. consumed_samples: over all ranks.
    lr_schedule: its state. data: which samples are read in which order (data/dataset.py); empty with a user's own
    loader. shape: properties that a model must share to load these tensors. transaction: state of Transaction (skipped
    steps, loss scale, guards). batch_ramp: state of the batch warm-up (Plan.ramp_state). metadata_sha256: SHA-256 of
    the list of tensors, once that is written."""

    step: int
    consumed_samples: int
    lr_schedule: dict[str, Any]
    data: dict[str, Any]
    shape: dict[str, Any]
    transaction: dict[str, Any] = field(default_factory=dict)
    batch_ramp: dict[str, Any] = field(default_factory=dict)
    metadata_sha256: str = ""

    @property
    def num_updates(self) -> int:
        """Steps that changed the weights, which Adam's bias correction counts."""
        return int(self.transaction.get("num_updates", self.step))

    def __post_init__(self) -> None:
        """Raise ValueError if a field, as it was read from a file, has another type."""
        for name in ("step", "consumed_samples"):
            if type(getattr(self, name)) is not int or not 0 <= getattr(self, name) < 1 << 62:
                raise ValueError(f"{name} must be a non-negative integer")
        if not all(isinstance(getattr(self, name), dict) for name in _MAPPINGS):
            raise ValueError(f"one of {', '.join(_MAPPINGS)} is no mapping")


_NAME = re.compile(r"step_(\d{7,})(?:-(\d+))?")
"""The names of checkpoints: the step, and a number if there was one of the step already."""
_WRITTEN = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.json(\.new)?")
"""The names of the files in a checkpoint's folder."""
_MOST_BYTES = 1 << 28
"""A record that is longer is none of ours."""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that `latest` in `folder` names; if it names none, the newest complete one; None if there is
    none."""
    return next(iter(resume_candidates(folder)[0]), None)


def resume_candidates(folder: str | os.PathLike[str], step: int | None = None) -> tuple[list[Path], str]:
    """(checkpoints of `folder` in the order in which a resume tries them, problems of the file `latest`). The current
    checkpoint is first, then those of earlier steps, newest first. step: only that of this step. A folder that is a
    checkpoint itself is the only one. Raises CheckpointError if there is none of `step`."""
    folder = Path(folder)
    if (folder / "state.json").is_file():
        if step is not None and (own := read_progress(folder).step) != step:
            raise CheckpointError(f"load_step {step}: {folder} is the checkpoint of step {own}: leave load_step out")
        return [folder], ""
    newest = sorted((path for path in _entries(folder) if (path / "state.json").is_file()), key=_order, reverse=True)
    if step is not None:
        if asked := [path for path in newest if step_of(path) == step]:
            return asked[:1], ""
        steps = ", ".join(str(step_of(path)) for path in reversed(newest)) or "none"
        raise CheckpointError(f"load_step {step}: {folder} holds no checkpoint of that step, but of: {steps}")
    pointer = folder / "latest"
    try:
        with open_regular(pointer) as file:
            name = file.read(4096).decode(errors="replace").strip()
    except OSError as error:
        return newest, f"{pointer} cannot be read ({error.strerror or error})" if newest else ""
    if (current := folder / name) in newest:
        return [current, *(path for path in newest if step_of(path) < step_of(current))], ""
    return newest, f"{pointer} names {name[:200]!r}, which is not a whole checkpoint"


def _entries(folder: Path) -> list[Path]:
    """The entries of `folder` that have the name of a checkpoint."""
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _order(checkpoint: Path) -> tuple[int, int]:
    """The step and the number in a checkpoint's name; (-1, 0) if the name is not one of ours."""
    match = _NAME.fullmatch(checkpoint.name)
    return (int(match[1]), int(match[2] or 1)) if match else (-1, 0)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 if the name is not one of ours."""
    return _order(checkpoint)[0]


def _is_ours(entry: Path) -> bool:
    """Whether an entry with the name of a checkpoint is one, by its record: nothing else is ever removed."""
    try:
        return read_progress(entry).step == step_of(entry)
    except CheckpointError:
        return False


def read_progress(current: Path) -> Progress:
    """Read a checkpoint's record. Raises DamagedCheckpoint if its bytes are not those that were written, and
    CheckpointError if it has another format."""
    path = current / "state.json"
    try:
        with open_regular(path) as file:
            state = parse_json(file.read(_MOST_BYTES))
        seal = state.pop("sha256", "")
        if seal != _seal(state) and (seal or state["format"] == FORMAT):
            raise DamagedCheckpoint(f"{path} is damaged: it is not what was written (SHA-256)")
        if state.pop("format") != FORMAT:
            raise CheckpointError(f"{current} was written in another format than {FORMAT}")
        return Progress(**state)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {str(error)[:200]}") from error


def write_progress(aside: Path, progress: Progress) -> None:
    """Write the record of the checkpoint whose tensors are in `aside`, with the SHA-256 of their list and its own."""
    digest = hashlib.sha256((aside / ".metadata").read_bytes()).hexdigest()
    state = {"format": FORMAT} | asdict(replace(progress, metadata_sha256=digest))
    replace_text(aside / "state.json", json.dumps(state | {"sha256": _seal(state)}, indent=1))


def _seal(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


_MAPPINGS = ("lr_schedule", "data", "shape", "transaction", "batch_ramp")


class Files:
    """The folders of a checkpoint while it is written: `aside`, and `target`, its final name.

    Built on every rank; only global rank 0 moves and removes files.
    """

    def __init__(self, folder: Path, progress: Progress, keep_last: int, retain: int | None = None):
        self._folder, self._progress, self._keep_last, self._retain = folder, progress, keep_last, retain
        self._free = free_bytes(folder)  # before anything is written
        self._num_bytes = 0
        name = f"step_{progress.step:07d}"
        self.aside = folder / f"{name}.tmp"
        self.target = folder / name
        # A fresh run in an old folder reaches the old run's steps: the current checkpoint stays until the new one is
        # complete.
        if numbers := [_order(path)[1] for path in _entries(folder) if step_of(path) == progress.step]:
            self.target = folder / f"{name}-{max(numbers) + 1}"

    def prepare(self, written: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Create `aside`, empty, for the tensors that this rank writes. Collective over `group`, all ranks: one sum
        says whether rank 0 failed, how much all ranks write and how much is free on rank 0's host. Raises
        CheckpointError on every rank."""
        problem: BaseException | None = None
        try:
            _on_rank0(self._make_empty, f"cannot make the folder {self.aside}")
        except Exception as error:
            problem = error
        free = self._free if dist.get_rank() == 0 else 0  # a rank that comes later sees what others have written
        total = torch.tensor([sum(tensor.nbytes for tensor in written), problem is not None, free])
        dist.all_reduce(total, group=group)
        self._num_bytes, self._free = int(total[0]), int(total[2])
        if total[1]:
            raise_together(problem)

    def publish_on_rank0(self) -> None:
        """Make the written checkpoint current. Call it on every rank; raises CheckpointError on rank 0 only."""
        _on_rank0(self._publish, f"cannot make {self.target} current")

    def abandon(self, error: BaseException) -> CheckpointError:
        """Remove the files of the failed save, and return the error to raise on every rank."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.aside, ignore_errors=True)
        current = latest(self._folder)
        still = f"the last good checkpoint is {current}" if current else "there is no earlier checkpoint"
        what = f"the checkpoint of step {self._progress.step} could not be written: {cause(error)}"
        free = "unknown bytes" if self._free < 0 else amount(self._free)
        space = f"{free} were free in {self._folder}, the checkpoint's tensors are {amount(self._num_bytes)}"
        return UnwrittenCheckpoint(f"{what} ({space}); {still}").printed_once()

    def _make_empty(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in [path for path in self._folder.iterdir() if path.suffix == ".tmp" and _NAME.fullmatch(path.stem)]:
            # Of a run that was killed while it wrote or removed. It is removed if it holds nothing else.
            is_folder = left.is_dir() and not left.is_symlink()
            if is_folder and all(_WRITTEN.fullmatch(path.name) for path in left.iterdir()):
                shutil.rmtree(left, ignore_errors=True)
            else:
                set_aside(left)
        self.aside.mkdir()

    def _publish(self) -> None:
        write_progress(self.aside, self._progress)
        self.aside.rename(self.target)
        sync(self._folder)  # so that after a power failure `latest` never names a folder that is missing
        replace_text(self._folder / "latest", self.target.name + "\n")
        others = [path for path in _entries(self._folder) if path != self.target and not path.is_symlink()]
        surplus = [path for path in others if step_of(path) == self._progress.step and _is_ours(path)]
        if self._keep_last > 0:
            step, retain = self._progress.step, self._retain
            older = [path for path in others if step_of(path) != step and (retain is None or step_of(path) % retain)]
            older = [path for path in older if _is_ours(path)]
            # Those of later steps first, from which this run does not come, then the earliest.
            older.sort(key=lambda path: (step_of(path) < step, *_order(path)))
            surplus += older[: max(0, len(older) - self._keep_last + 1)]
        for folder in surplus:
            with suppress(OSError):  # renamed like a killed save's, so that the next save removes what a kill leaves
                shutil.rmtree(folder.rename(folder.with_suffix(".tmp")), ignore_errors=True)


def cause(error: BaseException) -> str:
    """The one line of an error that a user can act on, out of the tracebacks of all ranks that torch collects."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _on_rank0(action: Callable[[], None], failure: str) -> None:
    """Run `action` on global rank 0. Raises CheckpointError there if the file system refuses."""
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"{failure}: {error.strerror or error}") from error
