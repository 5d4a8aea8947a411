"""Starting the ranks of this machine, and ending them.

The ranks are children of the launching process. Without a GPU they are forks of it, made after it has imported torch,
DeepSpeed and Megatron once; with GPUs each is a fresh interpreter, since a CUDA context does not survive a fork. Rank 0
writes to the terminal. The other ranks write to files, whose last lines are shown if such a rank fails.

torch.distributed.elastic is not used. Its MultiprocessContext could fork a warm process, but it reports the one failed
rank that it polls first, which need not be the cause, and sends SIGTERM to all others at once. Here the others have
GRACE_SECONDS to report and end, every distinct failure is printed once, and a second signal ends the ranks.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from megaaccum.distributed import preload
from megaaccum.errors import LaunchError
from megaaccum.pretrain.launch import processes
from megaaccum.pretrain.launch.processes import RankError, RankProcess, describe_status

GRACE_SECONDS = 10.0
"""Time for the other ranks to end after one rank failed."""
TAIL_LINES = 20
"""Last lines of a failed rank's output that are shown."""
WORKER = "megaaccum.cli.train:main"
_ERROR_FILE = "MEGAACCUM_ERROR_FILE"
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Texts of gloo and NCCL about a rank that has ended."""
_KILLED = (
    "a rank that ends with SIGKILL was most likely killed by the system for want of memory (`dmesg` names it: Out of"
    " memory): take a smaller micro_batch_size, fewer ranks on this machine, or recompute."
)


def launch_local(
    argv: Sequence[str],
    *,
    nproc: int,
    num_threads: int | None = None,
    master_port: int = 0,
    worker: str = WORKER,
    fork: bool | None = None,
    imports: Sequence[str] = (),
    resume_hint: Callable[[], str] = lambda: "",
) -> int:
    """Run `worker` ("module:function", called with `argv`) on `nproc` ranks of this machine. Returns an exit code.

    Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS in its
    environment. `num_threads` per rank defaults to cores // nproc, at least 1. `master_port` 0 chooses a free port.
    `fork` None forks if there is no GPU; True and False decide. `imports`: modules that are imported before ranks are
    forked. `resume_hint` returns how to resume a run of which a rank was killed.

    SIGINT, SIGTERM and SIGHUP are passed on to the ranks once; a second one ends them. After a rank fails the others
    have GRACE_SECONDS to end before they are ended, what failed is printed once to stderr, and the exit code is that
    of the first rank that failed (128 + n after signal n). 0 means that every rank ended with 0.

    Raises LaunchError if the port is in use or nproc is not positive. Call it on the main thread.
    """
    if nproc < 1:
        raise LaunchError(f"nproc_per_node: {nproc} ranks cannot be started; the least is 1")
    threads = num_threads or threads_per_rank(nproc)
    with processes.listen(master_port) as sock, tempfile.TemporaryDirectory(prefix="megaaccum-") as folder:
        # Before torch is imported: its thread pool gets this size at its first use.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # of `mpirun -n 1`; DeepSpeed wants it to be LOCAL_RANK
        body = _body(argv, worker, threads, fork, imports)
        job = _Job(nproc, sock.getsockname()[1], threads, Path(folder), resume_hint)
        with _forwarding(job):
            job.start(body)
            store = processes.serve_store(sock)
            code = job.wait(GRACE_SECONDS)
            del store
        return code


def threads_per_rank(nproc: int) -> int:
    """Cores that this process may use, divided by `nproc` ranks; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def _body(
    argv: Sequence[str], worker: str, threads: int, fork: bool | None, imports: Sequence[str]
) -> Callable[[Path], None]:
    """The command that a rank runs, given the file for its error."""
    preload.prepare()
    if (not num_gpus()) if fork is None else fork:
        preload.libraries(*imports)
        return lambda error: _call(worker, argv, threads)
    return partial(_exec, argv, worker)


def num_gpus() -> int:
    """GPUs of this machine by the driver's management library, which starts no CUDA context; 0 if there is none."""
    preload.import_torch()
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _call(worker: str, argv: Sequence[str], threads: int) -> None:
    """Run the worker in a forked rank. Its return value, if a number, is the exit code."""
    import torch

    torch.set_num_threads(threads)
    _run(worker, argv)


def _run(worker: str, argv: Sequence[str]) -> None:
    module, _, name = worker.partition(":")
    if code := getattr(importlib.import_module(module), name)(list(argv)):
        sys.exit(code)


def _exec(argv: Sequence[str], worker: str, error: Path) -> None:
    """Replace a forked rank by a fresh interpreter that runs the worker."""
    os.environ[_ERROR_FILE] = str(error)
    os.execv(sys.executable, [*interpreter(), "-m", "megaaccum.pretrain.launch.local", worker, *argv])


def interpreter() -> list[str]:
    """This Python, which imports from the current folder only if this process does: the folder may be a checkout of
    Megatron-LM, whose `megatron` would come before the installed one."""
    return [sys.executable, *([] if {"", os.getcwd()} & {*sys.path} else ["-P"])]


