"""The objects of a run on this rank, and everything that the training loop does beside its steps."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from megaaccum.checkpoint import save_load
from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.distributed import groups as process_groups
from megaaccum.distributed.agreement import assert_same_on_ranks, gathered, raise_on_all_ranks
from megaaccum.distributed.start import end_process_group, start_together
from megaaccum.engine import Engine, initialize
from megaaccum.errors import MegaaccumError
from megaaccum.platform import cpu
from megaaccum.pretrain.data.dataset import Datasets, build_datasets
from megaaccum.pretrain.data.loader import Batch
from megaaccum.pretrain.data.shared import SharedLoader
from megaaccum.pretrain.launch.watchdog import Watchdog
from megaaccum.pretrain.metrics import flops, receipts
from megaaccum.pretrain.metrics.expected import Expected
from megaaccum.pretrain.metrics.progress import last_step
from megaaccum.pretrain.metrics.ranks import Ranks
from megaaccum.pretrain.metrics.run_log import RunLog
from megaaccum.pretrain.metrics.step_record import between_steps, by_phase, bytes_by_collective, bytes_by_kind
from megaaccum.pretrain.model import gpt
from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
from megaaccum.pretrain.training.evaluation import Texts, evaluate, loader_of
from megaaccum.pretrain.training.header import header
from megaaccum.pretrain.training.run_folder import check_folders, claim_folders
from megaaccum.pretrain.training.saver import Saver, continued
from megaaccum.pretrain.training.stop_signals import StopSignals
from megaaccum.pretrain.weights import foreign
from megaaccum.step.result import StepResult

_SHARE_OF_TIMEOUT = 0.9
"""Share of a collective's timeout that a first step may take: ranks then report before NCCL ends them."""


class Advisor(Protocol):
    """Decisions and predictions for a run, of the planner and verification, which the training loop does not import:
    `megaaccum train` passes `megaaccum.lab.advisor`. vocab: entries of the
    vocabulary before padding."""

    def resolve(self, plan: Plan, device_bytes: float | None) -> tuple[Plan, list[str]]:
        """Choose a schedule (`auto`), micro-batch and sync mode that fit. Returns the plan and the notes of
        `megaaccum check` on it, the same on every rank. Raises ConfigError if nothing fits."""

    def sync_mode_of(self, plan: Plan) -> str:
        """The sharding mode of a plan, as text."""

    def expected_of(self, plan: Plan, vocab: int) -> list[Expected]:
        """The bytes that ranks move and hold, by pipeline rank; empty if the schedule is not known."""

    def predicted(self, plan: Plan, vocab: int, *, device: str | None, device_bytes: float | None) -> dict[str, Any]:
        """The prediction in the form of a receipt. device: its name, None for a CPU."""

    def verify_start(self, engine: Engine, data: Datasets, loader: SharedLoader) -> str | None:
        """Verify the next step of a run if that is due, and return a line for the log. Collective over the world.
        Raises StepError on every rank if the gradient depends on how its samples are split."""


