"""Pretraining: from a plan to a trained model. `train` is the table of contents."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaaccum import sharding
from megaaccum.checkpoint import save_load
from megaaccum.checkpoint.saver import Saver
from megaaccum.data.dataset import build_datasets
from megaaccum.data.loader import MicrobatchLoader
from megaaccum.distributed import cpu, determinism, gpu, groups
from megaaccum.distributed.agreement import check_agreement, raise_on_all_ranks
from megaaccum.distributed.watchdog import Watchdog
from megaaccum.errors import LaunchError, MegaaccumError
from megaaccum.metrics.log import RunLog
from megaaccum.metrics.memory import bytes_by_kind, smallest_device
from megaaccum.metrics.traffic import bytes_by_collective
from megaaccum.model import flops, gpt
from megaaccum.planner import sync_mode
from megaaccum.precision import fp8
from megaaccum.step.train_step import TrainStep
from megaaccum.step.transaction import Transaction
from megaaccum.training import lr_schedule, optimizer
from megaaccum.training.run_folder import check_folders

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.data.dataset import Datasets
    from megaaccum.distributed.groups import Groups
    from megaaccum.step.transaction import Committed


def train(plan: Plan) -> int:
    """Run `plan` on this rank; collective over the world. Returns 0 when it ended, or stopped when told to."""
    _start_process_group(plan)
    check_agreement(plan.digest(), details=plan.facts)
    plan, notes = raise_on_all_ranks(_settled, plan, smallest_device())
    raise_on_all_ranks(check_folders, plan.config)
    places = groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
    data = raise_on_all_ranks(build_datasets, plan)
    chunks = raise_on_all_ranks(gpt.build_chunks, plan, places, vocab_size=data.vocabulary.size)
    sharded = sharding.build(plan, places, chunks, optimizer.build(plan, chunks))
    schedule = lr_schedule.build(sharded, plan.config)
    shape = save_load.shape_of(plan, data.vocabulary.size)
    low_precision = fp8.build(plan, chunks)
    buffers = dict(gpt.named_buffers(chunks)) | low_precision.tensors
    saver = Saver(plan, places, sharded, schedule, data, shape, buffers)
    step, consumed, state = saver.resume()
    log = raise_on_all_ranks(_open_log, plan, data, start_step=step)
    for note in filter(None, [*notes, gpu.describe()]):
        log.note(note)
    train_step = TrainStep(plan, places, chunks, sharded, low_precision)
    with saver, closing(_loader(plan, places, data, consumed)) as loader:
        steps = Transaction(plan, train_step, loader, schedule, step=step, last_good=saver.last_good)
        steps.load_state_dict(state)
        outcome = _loop(plan, places, train_step, loader, steps, saver, log, data)
    raise_on_all_ranks(log.close, outcome)
    _end_process_group()
    return 0


def _settled(plan: Plan, device_bytes: float | None) -> tuple[Plan, list[str]]:
    """The plan with a sync mode that fits, and, where there is a limit, why it is that one; the same on every rank.
    Raises ConfigError where none fits."""
    settled = sync_mode.settle(plan, device_bytes, layers=gpt.layers_of(plan))
    is_limited = sync_mode.limit_of(plan, device_bytes) is not None
    return settled, [note for note in settled.notes if is_limited and note not in plan.notes]


def _loop(
    plan: Plan,
    places: Groups,
    train_step: TrainStep,
    loader: MicrobatchLoader,
    steps: Transaction,
    saver: Saver,
    log: RunLog,
    data: Datasets,
) -> str:
    """Steps, evaluations and checkpoints until the last step or a signal. Returns how it ended, for the summary."""
    run, signals = plan.config.run, _Signals()
    watchdog = _watchdog(plan, train_step)
    last = run.train_iters if run.max_steps is None else min(run.train_iters, steps.step + run.max_steps)
    if steps.step >= last:
        return f"Nothing left to do after step {steps.step} of {run.train_iters}"
    if run.eval_interval and data.valid is not None and steps.step == 0:
        _evaluate(plan, places, train_step, data, log, steps.step)
    while steps.step < last:
        problem = saver.problem() or log.problem
        try:
            done = _one_step(plan, steps, loader, log, watchdog, stop=signals.received, problem=problem)
        except MegaaccumError as error:
            raise saver.saved(error, steps.step, loader.consumed_samples, steps.state_dict()) from error
        step, stops = steps.step, done.result.stop
        is_eval = run.eval_interval and done.advanced and (step % run.eval_interval == 0 or step == last)
        if is_eval and data.valid is not None:
            _evaluate(plan, places, train_step, data, log, step)
        if (done.advanced or stops) and saver.is_due(step, step == last or stops):
            log.note(f"checkpoint  {saver.save(step, loader.consumed_samples, steps.state_dict())}")
        if stops:
            return f"Stopped by a signal after step {step}"
    return "Done"


def _one_step(
    plan: Plan,
    steps: Transaction,
    loader: MicrobatchLoader,
    log: RunLog,
    watchdog: Watchdog,
    *,
    stop: bool,
    problem: MegaaccumError | None,
) -> Committed:
    """Attempt a step and record what it came to. A `problem` of this rank, or one with its data, is raised on every
    rank, before any of them begins the step."""
    with watchdog.step(steps.step + 1):
        done = steps.run(stop=stop, problem=problem)
    result = done.result
    record = {
        "step": done.step,
        "loss": result.loss,
        "lr": done.lr,
        "grad_norm": result.grad_norm,
        "num_tokens": result.num_tokens,
        "consumed_samples": loader.consumed_samples,
        "skipped": result.skipped,
        "seconds_per_step": sum(result.seconds.values()),
    }
    record |= bytes_by_collective(result.traffic) | bytes_by_kind(result.memory)
    if plan.config.sharding.fp16:
        record["loss_scale"] = result.loss_scale
    if result.sanitized:
        record["sanitized"] = result.sanitized
    _record(log.step, record)
    if result.note:
        log.note(f"step {done.step}: {result.note}{' (skipped)' if result.skipped else ''}")
    return done


def _record(write: Callable[[dict], None], record: dict) -> None:
    """Write to the log. Where that fails, on rank 0 alone, `log.problem` ends the run in front of the next step: by
    itself, rank 0 would leave the others in a collective."""
    with suppress(MegaaccumError):
        write(record)


def _watchdog(plan: Plan, train_step: TrainStep) -> Watchdog:
    run = plan.config.run
    folder = Path(run.output_dir) / "hang"
    return Watchdog(run.step_timeout_seconds, rank=int(os.environ["RANK"]), folder=folder, trace=train_step.trace)


def _evaluate(plan: Plan, places: Groups, train_step: TrainStep, data: Datasets, log: RunLog, step: int) -> None:
    """Mean loss per token over the validation samples, the same ones each time."""
    assert data.valid is not None
    total, tokens = 0.0, 0
    with closing(_loader(plan, places, data, 0, validation=True)) as loader:
        for _ in range(data.valid_batches):
            loss, count = train_step.evaluate(*loader.try_next_step(plan.batch.num_microbatches))  # type: ignore[arg-type]
            loader.commit(plan.batch.global_batch_size)
            total, tokens = total + loss * count, tokens + count
    _record(log.evaluation, {"step": step, "loss": total / max(tokens, 1)})


# --- what the run is made of -----------------------------------------------------------------------------------------


def _loader(plan: Plan, places: Groups, data: Datasets, consumed: int, *, validation: bool = False) -> MicrobatchLoader:
    dataset = data.valid if validation else data.train
    assert dataset is not None
    return MicrobatchLoader(
        dataset,
        micro_batch_size=plan.batch.micro_batch_size,
        dp_rank=places.dp.rank(),
        dp_size=places.dp.size(),
        global_batch_size=plan.batch.global_batch_size,
        consumed_samples=consumed,
        num_workers=plan.config.data.num_workers,
        vocab_size=data.vocabulary.size,
    )


def _open_log(plan: Plan, data: Datasets, *, start_step: int) -> RunLog:
    rank = int(os.environ["RANK"])
    device = torch.cuda.get_device_name() if cpu.has_accelerator() else None
    return RunLog(
        plan,
        rank=rank,
        is_writer=rank == 0,
        flops_per_step=flops.step_flops(plan.config, plan.batch, vocab_size=data.vocabulary.size),
        peak_flops=flops.peak_flops(device, plan.config.sharding.params_dtype or "fp32"),
        start_step=start_step,
    )


class _Signals:
    """Remembers SIGINT and SIGTERM, so that a run can finish its step, save and exit."""

    def __init__(self):
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame) -> None:
        self.received = True


# --- ranks -----------------------------------------------------------------------------------------------------------


def _start_process_group(plan: Plan) -> None:
    """Join the other ranks, on this rank's device; the CPU lane's stand-ins come before Megatron is imported."""
    gpu.prepare(plan)
    if not cpu.has_accelerator() and plan.config.run.num_threads:
        torch.set_num_threads(plan.config.run.num_threads)
    determinism.apply(plan)
    timeout = timedelta(minutes=plan.config.parallel.distributed_timeout_minutes)
    try:
        torch.distributed.init_process_group(cpu.backend(), timeout=timeout)
    except torch.distributed.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"the ranks cannot meet at {address} (MASTER_ADDR:MASTER_PORT): {str(error).splitlines()[0]}. Where the "
            "port is in use, give the launcher another --master_port"
        ) from error


def _end_process_group() -> None:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
