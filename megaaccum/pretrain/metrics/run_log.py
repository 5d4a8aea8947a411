"""The run's log, to which the training loop reports every step and evaluation."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaaccum.config import Config, Plan
from megaaccum.errors import MegaaccumError, raise_problems
from megaaccum.pretrain.launch import output
from megaaccum.pretrain.metrics import journal, plots, receipts
from megaaccum.pretrain.metrics.goodput import Goodput
from megaaccum.pretrain.metrics.journal import TOTALS, Journal, Record
from megaaccum.pretrain.metrics.progress import Progress, evaluation_text, last_step, ranks_of
from megaaccum.pretrain.metrics.services import Services, missing_packages
from megaaccum.pretrain.metrics.speed import Speed
from megaaccum.pretrain.metrics.summary import summarize

TOTALS_EVERY = 1000
"""Steps between two records with totals, of which a resume reads no more."""


class RunLog:
    """The run's journal (output_dir/log.jsonl), receipt (output_dir/receipts), progress line on standard output,
    TensorBoard, W&B and CSV, and at the end a picture (output_dir/loss.png) and a summary.

    Only one rank, `is_writer`, writes; the loss has to be on that rank. On every other rank all methods do nothing.
    Nothing here communicates.

    Values may be tensors of one element. They are read when the step is recorded: by then the verdict on the step has
    been read, so the device is idle and reading costs no further wait, and a run that is killed has recorded every
    step.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        is_writer: bool,
        flops_per_step: float | None,
        peak_flops: float | None,
        start_step: int = 0,
        opening: Record | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ):
        """Open the files of a run that continues after step `start_step` (0: a fresh one).

        `flops_per_step` comes from `flops.step_flops`, `peak_flops` (FLOP/s of one device) from `flops.peak_flops`,
        each None if unknown; `opening` is the receipt's content at the start (`receipts.opening`); `clock` gives
        seconds, `now` seconds since 1970. Raises MegaaccumError if a file cannot be written or the journal of an
        earlier start is damaged, and ConfigError as `check` does.
        """
        self._is_writer = is_writer
        self._repeated = ("", 0, 0)
        self._lost_output = ""
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
        self._first_step, self._last_seen = start_step + 1, start_step
        self._unwritten: Record | None = None
        self._last_step = last_step(run, start_step)
        self._progress = Progress(
            self._speed, start_step=start_step, last_step=self._last_step, total_steps=run.train_iters, clock=clock
        )
        folder, self._now = Path(run.output_dir), now
        stamp = {"launched": (opening or {}).get("launched", now()), "time": round(now(), 3)}
        self._journal = Journal(folder / "log.jsonl", start_step=start_step, start=stamp)
        self._goodput = Goodput(journal.since_totals(self._journal.path))
        self._receipt = receipts.Receipt(folder, opening or {}, fresh=start_step == 0, clock=clock)
        if start_step:
            self.event("restart", start_step, f"continues after step {start_step}")
        self._services = Services(plan.config, start_step=start_step, lost=self._lose)

    def step(self, record: Mapping[str, Any]) -> None:
        """Record an optimizer step, taken or skipped; called once for each, in order.

        Required: `step` (1 for the first of the run), `loss` (nats per token), `lr`, `seconds_per_step`, the wait for
        data included. Known: `grad_norm` (before clipping), `consumed_samples`, `global_batch_size` (of this step),
        `skipped` (bool), `note` (what was wrong with it), `num_tokens` (unmasked), `loss_scale`, `seconds_data` and so
        on (`step_record.by_phase`). Any other number may be there, under a name with its unit. Added here:
        `tokens_per_second` (all ranks, masked tokens included), `tflops_per_second_per_rank` (if the model's layers are
        counted), `mfu` (0 to 1, if the peak is known too), `goodput` (0 to 1, of the whole run so far), and `time`, in
        seconds since 1970.
        """
        if not self._is_writer:
            return
        full = {"kind": "train", **_read(record)}
        full |= self._speed.rates(full["seconds_per_step"], self._speed.share(full))
        self._last_seen = full["step"]
        self._write(full)
        self._progress.add(full)
        interval = self._plan.config.run.log_interval
        if full["step"] in (self._first_step, self._last_step) or (interval > 0 and full["step"] % interval == 0):
            self.note(self._progress.line(full))
            self._services.flush()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record an evaluation: `step` (steps taken before it, 0 for one before the first), `loss` (nats per
        token), and other numbers under names that tell their units."""
        self.add_text("valid", record, evaluation_text(record["loss"]))

    def add_text(self, kind: str, record: Mapping[str, Any], text: str) -> None:
        """Record an evaluation, text comparisons or a sample after `step` steps (kind `valid`, `text_comparisons`,
        `sample`), and print `text`."""
        if not self._is_writer:
            return
        self._write({"kind": kind, **_read(record)})
        self.note(f"{self._progress.position(record['step'])} | {text}")
        self._services.flush()

    def step_note(self, step: int, text: str) -> None:
        """Print what was wrong with `step` ("": nothing). Texts of following steps that differ only in numbers are
        counted, and the count is printed when they end."""
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

    def event(self, kind: str, step: int, text: str) -> None:
        """Record in the receipt that something happened in `step` (`Receipt.event`)."""
        if self._is_writer:
            self._receipt.event(kind, step, text)

    def note(self, text: str) -> None:
        """Print a line on the writing rank."""
        if self._is_writer:
            print(text, flush=True)

    def failed(self, error: BaseException) -> None:
        """Record in journal and receipt that the run ends with `error`, as far as they can be written."""
        if self._is_writer and not self._closed:
            self._end(f"{type(error).__name__}: {error}", {})

    def close(self, outcome: str = "Done", *, checkpoint: str = "", seconds: Mapping[str, float] | None = None) -> None:
        """Write what is left, draw the picture, and print the summary under the heading `outcome`. Closing twice is
        harmless. Raises MegaaccumError if a record could not be written. seconds: outside of steps
        (`step_record.between_steps`), since the last one.

        A picture that cannot be written is noted in the summary and raises nothing: the run is over, and the picture
        can be drawn again from log.jsonl.
        """
        if not self._is_writer or self._closed:
            return
        self._closed = True
        self.step_note(0, "")
        self._services.close()
        if self.problem is None:
            self._end(outcome, dict(seconds or {}))
        self._journal.close()
        if self.problem is not None:
            raise self.problem
        kept = journal.kept(self._journal.path, self._is_shown)
        records = [{name: record.get(name) for name in plots.DRAWN} for record, is_kept in kept if is_kept]
        files: dict[str, Path | str] = {"checkpoint": checkpoint} if checkpoint else {}
        files |= {"log": self._journal.path} | self._draw(records)
        self.note(
            summarize(
                records,
                outcome=outcome,
                seconds=self._clock() - self._started,
                goodput=self._goodput.line(),
                files=files | {"receipt": self._receipt.path},
            )
        )

    def _write(self, record: Record) -> None:
        record["time"] = round(self._now(), 3)
        self._goodput.add(record)
        if (lost := output.problem()) != self._lost_output:
            self._lost_output = lost
            record["output"] = f"standard output is lost: {lost}"
            self._receipt.event("output", record["step"], record["output"])
        try:
            if record["kind"] == "train":
                record["goodput"] = self._goodput.share
                if record["step"] % TOTALS_EVERY == 0 or self._plan.config.run.record_interval > 1:
                    record[TOTALS] = self._goodput.totals()
                self._receipt.step(record, self._goodput)
                self._unwritten = record
            if self._unwritten is not None and (record["kind"] != "train" or self._is_recorded(record)):
                self._journal.append(self._unwritten)
                self._unwritten = None
            if record["kind"] != "train":
                self._journal.append(record)
            if record["kind"] == "end":
                self._receipt.close(record["outcome"], record["step"], record["time"])
        except MegaaccumError as error:
            self.problem = self.problem or error
            return
        if record["kind"] != "end":
            self._services.add(record)

    def _lose(self, text: str) -> None:
        """Say that a service is lost."""
        self.event("output", self._last_seen, text)
        self.note(text)

    def _end(self, outcome: str, seconds: Record) -> None:
        """Write the last record of this start and the final receipt."""
        self._write({"kind": "end", "step": self._last_seen, "outcome": outcome, **seconds})

    def _is_recorded(self, record: Record) -> bool:
        """Whether a step has a line in the journal whatever comes after it."""
        run, step = self._plan.config.run, record["step"]
        is_due = step == self._first_step or step % run.record_interval == 0
        is_saved = run.save_interval > 0 and step % run.save_interval == 0
        return is_due or is_saved or bool(record.get("note") or record.get("skipped"))

    def _is_shown(self, step: int) -> bool:
        """Whether the picture and the summary need a step that was not skipped: of a long run not every one."""
        return step in (1, self._first_step, self._last_seen) or step % (1 + self._last_seen // plots.MOST_POINTS) == 0

    def _draw(self, records: list[Record]) -> dict[str, Path | str]:
        if not any(record["kind"] == "train" for record in records):
            return {}
        path, plan = self._journal.path.with_name("loss.png"), self._plan
        try:
            length, samples = plan.batch.seq_length, plan.ramp.samples_after
            plots.draw(records, path, tokens_after=lambda step: samples(step) * length, title=_title(plan))
        except OSError as error:
            return {"picture": f"not drawn, {path} cannot be written: {error.strerror or error}"}
        return {"picture": path}


def check(config: Config) -> None:
    """Check before the run starts that output_dir can be written and that the packages of the configured services are
    installed. Imports none of them and needs no process group, so a launcher can call it before it starts a rank.
    `config` is a resolved one. Raises ConfigError with every problem at once."""
    raise_problems(missing_packages(config) + folder_problems("output_dir", config.run.output_dir))


def _read(record: Mapping[str, Any]) -> Record:
    """The record with plain numbers in place of tensors and NumPy scalars."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in record.items()}


def _title(plan: Plan) -> str:
    model, batch = plan.config.model, f"{plan.batch.global_batch_size} x {plan.batch.seq_length} tokens per step"
    return f"{model.num_layers} layers of width {model.hidden_size}, {batch}, {ranks_of(plan.layout)}"


def folder_problems(key: str, folder: str) -> list[str]:
    """Reasons why the folder that `key` names cannot be written; empty if it can. Makes the folder, and writes a byte
    to it, since a full disk still makes empty files."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"\0")
    except OSError as error:
        return [f"{key} {folder!r} cannot be written: {error.strerror or error}; set {key} to a folder that can"]
    return []