class TrainingRun:
    """The objects of a run: engine, data, saver, log and, once it is open, the loader. Built on every rank.

    outcome: how the run ended, for its summary.
    """

    loader: SharedLoader

    def __init__(self, plan: Plan, advisor: Advisor):
        """Build model, data and log of `plan`, and load the checkpoint that it continues from. Collective over the
        world; raises on every rank."""
        self._launched = receipts.launched() - time.time() + time.monotonic()  # a clock that jumps later ends no run
        start_together(plan)
        plan, notes = raise_on_all_ranks(advisor.resolve, plan, _smallest_device())
        raise_on_all_ranks(check_folders, plan.config)
        raise_on_all_ranks(claim_folders, plan.config)
        self.plan = plan = raise_on_all_ranks(continued, plan)
        groups = process_groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
        data = raise_on_all_ranks(build_datasets, plan)
        facts = data.facts | {"batches of validation": str(data.valid_batches), "digest": data.digest}
        assert_same_on_ranks("the data of their hosts", ", ".join(map(" ".join, facts.items())))
        vocab = data.vocabulary.size
        chunks = raise_on_all_ranks(gpt.build_chunks, plan, groups, vocab_size=vocab)
        forward_step = GptForwardStep(groups, plan.batch.loss_norm)
        self.engine = initialize(plan, chunks, groups=groups, forward_step_func=forward_step, reports=REPORTS)
        self.engine.shape = save_load.shape_of(plan, vocab)
        self.saver = Saver(self.engine, data)
        self.saver.resume()
        self.data, step = self.saver.data, self.engine.step
        if step == 0 and plan.config.run.init_from is not None:
            foreign.load(self.engine, Path(plan.config.run.init_from), vocab_size=vocab)
            self.engine.print(f"weights of {plan.config.run.init_from}")
        self.log = open_log(plan, self.data, advisor, start_step=step)
        for note in self.saver.notes:
            self.log.event("resume", step, note)
        self.log.note(header(plan, sync=advisor.sync_mode_of(plan), vocab_size=vocab, start_step=step))
        for note in [self.data.facts["data"]] * plan.config.data.sft + notes:
            self.log.note(note)
        self.watchdog = watchdog_of(self.engine)
        run = plan.config.run
        self.last_step = last_step(run, step)
        self.outcome = "Done" if step < self.last_step else f"Nothing left to do after step {step} of {run.train_iters}"

    @contextmanager
    def open(self) -> Iterator[SharedLoader]:
        """Context around the steps: opens the loader of training samples, and at the end waits for a checkpoint that is
        still being written. Records an error in the log."""
        try:
            samples = loader_of(self.engine, self.data.train, self.data, consumed_samples=self.engine.consumed_samples)
            with self.saver, closing(samples) as self.loader:
                yield self.loader
        except BaseException as error:
            self.log.failed(error)
            raise

    def begin(self, advisor: Advisor) -> None:
        """Verify the first step if that is due, and evaluate the untrained model. Collective over the world."""
        if verified := advisor.verify_start(self.engine, self.data, self.loader):
            self.log.event("verify", self.engine.step, verified)
            self.log.note(verified)
        planned = advisor.expected_of(self.plan, self.data.vocabulary.size)
        self._ranks = Ranks(self.plan, self.engine.groups, self.engine.chunks, planned)
        self._signals = StopSignals()
        self._texts = raise_on_all_ranks(Texts, self.engine, self.data, self.log)
        self._stopwatch = self.engine.observer.stopwatch
        self._stopwatch.enter("between")
        if self.engine.step == 0:
            self._evaluate()

    # --- a step ---

    def read(self, count: int) -> tuple[list[Batch], list[Batch] | None, MegaaccumError | None]:
        """(this rank's `count` micro-batches of the next step, those of the step after it if it may begin early, why
        this rank cannot take the step)."""
        with self._stopwatch.during("data"):
            microbatches, problem = self.loader.try_next_step(count)
            upcoming = self._upcoming(count)
        return microbatches, upcoming, self.saver.problem() or self.log.problem or problem

    def _upcoming(self, count: int) -> list[Batch] | None:
        """The micro-batches of the step after the next; None without `speculative_step`, after the last step, and if an
        evaluation, a text or a checkpoint comes between."""
        run, step = self.plan.config.run, self.engine.step + 1
        breaks = (run.eval_interval, run.save_interval, run.exit_interval, run.sample_every, run.text_comparisons_every)
        speculates = self.plan.config.step.speculative_step and step < self.last_step
        if not speculates or any(interval and step % interval == 0 for interval in breaks):
            return None
        return self.loader.try_next_step(count, after=count)[0]

    def is_to_stop(self) -> bool:
        """Whether this rank asks to stop after the next step: a signal or exit_duration_in_mins."""
        return self._signals.received or self._is_overdue()

    def is_at_exit(self) -> bool:
        """Whether exit_interval ends the run after the step just taken."""
        return self.engine.step % (self.plan.config.run.exit_interval or math.inf) == 0

    def why_stopped(self) -> str:
        """The outcome of a run that stopped before its last step. Another rank may have had the signal."""
        at_limit = (self.is_at_exit() or self._is_overdue()) and not self._signals.received
        why = "exit_interval or exit_duration_in_mins" if at_limit else "a signal"
        return f"Stopped by {why} after step {self.engine.step}"

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._launched > 60 * (self.plan.config.run.exit_duration_in_mins or math.inf)

    def report(self, result: StepResult, batch: BatchPlan) -> None:
        """Log a step on `batch`, and every few steps compare ranks with each other and the plan. Collective."""
        log_step(self.log, self.engine, result, batch)
        found = self._ranks.after(result, data=self.loader.read_seconds, whole_batch=batch == self.engine.plan.batch)
        for kind, text in found:
            self.log.event(kind, result.step, text)
            self.log.note(f"{kind}  {text}")

    def evaluate(self, result: StepResult) -> None:
        """Compute validation loss, text comparisons and a sample, each if it is due after `result`. Collective."""
        if not result.advanced:
            return
        step, interval = self.engine.step, self.plan.config.run.eval_interval
        if interval and (step % interval == 0 or step == self.last_step):
            self._evaluate()
        with self._stopwatch.during("evaluation"):
            self._texts.after(step, is_last=step == self.last_step)

    def _evaluate(self) -> None:
        if self.plan.config.run.eval_interval and self.data.valid is not None:
            with self._stopwatch.during("evaluation"):
                evaluate(self.engine, self.data, self.log)

    def save(self, result: StepResult) -> None:
        """Write a checkpoint if one is due after `result`. Collective; raises CheckpointError on every rank."""
        ends = self.engine.step == self.last_step or result.stop
        if (result.advanced or result.stop) and self.saver.is_due(self.engine.step, ends, bad=result.bad):
            with self._stopwatch.during("checkpoint"):
                self.log.note(f"checkpoint  {self.saver.save()}")

    def close(self) -> None:
        """Write the summary and leave the process groups. Collective over the world; raises on every rank."""
        seconds = between_steps(self._stopwatch.pop())
        raise_on_all_ranks(lambda: self.log.close(self.outcome, checkpoint=self.saver.written(), seconds=seconds))
        end_process_group()


