"""Pretraining: from a configuration to a trained model. `train` is the table of contents.

    megaaccum train CONFIG [--key value ...]
    python -m megaaccum.train --config CONFIG [--key value ...]

Started by hand it starts the ranks of this machine itself; started by torchrun, deepspeed or itself (RANK is set) it is
one of them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum import config as configuration
from megaaccum.errors import CheckpointError, ConfigError, LaunchError, MegaaccumError, RankDisagreement

if TYPE_CHECKING:
    import torch

    from megaaccum.boundary import Boundary
    from megaaccum.checkpoint import BackgroundSave, Progress
    from megaaccum.config import Config, Plan
    from megaaccum.data.dataset import Datasets
    from megaaccum.data.loader import MicrobatchLoader
    from megaaccum.groups import Groups
    from megaaccum.log import RunLog
    from megaaccum.lr_schedule import LrSchedule
    from megaaccum.step import Microbatch, Stepper, StepResult

_WAIT_AFTER_AN_ERROR = 5.0
"""Seconds in which a checkpoint that is being written may become whole when the run ends with an error; less than the
time that the launcher gives ranks to end."""


def main(argv: Sequence[str]) -> int:
    """Train, on this rank or on ranks that this process starts. Returns an exit code; raises MegaaccumError."""
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    argv, port = _take(argv, "--master_port")
    if "RANK" in os.environ:
        return train(_plan_of_this_rank(argv))
    return _launch(argv, configuration.load(*_config_path(argv)), int(port or 0))


def _plan_of_this_rank(argv: Sequence[str]) -> Plan:
    """The plan, on a rank that a launcher started."""
    try:
        config = configuration.load(*_config_path(argv))
        return configuration.resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        error.said_by = "one rank per host"  # they have read the same file and the same command line
        raise


def train(plan: Plan) -> int:
    """Run `plan` on this rank; collective over the world. Returns 0 when it ended, or stopped when told to."""
    from megaaccum import boundary, checkpoint, groups, lr_schedule, model, optimizer
    from megaaccum.agreement import together
    from megaaccum.data.dataset import build_datasets
    from megaaccum.step import Stepper

    _start_process_group(plan)
    together(_check_folders, plan.config)
    places = groups.build(plan.layout, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
    data = together(build_datasets, plan)
    chunks = together(model.build_chunks, plan, places, vocab_size=data.vocabulary.size)
    sharded = boundary.build(plan, places, chunks, optimizer.build(plan, chunks))
    schedule = lr_schedule.build(sharded, plan.config)
    shape = checkpoint.shape_of(plan, data.vocabulary.size)
    saver = Saver(plan, places, sharded, schedule, data, shape, dict(model.named_buffers(chunks)))
    step, consumed = saver.resume()
    log = together(_open_log, plan, data, start_step=step)
    stepper = Stepper(plan, places, chunks, sharded)
    with saver, closing(_loader(plan, places, data, consumed)) as loader:
        outcome = _loop(plan, places, stepper, loader, schedule, saver, log, data, step)
    together(log.close, outcome)
    _end_process_group()
    return 0


def _loop(
    plan: Plan,
    places: Groups,
    stepper: Stepper,
    loader: MicrobatchLoader,
    schedule: LrSchedule,
    saver: Saver,
    log: RunLog,
    data: Datasets,
    step: int,
) -> str:
    """Steps, evaluations and checkpoints until the last step or a signal. Returns how it ended, for the summary."""
    run, signals = plan.config.run, _Signals()
    last = run.train_iters if run.max_steps is None else min(run.train_iters, step + run.max_steps)
    if step >= last:
        return f"Nothing left to do after step {step} of {run.train_iters}"
    if run.eval_interval and data.valid is not None and step == 0:
        _evaluate(plan, places, stepper, data, log, step)
    while step < last:
        problem = saver.problem() or log.problem
        try:
            result = _one_step(plan, stepper, loader, schedule, log, step + 1, stop=signals.received, problem=problem)
        except MegaaccumError as error:
            raise saver.saved(error, step, loader.consumed_samples) from error
        step += 1
        ends = step == last or result.stop
        if run.eval_interval and data.valid is not None and (step % run.eval_interval == 0 or step == last):
            _evaluate(plan, places, stepper, data, log, step)
        if saver.is_due(step, ends):
            log.note(f"checkpoint  {saver.save(step, loader.consumed_samples)}")
        if result.stop:
            return f"Stopped by a signal after step {step}"
    return "Done"


def _one_step(
    plan: Plan,
    stepper: Stepper,
    loader: MicrobatchLoader,
    schedule: LrSchedule,
    log: RunLog,
    step: int,
    *,
    stop: bool,
    problem: MegaaccumError | None,
) -> StepResult:
    """Pull, step, commit, record. What commits together: weights, learning rate, consumed samples.

    A `problem` of this rank, or one with its data, is raised on every rank, before any of them begins the step.
    """
    if plan.config.run.step_timeout_seconds > 0:
        faulthandler.dump_traceback_later(plan.config.run.step_timeout_seconds, exit=True)
    microbatches, unreadable = _pull(plan, loader)
    lr = schedule.lr
    result = stepper.train(microbatches, step=step, stop=stop, problem=problem or unreadable)
    loader.commit(plan.batch.global_batch_size)
    if not result.skipped:
        schedule.step()
    faulthandler.cancel_dump_traceback_later()
    _record(
        log.step,
        {
            "step": step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "num_tokens": result.num_tokens,
            "consumed_samples": loader.consumed_samples,
            "skipped": result.skipped,
            "seconds_per_step": sum(result.seconds.values()),
        },
    )
    return result


def _record(write: Callable[[dict], None], record: dict) -> None:
    """Write to the log. Where that fails, on rank 0 alone, `log.problem` ends the run in front of the next step: by
    itself, rank 0 would leave the others in a collective."""
    with suppress(MegaaccumError):
        write(record)


def _pull(plan: Plan, loader: MicrobatchLoader) -> tuple[list[Microbatch], MegaaccumError | None]:
    """This rank's micro-batches of the step, or none and why."""
    try:
        return loader.next_step(plan.batch.num_microbatches), None  # type: ignore[return-value]
    except MegaaccumError as error:
        return [], error


