"""When checkpoints of a run are written, and which one it resumes from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megaaccum.checkpoint import resume, save_load
from megaaccum.checkpoint.folders import DamagedCheckpoint, read_progress, resume_candidates, step_of
from megaaccum.config import Plan
from megaaccum.distributed import groups
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.engine import Engine
from megaaccum.errors import CheckpointError, MegaaccumError, RankDisagreement, StepError
from megaaccum.pretrain.data.dataset import Datasets
from megaaccum.pretrain.launch.lock import LOCK
from megaaccum.pretrain.training.background_save import BackgroundSave
from megaaccum.pretrain.training.run_folder import checkpoint_folder
from megaaccum.pretrain.weights import foreign

_WAIT_AFTER_AN_ERROR = 5.0
"""Seconds in which a checkpoint that is being written may become whole when the run ends with an error; less than the
time that the launcher gives ranks to end."""


@dataclass
class Saver:
    """The checkpoints of one run: their folder, when they are due, and their content beside tensors.

    A context manager around the steps, which waits at its end for a checkpoint that is still being written.
    """

    engine: Engine
    data: Datasets
    notes: list[str] = field(default_factory=list)
    """Checkpoints that `resume` found damaged, and differences that were asked for."""
    _writing: BackgroundSave | None = None
    _overdue: bool = False
    _last_finite: int = 0
    """The last step that was not bad; the steps before a resume count."""
    _group: torch.distributed.ProcessGroup | None = None

    @property
    def folder(self) -> Path:
        return checkpoint_folder(self.engine.plan.config)

    def is_due(self, step: int, ends: bool, *, bad: bool = False) -> bool:
        """Whether a checkpoint is due: after every save_interval steps, and (save_at_end) after the last step or a
        signal. After a bad step that is not the last it is postponed to the next good one, so that a resume starts
        before a streak of bad steps."""
        run = self.engine.plan.config.run
        self._overdue = self._overdue or (run.save_interval > 0 and step % run.save_interval == 0)
        self._last_finite = self._last_finite if bad else step
        due = (self._overdue and not bad) or (ends and run.save_at_end)
        self._overdue = self._overdue and not due
        return due

    def last_good(self) -> str:
        """The newest checkpoint after which a step was finite, and the others, as sentences; the same on every rank. A
        step that is not finite may come from weights that the checkpoint before it holds already."""
        found = resume_candidates(self.folder)[0]
        if not found:
            return "There is no checkpoint of this run."
        steps = ", ".join(str(step_of(path)) for path in found)
        good = next((path for path in found if step_of(path) < self._last_finite), None)
        if good is None:
            return f"No checkpoint was followed by a finite step; the newest is {found[0]} (load_step: {steps})."
        return f"The last good checkpoint is {good}, after which a step was finite (load_step: {steps})."

    def written(self) -> str:
        """The current checkpoint, for the summary."""
        return str(save_load.latest(self.folder) or f"none in {self.folder} (save_interval, save_at_end)")

    def save(self) -> str:
        """Write a checkpoint or, with async_save, start writing it once the one before is complete. Returns what to
        log. Raises CheckpointError on every rank if this one, or the one before, failed."""
        self._finish_or_write()
        if not self.engine.plan.config.run.async_save:
            return str(self._write_by(save_load.save))
        if self._group is None:
            self._group = groups.for_background(self.engine.plan.config.parallel.distributed_timeout_minutes)
        self._writing = self._write_by(BackgroundSave, group=self._group)
        return f"{self._writing.target} (being written)"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises CheckpointError on every rank if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def _finish_or_write(self) -> None:
        """`finish`; if that checkpoint failed, write one of the present step before its error is raised."""
        try:
            self.finish()
        except CheckpointError as error:
            raise self.save_before_raising(error) from error

    def problem(self) -> MegaaccumError | None:
        """The error of a save in the background, as far as this rank knows."""
        return self._writing.problem() if self._writing is not None else None

    def save_before_raising(self, error: MegaaccumError) -> MegaaccumError:
        """The error to raise in place of `error`, which ends the run. If all ranks raise it together before the next
        step, they are in the same state, so a checkpoint of the steps before is written if one is wanted, as after one
        that failed."""
        if isinstance(error, StepError):
            return StepError(f"{error} {self.last_good()}")
        everywhere = error.printed_by == "rank 0" and not isinstance(error, RankDisagreement)
        if not everywhere or not (isinstance(error, CheckpointError) or self.is_due(self.engine.step, ends=True)):
            return error
        texts = [str(error)]
        try:
            with suppress(CheckpointError):  # that may be the error; its step is written again
                self.finish()
            written = self._write_by(save_load.save)
            texts.append(f"nothing is lost: {written} holds the {self.engine.step} steps before")
        except MegaaccumError as second:
            texts.append(str(second))
        return type(error)("\n".join(dict.fromkeys(texts))).printed_once()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish_or_write()
        elif self._writing is not None:
            self._writing.wait(_WAIT_AFTER_AN_ERROR)

    def _write_by[Written](self, write: Callable[..., Written], **more: object) -> Written:
        """Call `write` (save_load.save or BackgroundSave) with this run's present state, without a step that began."""
        engine, run = self.engine, self.engine.plan.config.run
        data = raise_on_all_ranks(self.data.state, engine.consumed_samples)  # it may build an order in the cache
        with engine.train_steps.before_open():
            return write(
                self.folder, engine.backend, engine.groups, engine.progress(data), keep_last=run.keep_last,
                retain=run.save_retain_interval, buffers=engine.buffers, **more,
            )  # fmt: skip

    def resume(self) -> None:
        """Load the current checkpoint of `load` (default: `save`), if there is one; if it is damaged, the one before
        it. Raises CheckpointError on every rank."""
        run = self.engine.plan.config.run
        if run.no_load:
            return
        folder = Path(run.load or self.folder)
        if run.load and foreign.is_foreign(folder):
            foreign.resume(self.engine, folder, vocab_size=self.data.vocabulary.size)
            self._note(f"continues from {folder}: step {self.engine.step}, {self.engine.consumed_samples} samples")
        elif not resume.first_good(folder, self._load, self._note, step=run.load_step):
            raise_on_all_ranks(self._start_afresh)

    def _load(self, checkpoint: Path) -> bool:
        engine, run = self.engine, self.engine.plan.config.run
        only_weights, afresh = run.finetune or run.no_load_optim, run.finetune or run.reset_iteration
        progress = raise_on_all_ranks(read_progress, checkpoint)
        differing = {} if afresh else engine.differences(progress) | {"data": self.data.differences(progress.data)}
        notes = engine.load_tensors(checkpoint, differing, only_weights=only_weights)
        engine.train_steps.settle()
        if afresh:
            engine.train_steps.transaction.num_updates = 0 if only_weights else progress.num_updates
            engine.print(f"{'weights' if only_weights else 'state'} of {checkpoint}; the run begins at step 0")
            for text in self.data.differences(progress.data):
                if text.startswith("vocabulary"):
                    self._note(f"{text}: a token's number may be another word than the one that the weights learned")
            return True
        engine.resume(progress, with_optimizer=not only_weights)
        consumed, whole = progress.consumed_samples, engine.plan.ramp.samples_after(run.train_iters)
        self.data = raise_on_all_ranks(self.data.after, progress.data, consumed=consumed, needed=max(consumed, whole))
        self._last_finite = progress.step
        engine.print(f"resumed from {checkpoint}: step {progress.step}, {progress.consumed_samples} samples")
        for note in notes:
            self._note(note)
        return True

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.engine.print(text)

    def _start_afresh(self) -> None:
        """Check that the run may start without a checkpoint. Raises CheckpointError if the configuration requires
        one."""
        run = self.engine.plan.config.run
        if run.load:
            missing = f"load: {run.load} holds no checkpoint (no file named latest)"
            if run.exit_on_missing_checkpoint:
                raise CheckpointError(f"{missing}, and exit_on_missing_checkpoint is true")
            if not _is_empty(Path(run.load)):
                raise CheckpointError(f"{missing}, but other files: name the folder of one, or leave load out")
            self.engine.print(f"{missing}: the run starts afresh")
        if run.finetune or run.reset_iteration:
            raise CheckpointError("there is no checkpoint to begin from; set load to one, or leave finetune out")


