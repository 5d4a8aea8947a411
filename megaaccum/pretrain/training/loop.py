"""Pretraining: from a plan to a trained model. `train` is the table of contents."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaaccum.checkpoint import save_load
from megaaccum.distributed import groups as process_groups
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.distributed.start import end_process_group, start_together
from megaaccum.engine import Engine, initialize
from megaaccum.errors import MegaaccumError
from megaaccum.model import gpt
from megaaccum.model.gpt_forward import REPORTS, GptForwardStep
from megaaccum.observe.memory import bytes_by_kind, smallest_device
from megaaccum.observe.phases import between_steps, by_phase
from megaaccum.observe.traffic import bytes_by_collective
from megaaccum.pretrain.data.dataset import build_datasets
from megaaccum.pretrain.launch.watchdog import Watchdog
from megaaccum.pretrain.metrics.ranks import Ranks
from megaaccum.pretrain.training.evaluation import Texts, evaluate, loader_of
from megaaccum.pretrain.training.header import header
from megaaccum.pretrain.training.run_folder import check_folders
from megaaccum.pretrain.training.run_log import open_log
from megaaccum.pretrain.training.saver import Saver, continued

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.config.batch import BatchPlan
    from megaaccum.config.schema import RunConfig
    from megaaccum.pretrain.data.dataset import Datasets
    from megaaccum.pretrain.data.loader import Batch
    from megaaccum.pretrain.data.shared import SharedLoader
    from megaaccum.pretrain.metrics.log import RunLog
    from megaaccum.pretrain.training.advisor import Advisor
    from megaaccum.step.result import StepResult


_OF_A_COLLECTIVE = 0.9
"""Share of a collective's timeout that a first step may take: the ranks then still report, and NCCL ends none."""


def train(plan: Plan, advisor: Advisor) -> int:
    """Run `plan` on this rank; collective over the world. advisor: decides what `auto` leaves open. Returns 0
    when it ended, or stopped when asked to."""
    start_together(plan)
    plan, notes = raise_on_all_ranks(advisor.resolve, plan, smallest_device())
    raise_on_all_ranks(check_folders, plan.config)
    plan = raise_on_all_ranks(continued, plan)
    groups = process_groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
    data = raise_on_all_ranks(build_datasets, plan)
    chunks = raise_on_all_ranks(gpt.build_chunks, plan, groups, vocab_size=data.vocabulary.size)
    engine = initialize(
        plan, chunks, groups=groups, forward_step_func=GptForwardStep(groups, plan.batch.loss_norm), reports=REPORTS
    )
    engine.shape = save_load.shape_of(plan, data.vocabulary.size)
    saver = Saver(engine, data)
    saver.resume()
    data = saver.data
    log = open_log(plan, data, advisor, start_step=engine.step)
    for note in saver.notes:
        log.event("resume", engine.step, note)
    log.note(header(plan, sync=advisor.sync_mode_of(plan), vocab_size=data.vocabulary.size, start_step=engine.step))
    for note in notes:
        log.note(note)
    try:
        with saver, closing(_loader(engine, data)) as loader:
            if verified := advisor.verify_start(engine, data, loader):
                log.event("verify", engine.step, verified)
                log.note(verified)
            planned = advisor.expected_of(plan, data.vocabulary.size)
            outcome = _loop(engine, loader, saver, log, data, Ranks(plan, groups, chunks, planned))
    except BaseException as error:
        log.failed(error)
        raise
    seconds = between_steps(engine.observer.stopwatch.pop())
    raise_on_all_ranks(log.close, outcome, checkpoint=saver.written(), seconds=seconds)
    end_process_group()
    return 0


