"""Whole training runs of a tiny model, started as a user starts them, in a process that has the libraries imported."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from megaaccum.lab.verification.testing import Outcome, ranks, try_ranks
from megaaccum.pretrain.metrics import journal
from tests.support.data_samples import counting_pair

VOCAB = 2000
SMALL = (
    "--num_layers 2 --hidden_size 16 --num_attention_heads 2 --seq_length 16 --train_iters 8 --lr 1e-2 "
    "--pipeline_model_parallel_size 2 --nproc_per_node 2 --num_threads 1 --micro_batch_size 1 --pp_microbatches 4 "
    f"--attention_dropout 0.1 --hidden_dropout 0 --eval_interval 0 --log_interval 1 --save_interval 2 "
    f"--vocab_size {VOCAB} --split 100,0,0"
)
LAUNCHER = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE".split()


@dataclass(frozen=True)
class Ended:
    """Exit code of a run, and all that it wrote to the terminal."""

    code: int
    output: str

    def errors(self) -> list[str]:
        """The lines in which megaaccum speaks of what went wrong."""
        return [line for line in self.output.splitlines() if line.startswith("megaaccum: ")]


def make_data(folder: Path) -> Path:
    """The pair on which runs train, and its prefix."""
    return counting_pair(folder / "corpus", num_documents=VOCAB // 40)


def flags(folder: Path, **more: object) -> list[str]:
    """The command line of a run that reads `folder`/corpus and writes to `folder`/run, changed by `more`."""
    words = SMALL.split()
    options: dict[str, object] = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    options |= {"data_path": folder / "corpus", "output_dir": folder / "run", "data_cache_path": folder / "cache"}
    return [word for name, value in (options | more).items() for word in (f"--{name}", str(value))]


def train(
    folder: Path, *, worker: str = "", max_bytes: int = 0, env: dict[str, str] | None = None, **more: object
) -> Ended:
    """`megaaccum train`. worker: a function of this file that every rank calls in place of cli.train.main.
    max_bytes: no file may grow beyond it, for any rank."""
    return started(flags(folder, **more), worker, max_bytes, env)


def started(
    argv: list[str], worker: str = "", max_bytes: int = 0, env: dict[str, str] | None = None, timeout: float = 100
) -> Ended:
    """`megaaccum train` with this command line; the rest as for `train`."""
    return _ended(*try_ranks(_train, 1, argv, worker, max_bytes, init=False, timeout=timeout, env=env))


def command(module: str, *argv: str) -> Ended:
    """`main` of a module that starts ranks for itself. It runs in a process that has the libraries imported, and so do
    its ranks, which are forks of that: a fresh interpreter takes six core seconds to have one that forks them."""
    return _ended(*try_ranks(_command, 1, module, argv, init=False, timeout=300))


def _ended(rank: Outcome) -> Ended:
    assert not rank.failed, f"{rank.error}\n{rank.stack}\n{rank.output}"
    output, _, code = rank.output.rpartition("exit code ")
    return Ended(int(code), output)


def _command(module: str, argv: tuple[str, ...]) -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    ranks.server = lambda hide_gpus: multiprocessing.get_context("fork")
    print("exit code", importlib.import_module(module).main(list(argv)), flush=True)


def _train(argv: list[str], worker: str, max_bytes: int) -> None:
    from megaaccum import cli
    from megaaccum.pretrain.launch import local

    for name in LAUNCHER:  # the harness has made this process a rank; a user's terminal is none
        os.environ.pop(name, None)
    if worker:
        local.launch_local.__kwdefaults__.update(worker=f"{__name__}:{worker}")
        local.GRACE_SECONDS = 1.0
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))
    kept, stdout = os.dup(1), sys.stdout
    _spoil_stdout(os.environ.get(STDOUT, ""))
    code = cli.main(["train", *argv])
    os.dup2(kept, 1)
    sys.stdout = stdout
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("exit code", code, flush=True)


STDOUT = "TEST_STDOUT"


def _spoil_stdout(how: str) -> None:
    """Give this process a standard output that is `dead` (a pipe without a reader), `full` (a disk), or `closed`."""
    if how == "dead":
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    elif how == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif how == "closed":
        os.close(1)
        sys.stdout = None  # as Python starts without one


def run_bounded(command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `command`, both output streams in one; after `timeout` seconds end it and the ranks that it started."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        raise AssertionError(f"not done after {timeout:g} s:\n{process.communicate()[0]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _end(process: subprocess.Popen[str]) -> None:
    """SIGKILL to `process` and everything below it; launchers put ranks into sessions of their own."""
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += [int(child) for child in children]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """A TCP port of the loopback address without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def config_file(folder: Path) -> Path:
    """The run of `flags` as a file, for launchers that are given one; without the key that says where it writes."""
    words = flags(folder)
    keys = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    del keys["output_dir"]
    path = folder / "config.yaml"
    path.write_text("".join(f"{key}: {value!r}\n" for key, value in keys.items()))
    return path


