"""Rank processes on this machine: started, watched and ended by this process, and their end described.

A rank is a fork of the process that starts it, with everything that was imported before; a rank that needs a fresh
interpreter replaces itself by one. Linux only: uses process file descriptors and the parent-death signal.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from megaaccum.errors import LaunchError, MegaaccumError, exit_code_of
from megaaccum.texts import replace_text

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@dataclass(slots=True)
class RankProcess:
    """One rank: a child of this process and the leader of its own session.

    `status` is None while it runs, then its exit code, or minus the number of the signal that ended it.
    """

    rank: int
    pid: int
    pidfd: int
    status: int | None = None

    def send(self, signum: int) -> None:
        """Send a signal to the rank alone; does nothing if it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def kill(self) -> None:
        """End the rank and every process of its session, at once."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send(signal.SIGKILL)  # a rank that is not yet a session leader has no process group

    def reap(self) -> None:
        """Read the exit status of a rank that has ended; blocks while it runs."""
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        os.close(self.pidfd)


@dataclass(slots=True)
class RankError:
    """The record that a rank wrote about the exception that ended it.

    `kind` is the class name, `text` the message for the user, `traceback` None if `text` is sufficient
    (MegaaccumError).
    """

    kind: str
    text: str
    traceback: str | None
    exit_code: int

    @classmethod
    def from_exception(cls, error: BaseException) -> RankError:
        code = exit_code_of(error)
        if isinstance(error, MegaaccumError):
            return cls(type(error).__name__, str(error), None, code)
        lines = traceback.format_exception(error)
        return cls(type(error).__name__, "".join(traceback.format_exception_only(error)).strip(), "".join(lines), code)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        replace_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RankError | None:
        """The record in `path`; None if the rank wrote none."""
        return cls(**json.loads(path.read_text())) if path.exists() else None


def describe_status(status: int) -> str:
    """'exit code 3', or 'SIGKILL' for a rank that a signal ended."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def listen(port: int = 0) -> socket.socket:
    """A listening socket on the loopback address; port 0 chooses a free one.

    The ranks' store gets this very socket, so no other program can take the port in between. Raises LaunchError if the
    port cannot be used.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"--master_port {port}: this port of {LOOPBACK} cannot be used ({why}). "
            "Leave the option out to take a free one, or name another."
        ) from error
    return sock


def serve_store(sock: socket.socket) -> object:
    """The store at which ranks meet (a torch TCPStore), served on `sock` until the object returned is dropped.

    Call it after the ranks are forked: it runs a thread, and a fork should have one thread only. Ranks that ask
    earlier wait in the socket's queue.
    """
    from torch.distributed import TCPStore

    port = sock.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())


def rank_environment(rank: int, world_size: int, port: int, num_threads: int) -> dict[str, str]:
    """The variables by which torch, DeepSpeed and Megatron find their rank on this machine.

    TORCHELASTIC_USE_AGENT_STORE tells torch that the parent serves the store at MASTER_PORT: every rank is a client of
    it (torch/distributed/rendezvous.py).

    LOCAL_SIZE is not set: with it DeepSpeed 0.19 sums on a CPU through 70 MB per rank in /dev/shm, named after
    MASTER_PORT, which remain when the ranks end (deepspeed/ops/csrc/cpu/comm/shm.cpp).
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(num_threads),
    }


def start(
    rank: int, body: Callable[[], None], *, env: Mapping[str, str], output: Path | None, error: Path
) -> RankProcess:
    """Fork a rank that runs `body` and exits: with 0 if it returns, with `exit_code_of` its exception otherwise.

    `output` receives the rank's stdout and stderr; None leaves them as they are here. `error` is the file to which the
    rank writes a RankError if an exception ends it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # A signal that arrives between the fork and the reset of the handlers would run the parent's handler in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        pid = os.fork()
        if pid == 0:
            become_rank(body, parent=parent, env=env, output=output, error=error, mask=mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return RankProcess(rank, pid, os.pidfd_open(pid))


def become_rank(
    body: Callable[[], None],
    *,
    parent: int,
    env: Mapping[str, str],
    output: Path | None,
    error: Path,
    mask: Iterable[int] = (),
) -> NoReturn:
    """Make a fork of process `parent` a rank; arguments as those of `start`. Never returns into the parent's code.
    mask: signals that the rank blocks."""
    code = 1
    try:
        atexit._clear()  # the parent runs its exit handlers itself
        _end_children_at_exit()
        _detach(parent, output)
        os.environ.update(env)
        _reset_signals(mask)
        code = run_and_report(body, error)
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not change the exit code
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_children_at_exit() -> None:
    """End the rank's children of multiprocessing (workers of a loader, managers) with the rank. multiprocessing's exit
    handler was cleared with the parent's other handlers, and it knew the parent's children. The three names are those
    that multiprocessing itself uses (Python 3.12: BaseProcess._bootstrap)."""
    process, util = multiprocessing.process, multiprocessing.util
    process._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    util._finalizer_registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # noqa: SLF001


def _detach(parent: int, output: Path | None) -> None:
    """Start a session of its own, so that Ctrl-C in the terminal reaches the rank only through its parent, and only
    once."""
    os.setsid()
    end_with(parent)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if output is None:
        return
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def end_with(parent: int) -> None:
    """Have the system end this process when process `parent`, which forked it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def _reset_signals(mask: Iterable[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` leaves it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_and_report(body: Callable[[], None], error_file: Path) -> int:
    """Run `body` and return the exit code of this process; an exception is written to `error_file` as a RankError."""
    try:
        body()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        RankError("SystemExit", str(stop.code), None, 1).write(error_file)
        return 1
    except BaseException as error:
        report = RankError.from_exception(error)
        report.write(error_file)
        return report.exit_code
    return 0


def wait(processes: Sequence[RankProcess], timeout: float) -> list[RankProcess]:
    """Reap and return the ranks that have ended since the last call, in the order of `processes`. Returns as soon as
    one has ended, or after `timeout` seconds."""
    poller = select.poll()
    running = [process for process in processes if process.status is None]
    for process in running:
        poller.register(process.pidfd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(math.ceil(timeout * 1000))}
    ended = [process for process in running if process.pidfd in ready]
    for process in ended:
        process.reap()
    return ended


def end(processes: Sequence[RankProcess]) -> list[RankProcess]:
    """End the ranks that still run, at once. Returns them."""
    running = [process for process in processes if process.status is None]
    for process in running:
        process.kill()
    for process in running:
        process.reap()
    return running