def _loop(engine: Engine, loader: SharedLoader, saver: Saver, log: RunLog, data: Datasets, ranks: Ranks) -> str:
    """Steps, evaluations and checkpoints until the last step or a signal. Returns how it ended, for the summary."""
    run, signals, started = engine.plan.config.run, _Signals(), time.monotonic()
    watchdog, stopwatch = _watchdog(engine), engine.observer.stopwatch
    texts = raise_on_all_ranks(Texts, engine, data, log)
    stopwatch.enter("between")
    last = run.train_iters if run.max_steps is None else min(run.train_iters, engine.step + run.max_steps)
    if engine.step >= last:
        return f"Nothing left to do after step {engine.step} of {run.train_iters}"
    if run.eval_interval and data.valid is not None and engine.step == 0:
        with stopwatch.during("evaluation"):
            evaluate(engine, data, log)
    while engine.step < last:
        batch = engine.batch
        with stopwatch.during("data"):
            microbatches, problem = loader.try_next_step(batch.num_microbatches)
            upcoming = _upcoming(engine, loader, last)
        problem = saver.problem() or log.problem or problem
        try:
            with watchdog.step(engine.step + 1):
                ends = signals.received or _is_time(run, engine.step + 1, started)
                result = engine.train_step(microbatches, stop=ends, problem=problem, upcoming=upcoming)
        except MegaaccumError as error:
            raise saver.saved(error) from error
        if engine.step < last and not result.stop:
            engine.gather_ahead()
        if result.advanced:
            loader.commit(batch.global_batch_size)
        log_step(log, engine, result, batch)
        for kind, text in ranks.after(result, data=loader.read_seconds, whole_batch=batch == engine.plan.batch):
            log.event(kind, result.step, text)
            log.note(f"{kind}  {text}")
        is_eval = (
            run.eval_interval and result.advanced and (engine.step % run.eval_interval == 0 or engine.step == last)
        )
        if is_eval and data.valid is not None:
            with stopwatch.during("evaluation"):
                evaluate(engine, data, log)
        if result.advanced:
            with stopwatch.during("evaluation"):
                texts.after(engine.step, is_last=engine.step == last)
        ends = engine.step == last or result.stop
        if (result.advanced or result.stop) and saver.is_due(engine.step, ends, bad=result.bad):
            with stopwatch.during("checkpoint"):
                written = saver.save()
            log.note(f"checkpoint  {written}")
        if result.stop:
            why = "a signal" if signals.received else "exit_interval or exit_duration_in_mins"
            return f"Stopped by {why} after step {engine.step}"
    return "Done"


def _upcoming(engine: Engine, loader: SharedLoader, last: int) -> list[Batch] | None:
    """The micro-batches of the step after the one to come, where it may begin early: not after the last, and not where
    an evaluation, a text or a checkpoint comes between. Those of too short a rest of the data are none."""
    run, step, size = engine.plan.config.run, engine.step + 1, engine.batch.num_microbatches
    between = (run.eval_interval, run.save_interval, run.sample_every, run.core_metric_every)
    if not engine.plan.config.step.speculative_step or step >= last or any(n and step % n == 0 for n in between):
        return None
    return loader.try_next_step(size, after=size)[0]


def _is_time(run: RunConfig, step: int, started: float) -> bool:
    """Whether this start ends with `step`, by exit_interval or exit_duration_in_mins, as far as this rank knows."""
    minutes = (time.monotonic() - started) / 60
    return bool(run.exit_interval and step % run.exit_interval == 0) or (
        run.exit_duration_in_mins is not None and minutes > run.exit_duration_in_mins
    )


def log_step(log: RunLog, engine: Engine, result: StepResult, batch: BatchPlan) -> None:
    """Record what a step on `batch` came to."""
    record: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "num_tokens": result.num_tokens,
        "consumed_samples": engine.consumed_samples,
        "global_batch_size": batch.global_batch_size,
        "skipped": result.skipped,
    }
    record |= by_phase(result.seconds)
    record |= bytes_by_collective(result.traffic) | bytes_by_kind(result.memory)
    if engine.plan.config.sharding.fp16:
        record["loss_scale"] = result.loss_scale
    if result.sanitized:
        record["sanitized"] = result.sanitized
    if result.note:
        record["note"] = result.note
    with suppress(MegaaccumError):  # on rank 0 alone; log.problem ends the run before the next step, on every rank
        log.step(record)
    log.step_note(result.step, f"{result.note}{' (skipped)' if result.skipped else ''}" if result.note else "")


def _watchdog(engine: Engine) -> Watchdog:
    run, minutes = engine.plan.config.run, engine.plan.config.parallel.distributed_timeout_minutes
    return Watchdog(
        run.step_timeout_seconds,
        rank=int(os.environ["RANK"]),
        folder=Path(run.output_dir) / "hang",
        trace=engine.trace,
        first_limit=_OF_A_COLLECTIVE * minutes * 60,
    )


# --- what the run is made of -----------------------------------------------------------------------------------------


def _loader(engine: Engine, data: Datasets) -> SharedLoader:
    return loader_of(engine, data.train, data, consumed_samples=engine.consumed_samples)


class _Signals:
    """Remembers SIGINT and SIGTERM, so that a run can finish its step, save and exit."""

    def __init__(self):
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame) -> None:
        self.received = True