def losses(folder: Path) -> list[float]:
    """Training losses of the run, step by step."""
    records = journal.read(folder / "run" / "log.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


# --- what a rank runs in place of cli.train.main ---------------------------------------------------------------------


def dies_before_the_ranks_meet(argv: list[str]) -> int:
    from megaaccum.cli import train
    from megaaccum.pretrain.training import training_run

    start = training_run.start_together
    training_run.start_together = lambda plan: _die_on_rank_1() or start(plan)
    return train.main(argv)


def builds_no_model(argv: list[str]) -> int:
    """Memory would be allocated where it is not to be."""
    from megaaccum.cli import train
    from megaaccum.pretrain.model import gpt

    gpt.build_chunks = lambda *args, **kwargs: os._exit(99)
    return train.main(argv)


def dies_after_three_steps(argv: list[str]) -> int:
    """Rank 1 is killed when the log has step 3."""
    from megaaccum.cli import train
    from megaaccum.pretrain.training import training_run

    log_step = training_run.log_step

    def and_die(log, engine, *args):
        log_step(log, engine, *args)
        if engine.step == 3:
            _die_on_rank_1()

    training_run.log_step = and_die
    return train.main(argv)


def takes_its_time(argv: list[str]) -> int:
    """Each step takes a second longer: the run outlasts the wait of another start for its folder."""
    from megaaccum.cli import train
    from megaaccum.pretrain.training import training_run

    log_step = training_run.log_step
    training_run.log_step = lambda *args: (time.sleep(1), log_step(*args))[1]
    return train.main(argv)


def is_hung_up_in_step_3(argv: list[str]) -> int:
    """The launcher gets SIGHUP twice while rank 0 is in step 3, as from a terminal that closes."""
    from megaaccum.cli import train
    from megaaccum.pretrain.training import training_run

    log_step = training_run.log_step

    def and_hang_up(log, engine, *args):
        if engine.step == 3 and os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGHUP)
            os.kill(os.getppid(), signal.SIGHUP)
            time.sleep(0.5)
        log_step(log, engine, *args)

    training_run.log_step = and_hang_up
    return train.main(argv)


def is_stopped_in_step_5(argv: list[str]) -> int:
    """The launcher gets SIGTERM when the log has step 5."""
    from megaaccum.cli import train
    from megaaccum.pretrain.training import training_run

    log_step = training_run.log_step

    def and_stop(log, engine, *args):
        log_step(log, engine, *args)
        if engine.step == 5 and os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)

    training_run.log_step = and_stop
    return train.main(argv)


def dies_while_groups_are_built(argv: list[str]) -> int:
    from megaaccum.cli import train
    from megaaccum.distributed import groups

    build = groups.build
    groups.build = lambda *args, **kwargs: _die_on_rank_1() or build(*args, **kwargs)
    return train.main(argv)