class _Job:
    """The ranks of one launch, and the files to which they write."""

    def __init__(self, nproc: int, port: int, threads: int, folder: Path, resume_hint: Callable[[], str]):
        self.resume_hint = resume_hint
        self.nproc, self.port, self.threads, self.folder = nproc, port, threads, folder
        self.ranks: list[RankProcess] = []
        self.failed: list[RankProcess] = []
        self.ended_by_us: list[RankProcess] = []
        self.forwarded: int | None = None
        self.interrupted_at_start = False
        self.kill = False

    def error_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.error"

    def output_file(self, rank: int) -> Path | None:
        """The file of a rank's output; None for rank 0, which keeps the terminal so that its progress line can be
        rewritten."""
        return None if rank == 0 else self.folder / f"rank{rank}.output"

    def start(self, body: Callable[[Path], None]) -> None:
        for rank in range(self.nproc):
            if self.kill:
                return
            error = self.error_file(rank)
            env = processes.rank_environment(rank, self.nproc, self.port, self.threads)
            process = processes.start(rank, partial(body, error), env=env, output=self.output_file(rank), error=error)
            self.ranks.append(process)

    def forward(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks: the first as it is; a second one ends them, but for a hang-up, which a closed
        terminal sends more than once."""
        if self.forwarded is not None:
            self.kill = self.kill or signum != signal.SIGHUP
            return
        self.forwarded = signum
        if len(self.ranks) < self.nproc:  # not all are started: there is nothing to save yet
            self.kill = self.interrupted_at_start = True
        for process in self.ranks:
            process.send(signum)

    def wait(self, grace: float) -> int:
        """Wait for the ranks, report failures, and return the exit code."""
        deadline: float | None = None
        while any(process.status is None for process in self.ranks) and not self.kill:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            # Signals do not interrupt a poll (PEP 475), so it is short: a second signal sets self.kill.
            ended = processes.wait(self.ranks, min(left, 1.0))
            self.failed += sorted((process for process in ended if process.status != 0), key=self._time_of_error)
            if self.failed and deadline is None:
                deadline = time.monotonic() + grace
        self.ended_by_us = processes.end(self.ranks)
        # The cause first, not the rank that noticed it first: a killed rank wrote no time.
        self.failed.sort(key=self._lost_a_peer)
        self._report(sys.stderr)
        return self._exit_code()

    def _time_of_error(self, process: RankProcess) -> float:
        """When the rank wrote its error; infinity if it wrote none. Orders ranks whose ends are seen together."""
        path = self.error_file(process.rank)
        return path.stat().st_mtime if path.exists() else float("inf")

    def _exit_code(self) -> int:
        if self.failed:
            status = self.failed[0].status
            assert status is not None
            return status if status > 0 else 128 - status
        return 128 + (self.forwarded or 0) if self.ended_by_us else 0

    def _report(self, stream: TextIO) -> None:
        """Print each distinct failure once, in the order in which ranks failed, then what became of the others."""
        seen: set[str] = set()
        lost = [process for process in self.failed[1:] if self._lost_a_peer(process)]
        for process in self.failed:
            text = self._failure(process, detailed=not seen) if process not in lost else None
            if text is not None and text not in seen:
                seen.add(text)
                print(text, file=stream)
        if lost:
            ranks = ", ".join(str(process.rank) for process in sorted(lost, key=lambda each: each.rank))
            print(f"megaaccum: ranks that then lost their connection: {ranks}", file=stream)
        if self.ended_by_us and self.interrupted_at_start:
            print("megaaccum: interrupted", file=stream)
        elif self.ended_by_us and self.kill:
            print("megaaccum: the ranks were ended at once, without saving", file=stream)
        elif self.ended_by_us:
            names = ", ".join(str(process.rank) for process in self.ended_by_us)
            print(f"megaaccum: ranks that were still waiting were ended: {names}", file=stream)
        if any(process.status == -signal.SIGKILL for process in self.failed):
            print(f"megaaccum: {_KILLED} {self.resume_hint()}".rstrip(), file=stream)
        elif any(error is not None and error.kind == "UnwrittenCheckpoint" for error in map(self._error, self.failed)):
            print(f"Free some space. {self.resume_hint()}".rstrip(), file=stream)
        stream.flush()

    def _error(self, process: RankProcess) -> RankError | None:
        """The record of what ended a rank; None if it wrote none."""
        return RankError.read(self.error_file(process.rank))

    def _lost_a_peer(self, process: RankProcess) -> bool:
        """Whether the rank reports only that another rank has gone."""
        error = self._error(process)
        return error is not None and error.traceback is not None and any(word in error.text for word in _PEER_GONE)

    def _failure(self, process: RankProcess, *, detailed: bool) -> str | None:
        """The text to print about a rank that failed; None if there is nothing to add.

        A text without a traceback is for the user and does not name the rank: ranks with the same failure share one
        line.
        """
        error = self._error(process)
        if error is not None and error.kind == "KeyboardInterrupt":
            return "megaaccum: interrupted"
        assert process.status is not None
        if self.forwarded is not None and process.status == -self.forwarded:  # it had no handler yet
            return "megaaccum: interrupted"
        if error is not None and error.traceback is None:
            return f"megaaccum: error: {error.text}"
        if not detailed:  # later failures mostly follow from the first
            why = f" ({error.text})" if error is not None else ""
            return f"megaaccum: rank {process.rank} then ended with {describe_status(process.status)}{why}"
        head = f"megaaccum: rank {process.rank} ended with {describe_status(process.status)}"
        details = error.traceback.rstrip() if error and error.traceback else self._tail(process.rank)
        return f"{head}:\n{details}" if details else head

    def _tail(self, rank: int) -> str:
        path = self.output_file(rank)
        if path is None or not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@contextmanager
def _forwarding(job: _Job) -> Iterator[None]:
    """Context in which signals to this process go to the ranks, which end with it. A hang-up that `nohup` has ignored
    stays so."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    signals = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []))
    before = {signum: signal.signal(signum, job.forward) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        processes.end(job.ranks)  # nothing is left unless an exception came through here


def main() -> int:
    """A rank in a fresh interpreter: `python -m megaaccum.pretrain.launch.local module:function ARGS`."""
    preload.prepare()
    worker, *argv = sys.argv[1:]
    return processes.run_and_report(partial(_run, worker, argv), Path(os.environ[_ERROR_FILE]))


if __name__ == "__main__":
    sys.exit(main())