def _evaluate(plan: Plan, places: Groups, stepper: Stepper, data: Datasets, log: RunLog, step: int) -> None:
    """Mean loss per token over the validation samples, the same ones each time."""
    assert data.valid is not None
    total, tokens = 0.0, 0
    with closing(_loader(plan, places, data, 0, validation=True)) as loader:
        for _ in range(data.valid_batches):
            loss, count = stepper.evaluate(*_pull(plan, loader))
            loader.commit(plan.batch.global_batch_size)
            total, tokens = total + loss * count, tokens + count
    _record(log.evaluation, {"step": step, "loss": total / max(tokens, 1)})


# --- what the run is made of -----------------------------------------------------------------------------------------


@dataclass
class Saver:
    """Checkpoints of one run: where they are, when they are due, and what is in them beside tensors.

    A context manager around the steps: at its end what is being written in the background is waited for.
    """

    plan: Plan
    places: Groups
    boundary: Boundary
    schedule: LrSchedule
    data: Datasets
    shape: dict
    buffers: dict[str, torch.Tensor]
    _writing: BackgroundSave | None = None
    _group: torch.distributed.ProcessGroup | None = None

    @property
    def folder(self) -> Path:
        return _checkpoint_folder(self.plan.config)

    def is_due(self, step: int, ends: bool) -> bool:
        """After every save_interval steps, and (save_at_end) after the last one or a signal; never with interval 0."""
        run = self.plan.config.run
        return run.save_interval > 0 and (step % run.save_interval == 0 or (ends and run.save_at_end))

    def save(self, step: int, consumed_samples: int) -> str:
        """Write a checkpoint, or (async_save) begin to, once the one before is whole. Returns what to tell the user.
        Raises CheckpointError on every rank when this one, or the one that was being written, failed."""
        from megaaccum import checkpoint

        self.finish()
        what = self._progress(step, consumed_samples)
        if not self.plan.config.run.async_save:
            return str(self._save_now(what))
        self._writing = checkpoint.BackgroundSave(
            self.folder,
            self.boundary,
            self.places,
            what,
            keep_last=self.plan.config.run.keep_last,
            buffers=self.buffers,
            group=self._background_group(),
        )
        return f"{self._writing.target} (being written)"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises CheckpointError on every rank if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def problem(self) -> MegaaccumError | None:
        """What went wrong in the background, as far as this rank knows by now."""
        return self._writing.problem() if self._writing is not None else None

    def saved(self, error: MegaaccumError, step: int, consumed_samples: int) -> MegaaccumError:
        """`error`, which ends the run behind `step`, after a checkpoint of that step where one is wanted and possible.

        It is when all ranks raise the error together, in front of the next step: then they stand alike.
        """
        everywhere = error.said_by == "rank 0" and not isinstance(error, RankDisagreement)
        if not everywhere or not self.is_due(step, ends=True):
            return error
        from megaaccum.agreement import said_once

        texts = [str(error)]
        try:
            with suppress(CheckpointError):  # that may be the error; its step is written again
                self.finish()
            path = self._save_now(self._progress(step, consumed_samples))
            texts.append(f"nothing is lost: {path} holds the {step} steps before")
        except CheckpointError as second:
            texts.append(str(second))
        return said_once(type(error)("\n".join(dict.fromkeys(texts))))

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        elif self._writing is not None:
            self._writing.wait(_WAIT_AFTER_AN_ERROR)

    def _save_now(self, what: Progress) -> Path:
        from megaaccum import checkpoint

        keep = self.plan.config.run.keep_last
        return checkpoint.save(self.folder, self.boundary, self.places, what, keep_last=keep, buffers=self.buffers)

    def _progress(self, step: int, consumed_samples: int) -> Progress:
        from megaaccum import checkpoint

        return checkpoint.Progress(
            step=step,
            consumed_samples=consumed_samples,
            lr_schedule=self.schedule.state_dict(),
            data=self.data.digest,
            shape=self.shape,
        )

    def _background_group(self) -> torch.distributed.ProcessGroup:
        from megaaccum import groups

        if self._group is None:
            self._group = groups.for_background(self.plan.config.parallel.distributed_timeout_minutes)
        return self._group

    def resume(self) -> tuple[int, int]:
        """Take up the current checkpoint of `load` (default: `save`). Returns (step, consumed samples), or (0, 0)."""
        from megaaccum import checkpoint
        from megaaccum.agreement import alike, said_once, together

        current = together(self._current)
        # Ranks that each resume from what their own host has would wait for each other for ever.
        alike("the checkpoint to resume from; hosts have to share its folder", current.name if current else "none")
        if current is None:
            return 0, 0
        progress = checkpoint.load(current, self.boundary, self.places, shape=self.shape, buffers=self.buffers)
        if progress.data != self.data.digest:
            text = (
                f"{current} was trained on other samples: data, tokenizer, seed, seq_length, train_iters or "
                "global_batch_size have changed; set them back, or start afresh with --no_load"
            )
            raise said_once(CheckpointError(text))
        self.schedule.load_state_dict(progress.lr_schedule)
        if int(os.environ["RANK"]) == 0:
            print(f"resumed from {current}: step {progress.step}, {progress.consumed_samples} samples", flush=True)
        return progress.step, progress.consumed_samples

    def _current(self) -> Path | None:
        from megaaccum import checkpoint

        run = self.plan.config.run
        if run.no_load:
            return None
        current = checkpoint.latest(run.load or self.folder)
        if current is None and run.load:
            raise CheckpointError(f"load: {run.load} holds no checkpoint (no file named latest)")
        return current


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


def _checkpoint_folder(config: Config) -> Path:
    return Path(config.run.save or Path(config.run.output_dir) / "checkpoints")


def _check_folders(config: Config) -> None:
    """Before anything takes long: logs and checkpoints can be written. Raises ConfigError."""
    from megaaccum import log

    log.check(config)
    if config.run.save_interval > 0 and (problems := log.folder_problems("save", str(_checkpoint_folder(config)))):
        raise ConfigError(problems)


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
    try:
        torch.distributed.init_process_group(cpu.backend(), timeout=timeout)
    except torch.distributed.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"the ranks cannot meet at {address} (MASTER_ADDR:MASTER_PORT): {str(error).splitlines()[0]}. Where the "
            "port is in use, give the launcher another --master_port"
        ) from error


def _end_process_group() -> None:
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _launch(argv: Sequence[str], config: Config, port: int) -> int:
    """Check the plan, then start this machine's ranks."""
    from megaaccum import launch

    nproc = config.run.nproc_per_node or launch.num_gpus() or _model_ranks(config)
    _check_folders(configuration.resolve(config, world_size=nproc).config)
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