def continued(plan: Plan) -> Plan:
    """`plan` with the batch of each step up to the checkpoint that the run resumes from, which may be of another
    layout. A run that has begun does not begin again: `finetune` and `reset_iteration` of another folder hold until it
    has a checkpoint of its own. Raises ConfigError if these ranks cannot continue with it, or if the batch differs
    without `override`."""
    run, own = plan.config.run, checkpoint_folder(plan.config).resolve()
    load = Path(run.load or own).resolve()
    if (run.finetune or run.reset_iteration) and own not in (load, *load.parents) and resume_candidates(own)[0]:
        run = replace(run, load=None, load_step=None, finetune=False, reset_iteration=False)
        plan = replace(plan, config=replace(plan.config, run=run))
        if torch.distributed.get_rank() == 0:
            print(f"load: {load} was for the first start: the run has checkpoints in {own}", flush=True)
    if run.no_load or run.finetune or run.reset_iteration or (run.load and foreign.holds_foreign(Path(run.load))):
        return plan
    for checkpoint in resume_candidates(run.load or checkpoint_folder(plan.config), run.load_step)[0]:
        with suppress(DamagedCheckpoint):  # reported by `Saver.resume`
            progress = read_progress(checkpoint)
            return plan.continued(progress.batch_ramp, progress.consumed_samples)
    return plan


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing to load, as at the first start of a script that always passes --load. The folder may
    hold the lock of this run, which saves there."""
    return not folder.exists() or all(path.name == LOCK for path in folder.iterdir())