def _smallest_device() -> float | None:
    """Free bytes on the device of the rank with the fewest; None on CPUs. Collective over the world."""
    if not cpu.has_accelerator():
        return None
    free = torch.tensor(torch.cuda.mem_get_info()[0], dtype=torch.int64, device=cpu.device())
    torch.distributed.all_reduce(free, op=torch.distributed.ReduceOp.MIN)
    return float(free)


def open_log(plan: Plan, data: Datasets, advisor: Advisor, *, start_step: int) -> RunLog:
    """The log of a run of `plan` that continues after `start_step`; rank 0 writes. Collective over the world. Raises on
    every rank what `RunLog` raises."""
    ranks = gathered(receipts.this_rank(_device_name(), _device_bytes()))
    return raise_on_all_ranks(_open, plan, data, advisor, start_step, ranks)


def _open(plan: Plan, data: Datasets, advisor: Advisor, start_step: int, ranks: list[Any]) -> RunLog:
    vocab, opening, config, sequences = data.vocabulary.size, None, plan.config, plan.batch.global_batch_size
    if is_writer := int(os.environ["RANK"]) == 0:
        predicted = advisor.predicted(plan, vocab, device=_device_name(), device_bytes=_device_bytes())
        opening = receipts.opening(
            plan, data_digest=data.digest, vocab_size=vocab, ranks=ranks, predicted=predicted, start_step=start_step
        )
    return RunLog(
        plan,
        is_writer=is_writer,
        flops_per_step=None if flops.uncounted(config) else flops.step_flops(config, sequences, vocab_size=vocab),
        peak_flops=flops.peak_flops(_device_name(), config.sharding.params_dtype or "fp32"),
        start_step=start_step,
        opening=opening,
    )


def _device_name() -> str | None:
    return torch.cuda.get_device_name() if cpu.has_accelerator() else None


def _device_bytes() -> float | None:
    return torch.cuda.get_device_properties(cpu.device()).total_memory if cpu.has_accelerator() else None


def watchdog_of(engine: Engine) -> Watchdog:
    """The limit on this rank's steps, by step_timeout_seconds."""
    run, minutes = engine.plan.config.run, engine.plan.config.parallel.distributed_timeout_minutes
    return Watchdog(
        run.step_timeout_seconds,
        rank=int(os.environ["RANK"]),
        folder=Path(run.output_dir) / "hang",
        trace=engine.observer.trace,
        first_limit=_SHARE_OF_TIMEOUT * minutes * 60,
    )


def log_step(log: RunLog, engine: Engine, result: StepResult, batch: BatchPlan) -> None:
    """Record the outcome of a step on `batch`."""
    named = ("loss", "lr", "grad_norm", "num_tokens", "skipped")
    record: dict[str, Any] = {"step": result.step} | result.reports | {name: getattr(result, name) for name in named}
    record |= {"consumed_samples": engine.consumed_samples, "global_batch_size": batch.global_batch_size}
    record |= by_phase(result.seconds) | bytes_by_collective(result.traffic) | bytes_by_kind(result.memory)
    if result.expert_loads is not None:
        record |= result.expert_loads.record()
    if engine.plan.config.sharding.fp16:
        record["loss_scale"] = result.loss_scale
    record |= {name: value for name in ("sanitized", "note") if (value := getattr(result, name))}
    log.step(record)
    log.step_note(result.step, f"{result.note}{' (skipped)' if result.skipped else ''}" if result.note else "")
