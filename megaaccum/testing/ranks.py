"""Running a function on several ranks from a test: start, wait at most so long, and say which rank failed and how."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megaaccum.distributed.processes import describe_status
from megaaccum.testing.protocol import Outcome, Reply, Request

STARTUP_SECONDS = 120.0
"""Limit for the imports of torch, DeepSpeed and Megatron in the process that forks ranks."""
OVERHEAD_SECONDS = 30.0
"""How much longer than a test's own limit its reply may take before the forking process is given up."""
OUTPUT_LINES = 60
"""Lines of a rank's output that a failure shows."""


class RanksFailed(AssertionError):
    """Ranks raised, exited, were killed or did not end in time. `outcomes` has every rank, in rank order."""

    def __init__(self, text: str, outcomes: list[Outcome]):
        super().__init__(text)
        self.outcomes = outcomes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `world_size` ranks and returns their results, in rank order.

    `fn` is a function of a module's top level; arguments and results are pickled (torch CPU tensors may be among
    them). The ranks are fresh forks with torch, DeepSpeed and Megatron imported, one torch thread each, RANK and the
    like set, the CPU lane on, and with `init` a gloo process group over all of them. `env` is added to their
    environment after the imports. `timeout` is in seconds, the imports not counted.

    Raises RanksFailed with the traceback, output and, after a time-out, the stack of the ranks. No rank outlives it.
    """
    reply = _ask(fn, world_size, args, kwargs, timeout, init, env)
    if any(outcome.failed for outcome in reply.outcomes):
        raise RanksFailed(_failure_text(fn, reply, timeout), reply.outcomes)
    return [pickle.loads(outcome.result or b"") for outcome in reply.outcomes]


def try_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """As run_ranks, but returns how each rank ended instead of raising: for tests in which ranks are meant to fail."""
    return _ask(fn, world_size, args, kwargs, timeout, init, env).outcomes


def _ask(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    init: bool,
    env: dict[str, str] | None,
) -> Reply:
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not at the top level of a module, so ranks cannot import it")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = Request(
            module=fn.__module__,
            qualname=fn.__qualname__,
            call=pickle.dumps((args, kwargs)),
            world_size=world_size,
            timeout=timeout,
            init=init,
            env=env or {},
            path=[os.path.abspath(entry) for entry in sys.path],
            cwd=os.getcwd(),
            folder=Path(folder),
        )
        return _server().ask(request)


class Server:
    """The forking process of this test process, and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-server-"))
        self.pid_of_owner = os.getpid()
        with theirs, open(self.folder / "output", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megaaccum.testing.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.connection = Connection(ours.detach())
        self._receive(STARTUP_SECONDS)

    def ask(self, request: Request) -> Reply:
        """Sends the request and waits for its reply. Whatever goes wrong on the way, the forking process is ended."""
        try:
            self.connection.send(request)
            reply = self._receive(request.timeout + OVERHEAD_SECONDS)
        except BaseException:
            self.close()
            raise
        assert isinstance(reply, Reply)
        return reply

    def _receive(self, seconds: float) -> object:
        try:
            if not self.connection.poll(seconds):
                raise RuntimeError(f"The process that forks ranks said nothing for {seconds:.0f} s.")
            return self.connection.recv()
        except (EOFError, OSError, RuntimeError) as error:
            output = (self.folder / "output").read_text(errors="replace")
            self.close()
            raise RuntimeError(
                f"The process that forks ranks is gone or stuck ({error}). It wrote:\n{output}"
            ) from None

    @property
    def alive(self) -> bool:
        return not self.connection.closed and self.process.poll() is None

    def close(self) -> None:
        """Ends the forking process; its ranks end with it."""
        if os.getpid() != self.pid_of_owner:
            return
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_the_server: Server | None = None


def _server() -> Server:
    """The one forking process of this test process, started when first needed."""
    global _the_server
    if _the_server is None or not _the_server.alive:
        _the_server = Server()
        atexit.register(_the_server.close)
    return _the_server


def _server_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # CUDA_VISIBLE_DEVICES: these ranks are the CPU lane on a machine with GPUs too.
    ours = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return os.environ | ours


def _failure_text(fn: Callable[..., Any], reply: Reply, timeout: float) -> str:
    """One text with what failed first at the top, and every rank's end below."""
    failed = sorted((o for o in reply.outcomes if o.failed), key=lambda o: (o.ended_by_harness, o.order, o.rank))
    head = f"{fn.__module__}.{fn.__qualname__} on {len(reply.outcomes)} ranks: "
    if reply.timed_out:
        running = [outcome.rank for outcome in failed if outcome.ended_by_harness]
        head += f"not done after {timeout:g} s; ranks {running} still ran"
    else:
        head += f"rank {failed[0].rank} failed first"
    return "\n".join([head, *(_rank_text(outcome) for outcome in failed)])


def _rank_text(outcome: Outcome) -> str:
    how = "still ran and was ended" if outcome.ended_by_harness else describe_status(outcome.status)
    if outcome.status == 0 and not outcome.ended_by_harness:
        how = "exit code 0 before its function returned"
    parts = [f"--- rank {outcome.rank}: {how}"]
    if outcome.error is not None:
        parts.append(outcome.error.traceback or f"{outcome.error.kind}: {outcome.error.text}")
    if outcome.stack:
        parts += [f"--- rank {outcome.rank}: stacks", outcome.stack]
    if outcome.output:
        lines = outcome.output.splitlines()
        parts += [f"--- rank {outcome.rank}: output (last {OUTPUT_LINES} lines)", *lines[-OUTPUT_LINES:]]
    return "\n".join(parts)
