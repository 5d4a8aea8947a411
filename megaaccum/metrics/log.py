"""The run's log: one object that the training loop tells every step and evaluation."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaaccum.config import Config, Plan
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.metrics import journal, plots
from megaaccum.metrics.journal import Journal, Record
from megaaccum.metrics.progress import Progress, evaluation_line
from megaaccum.metrics.services import Services, missing_packages
from megaaccum.metrics.speed import Speed
from megaaccum.metrics.summary import summarize


class RunLog:
    """Journal (output_dir/log.jsonl), progress line on standard output, TensorBoard / W&B / CSV, and at the end a
    picture (output_dir/loss.png) and a summary.

    One rank writes, `is_writer`; a pipeline has to bring the loss there. On every other rank all methods do nothing.
    Nothing here communicates.

    Values may be tensors of one element. They are read once, when the step is recorded: the verdict on the step was
    read by then, so the device is idle and nothing waits longer, and no step is missing from the journal of a run that
    is killed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        is_writer: bool,
        flops_per_step: float,
        peak_flops: float | None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Open the files of a run that goes on after step `start_step` (0: a fresh one).

        `flops_per_step` comes from `model.flops.step_flops`, `peak_flops` (FLOP/s of one device, None where
        unknown) from `model.flops.peak_flops`; `clock` gives seconds. Raises MegaaccumError where a file cannot be
        written or the journal of an earlier start is damaged, and ConfigError as `check` does.
        """
        self._is_writer = is_writer
        self._repeated = ("", 0, 0)
        self.problem: MegaaccumError | None = None
        """Why a record could not be written, once that happened; only ever set on the writing rank."""
        if not is_writer:
            return
        check(plan.config)
        run = plan.config.run
        self._plan, self._clock, self._started, self._closed = plan, clock, clock(), False
        self._speed = Speed(
            tokens_per_step=plan.batch.tokens_per_step,
            flops_per_step=flops_per_step,
            world_size=plan.layout.world_size,
            peak_flops=peak_flops,
            sequences_per_step=plan.batch.global_batch_size,
        )
        self._first_step = start_step + 1
        self._last_step = run.train_iters if run.max_steps is None else min(run.train_iters, start_step + run.max_steps)
        self._progress = Progress(
            self._speed, start_step=start_step, last_step=self._last_step, total_steps=run.train_iters, clock=clock
        )
        self._journal = Journal(Path(run.output_dir) / "log.jsonl", start_step=start_step)
        self._services = Services(plan.config, start_step=start_step)

    def step(self, record: Mapping[str, Any]) -> None:
        """Record an optimizer step, taken or skipped; called once for each, in order.

        Required: `step` (1 for the first of the run), `loss` (nats per token), `lr`, `seconds_per_step`. Known:
        `grad_norm` (before clipping), `consumed_samples`, `global_batch_size` (of this step), `skipped` (bool),
        `num_tokens` (unmasked), `loss_scale`. Any other number may be there, under a name with its unit. Rates are
        added here: `tokens_per_second` (all ranks, masked tokens included), `tflops_per_second_per_rank`, `mfu` (0 to
        1, where the peak is known).
        """
        if not self._is_writer:
            return
        full = {"kind": "train", **_read(record)}
        full |= self._speed.rates(full["seconds_per_step"], self._speed.share(full))
        self._write(full)
        self._progress.add(full)
        if self._is_due(full["step"]):
            self.note(self._progress.line(full))
            self._services.flush()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record an evaluation: `step` (steps taken before it, 0 for one before the first), `loss` (nats per
        token), and other numbers under names that tell their units."""
        if not self._is_writer:
            return
        full = {"kind": "valid", **_read(record)}
        self._write(full)
        self.note(evaluation_line(self._progress.position(full["step"]), full["loss"]))
        self._services.flush()

    def step_note(self, step: int, text: str) -> None:
        """Print what was wrong with `step` ("": nothing); what is the same but for its numbers in the next steps is
        counted, and printed when it ends."""
        kind = re.sub(r"\d[\d.e+-]*", "#", text)
        if kind and kind == self._repeated[0]:
            self._repeated = kind, self._repeated[1] + 1, step
            return
        _, count, last = self._repeated
        self._repeated = kind, 0, step
        if count:
            self.note(f"step {last}: the same, for {count} more step{'s' * (count > 1)} in a row")
        if text:
            self.note(f"step {step}: {text}")

    def note(self, text: str) -> None:
        """Print a line on the writing rank."""
        if self._is_writer:
            print(text, flush=True)

    def close(self, outcome: str = "Done", *, checkpoint: str = "") -> None:
        """Write what is left, draw the picture, print the summary after `outcome`. Closing twice is harmless. Raises
        MegaaccumError when a record is missing because it could not be written.

        A picture that cannot be written is noted in the summary and ends nothing: the run is over, and log.jsonl, from
        which it can be drawn again, is whole.
        """
        if not self._is_writer or self._closed:
            return
        self._closed = True
        self.step_note(0, "")
        self._services.close()
        self._journal.close()
        if self.problem is not None:
            raise self.problem
        records = journal.read(self._journal.path)
        files: dict[str, Path | str] = {"checkpoint": checkpoint} if checkpoint else {}
        files |= {"log": self._journal.path} | self._draw(records)
        self.note(summarize(records, outcome=outcome, seconds=self._clock() - self._started, files=files))

    def _write(self, record: Record) -> None:
        try:
            self._journal.append(record)
        except MegaaccumError as error:
            self.problem = self.problem or error
            raise
        self._services.add(record)

    def _is_due(self, step: int) -> bool:
        interval = self._plan.config.run.log_interval
        return step in (self._first_step, self._last_step) or (interval > 0 and step % interval == 0)

    def _tokens_after(self, step: int) -> int:
        return self._plan.ramp.samples_after(step) * self._plan.batch.seq_length

    def _draw(self, records: list[Record]) -> dict[str, Path | str]:
        if not any(record["kind"] == "train" for record in records):
            return {}
        path = self._journal.path.with_name("loss.png")
        try:
            plots.draw(records, path, tokens_after=self._tokens_after, title=_title(self._plan))
        except OSError as error:
            return {"picture": f"not drawn, {path} cannot be written: {error.strerror or error}"}
        return {"picture": path}


def check(config: Config) -> None:
    """Checks before the run starts: output_dir can be written, and the packages of the services asked for
    are installed. Imports none of them and needs no process group, so a launcher can ask before it starts a rank.
    `config` is a resolved one. Raises ConfigError with every problem at once."""
    problems = missing_packages(config) + folder_problems("output_dir", config.run.output_dir)
    if problems:
        raise ConfigError(problems)


def folder_problems(key: str, folder: str) -> list[str]:
    """Why the folder that `key` names cannot be written, or nothing; it is made, and a byte is written to it, since a
    full disk still makes empty files."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"\0")
    except OSError as error:
        return [f"{key} {folder!r} cannot be written: {error.strerror or error}; set {key} to a folder that can"]
    return []


def _read(record: Mapping[str, Any]) -> Record:
    """The record with plain numbers in place of tensors and NumPy scalars."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in record.items()}


def _title(plan: Plan) -> str:
    model, layout = plan.config.model, plan.layout
    ranks = " x ".join(
        f"{name} {size}"
        for name, size in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("dp", layout.dp))
        if size > 1 or name == "dp"
    )
    batch = f"{plan.batch.global_batch_size} x {plan.batch.seq_length} tokens per step"
    return f"{model.num_layers} layers of width {model.hidden_size}, {batch}, {ranks}"