def _die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def is_told_to_stop_while_it_writes(argv: list[str]) -> int:
    """The run gets SIGTERM right after the checkpoint of step 2 was begun, and writing takes a second longer."""
    import torch.distributed.checkpoint as dcp

    from megaaccum.cli import train
    from megaaccum.pretrain.training.background_save import BackgroundSave

    write, begin = dcp.FileSystemWriter.write_data, BackgroundSave.__init__

    def slowly(*args):
        time.sleep(1)
        return write(*args)

    def and_stop(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if os.environ["RANK"] == "0" and self.target.name == "step_0000002":
            os.kill(os.getppid(), signal.SIGTERM)

    dcp.FileSystemWriter.write_data, BackgroundSave.__init__ = slowly, and_stop
    return train.main(argv)


def fails_to_write_once(argv: list[str]) -> int:
    """Rank 1's first write of the checkpoint that TEST_FAILS names takes its time, and fails."""
    import torch.distributed.checkpoint as dcp

    from megaaccum.cli import train

    write, failing = dcp.FileSystemWriter.write_data, [os.environ["TEST_FAILS"]] * (os.environ["RANK"] == "1")

    def once(self, *args):
        if failing and str(self.path).endswith(f"{failing[0]}.tmp"):
            failing.clear()
            time.sleep(3)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    dcp.FileSystemWriter.write_data = once
    return train.main(argv)


LAUNCH, START_UP, READ, FORWARD, SAVE, EVALUATE = 1000.0, 30.0, 1.0, 3.0, 5.0, 2.0
"""Seconds of `reads_slowly`: the first launch, the time to the log's opening, a sample, a micro-batch's forward on a
stage, a checkpoint, a micro-batch's forward in an evaluation."""


def reads_slowly(argv: list[str]) -> int:
    """Time passes in reading, computing, saving and starting, and nowhere else: each rank has a clock of its own."""
    from megaaccum.cli import train
    from megaaccum.observe import observer
    from megaaccum.pretrain.data import loader
    from megaaccum.pretrain.metrics import receipts, run_log
    from megaaccum.pretrain.model import gpt_forward
    from megaaccum.pretrain.training import saver

    started = float(os.environ.get("TEST_LAUNCHED", LAUNCH))
    os.environ[receipts.LAUNCHED] = str(started)
    clock = [started + START_UP]

    def slowed(function, seconds):
        def slow(*args, **kwargs):
            clock[0] += seconds
            return function(*args, **kwargs)

        return slow

    observer.Stopwatch.__init__.__defaults__ = (lambda: clock[0],)
    run_log.RunLog.__init__.__kwdefaults__.update(clock=lambda: clock[0], now=lambda: clock[0])
    loader._Reader.sample = slowed(loader._Reader.sample, READ)
    gpt_forward.GptForwardStep.__call__ = slowed(gpt_forward.GptForwardStep.__call__, FORWARD)
    saver.Saver.save = slowed(saver.Saver.save, SAVE)
    return train.main(argv)


# --- a disk that is full ---------------------------------------------------------------------------------------------


def train_on_a_small_disk(folder: Path, num_bytes: int, **more: object) -> tuple[Ended, Ended] | None:
    """A run whose output_dir is a file system of `num_bytes`, and then, with that enlarged, another start of it.

    What it leaves is copied to `folder`/kept. None where this user may make no file system.
    """
    argv = flags(folder, output_dir=folder / "disk", **more)
    (rank,) = try_ranks(_train_twice, 1, argv, str(folder), num_bytes, init=False, timeout=100)
    assert not rank.failed, f"{rank.error}\n{rank.stack}\n{rank.output}"
    if "no file system" in rank.output:
        return None
    first, second, _ = rank.output.split("exit code ")
    code, _, second = second.partition("\n")
    return Ended(int(code), first), Ended(int(rank.output.rsplit("exit code ", 1)[1]), second)


def _train_twice(argv: list[str], folder: str, num_bytes: int) -> None:
    disk = Path(folder, "disk")
    disk.mkdir()
    if not _mount_tmpfs(disk, num_bytes):
        print("no file system")
        return
    _train(argv, "", 0)
    _mount_tmpfs(disk, 1 << 30, again=True)
    _train(argv, "", 0)
    shutil.copytree(disk, Path(folder, "kept"))


def _mount_tmpfs(path: Path, num_bytes: int, *, again: bool = False) -> bool:
    """Whether `path` is now a file system in memory, for this process and its children only. Root may do it in a mount
    namespace, another user in a user namespace as well, where the system lets users have them."""
    libc = ctypes.CDLL(None, use_errno=True)
    remount = 32  # MS_REMOUNT
    try:
        if not again:
            os.unshare(os.CLONE_NEWNS | (0 if os.geteuid() == 0 else os.CLONE_NEWUSER))
    except OSError:
        return False
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: what is mounted below is seen by no other process
    if not again and libc.mount(b"none", b"/", None, private, None) != 0:
        return False
    options = f"size={num_bytes}".encode()
    return libc.mount(b"tmpfs", bytes(path), b"tmpfs", remount if again else 0, options) == 0
