"""Pretraining: from a configuration to a trained model. `train` is the table of contents.

    megaaccum train CONFIG [--key value ...]
    python -m megaaccum.train --config CONFIG [--key value ...]

Started by hand it starts the ranks of this machine itself; started by torchrun, deepspeed or itself (RANK is set) it is
one of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum import config as configuration
from megaaccum.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megaaccum.boundary import Boundary
    from megaaccum.config import Config, Plan
    from megaaccum.data.dataset import Datasets
    from megaaccum.data.loader import MicrobatchLoader
    from megaaccum.groups import Groups
    from megaaccum.log import RunLog
    from megaaccum.lr_schedule import LrSchedule
    from megaaccum.step import Stepper
    from megaaccum.transaction import Committed, StepTransaction
    from megaaccum.watchdog import Watchdog


def main(argv: Sequence[str]) -> int:
    """Train, on this rank or on ranks that this process starts. Returns an exit code; raises MegaaccumError."""
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    argv, port = _take(argv, "--master_port")
    path, overrides = _config_path(argv)
    config = configuration.load(path, overrides)
    if "RANK" in os.environ:
        return train(configuration.resolve(config, world_size=int(os.environ["WORLD_SIZE"])))
    return _launch(argv, config, int(port or 0))


def train(plan: Plan) -> int:
    """Run `plan` on this rank; collective over the world. Returns 0 when it ended, or stopped when told to."""
    from megaaccum import agreement, boundary, checkpoint, groups, lr_schedule, model, optimizer
    from megaaccum.data.dataset import build_datasets
    from megaaccum.step import Stepper
    from megaaccum.transaction import StepTransaction

    _refuse_what_is_not_there_yet(plan)
    _start_process_group(plan)
    agreement.agree(plan.digest(), details=plan.facts)
    places = groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
    data = build_datasets(plan)
    chunks = model.build_chunks(plan, places, vocab_size=data.vocabulary.size)
    sharded = boundary.build(plan, places, chunks, optimizer.build(plan, chunks))
    schedule = lr_schedule.build(sharded, plan.config)
    saver = Saver(plan, places, sharded, schedule, data, checkpoint.shape_of(plan, data.vocabulary.size))
    step, consumed, state = saver.resume()
    log = _open_log(plan, data, start_step=step)
    stepper = Stepper(plan, places, chunks, sharded)
    with closing(_loader(plan, places, data, consumed)) as loader:
        steps = StepTransaction(plan, stepper, loader, schedule, step=step, last_good=saver.last_good)
        steps.load_state_dict(state)
        outcome = _loop(plan, places, stepper, loader, steps, saver, log, data)
    log.close(outcome)
    _end_process_group()
    return 0


def _loop(
    plan: Plan,
    places: Groups,
    stepper: Stepper,
    loader: MicrobatchLoader,
    steps: StepTransaction,
    saver: Saver,
    log: RunLog,
    data: Datasets,
) -> str:
    """Steps, evaluations and checkpoints until the last step or a signal. Returns how it ended, for the summary."""
    run, signals = plan.config.run, _Signals()
    watchdog = _watchdog(plan, stepper)
    last = run.train_iters if run.max_steps is None else min(run.train_iters, steps.step + run.max_steps)
    if steps.step >= last:
        return f"Nothing left to do after step {steps.step} of {run.train_iters}"
    if run.eval_interval and data.valid is not None and steps.step == 0:
        _evaluate(plan, places, stepper, data, log, steps.step)
    while steps.step < last:
        done = _one_step(plan, steps, loader, log, watchdog, stop=signals.received)
        step, stops = steps.step, done.result.stop
        is_eval = run.eval_interval and done.advanced and (step % run.eval_interval == 0 or step == last)
        if is_eval and data.valid is not None:
            _evaluate(plan, places, stepper, data, log, step)
        if (done.advanced or stops) and saver.is_due(step, step == last or stops):
            log.note(f"checkpoint  {saver.save(step, loader.consumed_samples, steps.state_dict())}")
        if stops:
            return f"Stopped by a signal after step {step}"
    return "Done"


def _one_step(
    plan: Plan, steps: StepTransaction, loader: MicrobatchLoader, log: RunLog, watchdog: Watchdog, *, stop: bool
) -> Committed:
    """Attempt a step and record what it came to."""
    with watchdog.step(steps.step + 1):
        done = steps.run(stop=stop)
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
    if plan.config.sharding.fp16:
        record["loss_scale"] = result.loss_scale
    if result.sanitized:
        record["sanitized"] = result.sanitized
    log.step(record)
    if result.note:
        log.note(f"step {done.step}: {result.note}{' (skipped)' if result.skipped else ''}")
    return done


def _watchdog(plan: Plan, stepper: Stepper) -> Watchdog:
    from megaaccum.watchdog import Watchdog

    run = plan.config.run
    folder = Path(run.output_dir) / "hang"
    return Watchdog(run.step_timeout_seconds, rank=int(os.environ["RANK"]), folder=folder, trace=stepper.trace)


def _evaluate(plan: Plan, places: Groups, stepper: Stepper, data: Datasets, log: RunLog, step: int) -> None:
    """Mean loss per token over the validation samples, the same ones each time."""
    assert data.valid is not None
    total, tokens = 0.0, 0
    with closing(_loader(plan, places, data, 0, validation=True)) as loader:
        for _ in range(data.valid_batches):
            loss, count = stepper.evaluate(loader.next_step(plan.batch.num_microbatches))  # type: ignore[arg-type]
            loader.commit(plan.batch.global_batch_size)
            total, tokens = total + loss * count, tokens + count
    log.evaluation({"step": step, "loss": total / max(tokens, 1)})


# --- what the run is made of -----------------------------------------------------------------------------------------


@dataclass
class Saver:
    """Checkpoints of one run: where they are, when they are due, and what is in them beside tensors."""

    plan: Plan
    places: Groups
    boundary: Boundary
    schedule: LrSchedule
    data: Datasets
    shape: dict

    @property
    def folder(self) -> Path:
        run = self.plan.config.run
        return Path(run.save or Path(run.output_dir) / "checkpoints")

    def is_due(self, step: int, ends: bool) -> bool:
        """After every save_interval steps, and (save_at_end) after the last one or a signal; never with interval 0."""
        run = self.plan.config.run
        return run.save_interval > 0 and (step % run.save_interval == 0 or (ends and run.save_at_end))

    def last_good(self) -> str:
        """Which checkpoint a run that ends now goes on from, in words; the same on every rank."""
        from megaaccum import checkpoint

        current = checkpoint.latest(self.folder)
        return f"The last good checkpoint is {current}." if current else "There is no checkpoint of this run."

    def save(self, step: int, consumed_samples: int, transaction: dict) -> Path:
        from megaaccum import checkpoint

        progress = checkpoint.Progress(
            step=step,
            consumed_samples=consumed_samples,
            lr_schedule=self.schedule.state_dict(),
            data=self.data.digest,
            shape=self.shape,
            transaction=transaction,
        )
        keep = self.plan.config.run.keep_last
        return checkpoint.save(self.folder, self.boundary, self.places, progress, keep_last=keep)

    def resume(self) -> tuple[int, int, dict]:
        """Take up the current checkpoint of `load` (default: `save`). Returns (step, consumed samples, state of the
        transaction), or (0, 0, {})."""
        from megaaccum import checkpoint

        run = self.plan.config.run
        if run.no_load:
            return 0, 0, {}
        current = checkpoint.latest(run.load or self.folder)
        if current is None:
            if run.load:
                raise CheckpointError(f"load: {run.load} holds no checkpoint (no file named latest)")
            return 0, 0, {}
        progress = checkpoint.load(current, self.boundary, self.places, shape=self.shape)
        if progress.data != self.data.digest:
            raise CheckpointError(
                f"{current} was trained on other samples: data, tokenizer, seed, seq_length, train_iters or "
                "global_batch_size have changed; set them back, or start afresh with --no_load"
            )
        self.schedule.load_state_dict(progress.lr_schedule)
        if int(os.environ["RANK"]) == 0:
            print(f"resumed from {current}: step {progress.step}, {progress.consumed_samples} samples", flush=True)
        return progress.step, progress.consumed_samples, progress.transaction


def _loader(plan: Plan, places: Groups, data: Datasets, consumed: int, *, validation: bool = False) -> MicrobatchLoader:
    from megaaccum.data.loader import MicrobatchLoader

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
    import torch

    from megaaccum import cpu, flops
    from megaaccum.log import RunLog

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
        import signal

        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame) -> None:
        self.received = True


def _refuse_what_is_not_there_yet(plan: Plan) -> None:
    if plan.config.run.async_save:
        raise ConfigError("async_save: checkpoints are written by the step that is due; set async_save to false")


# --- ranks -----------------------------------------------------------------------------------------------------------


def _start_process_group(plan: Plan) -> None:
    """Join the other ranks, on this rank's device; the CPU lane's stand-ins come before Megatron is imported."""
    from megaaccum import preload

    preload.libraries()
    import torch

    from megaaccum import cpu

    if cpu.has_accelerator():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif plan.config.run.num_threads:
        torch.set_num_threads(plan.config.run.num_threads)
    timeout = timedelta(minutes=plan.config.parallel.distributed_timeout_minutes)
    torch.distributed.init_process_group(cpu.backend(), timeout=timeout)


def _end_process_group() -> None:
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _launch(argv: Sequence[str], config: Config, port: int) -> int:
    """Check the plan, then start this machine's ranks."""
    from megaaccum import launch

    nproc = config.run.nproc_per_node or launch.num_gpus() or _model_ranks(config)
    configuration.resolve(config, world_size=nproc)
    return launch.launch_local(list(argv), nproc=nproc, num_threads=config.run.num_threads, master_port=port)


def _model_ranks(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size


def _config_path(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file, as first argument or behind --config, and the overrides."""
    rest, path = _take(argv, "--config")
    if path is None and rest and not rest[0].startswith("-"):
        return rest[0], rest[1:]
    return path, rest


def _take(argv: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """`argv` without `flag VALUE` or `flag=VALUE`, and the value."""
    rest, value, words = [], None, iter(argv)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{flag} needs a value")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return rest, value


if __name__ == "__main__":
    from megaaccum.cli import main as cli_main

    sys.exit(cli_main(["train", *sys.argv[1:]]))
