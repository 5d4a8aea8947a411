"""The process that forks the ranks of tests.

It imports torch, DeepSpeed and Megatron once, which takes ten seconds, and forks ranks from that state for every test.
It is a fresh interpreter: nothing that a test process did to torch reaches the ranks. It ends when its test process
closes the connection or dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megaaccum.distributed import preload, processes
from megaaccum.testing import tensors
from megaaccum.testing.protocol import Outcome, Reply, Request

GRACE_SECONDS = 3.0
"""After one rank failed: time for the others to fail by themselves and say why."""
STACK_SECONDS = 2.0
"""After the time is up: time for the ranks to write their stacks."""


def main(fd: int) -> None:
    """Serves requests that arrive on the socket `fd` until its other end is closed."""
    connection = Connection(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then closes the connection
    preload.libraries()
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(run(request, connection))


def run(request: Request, connection: Connection) -> Reply:
    """Forks the ranks, waits for them, and returns how each ended. Ends them all if the test process goes away."""
    sock = processes.listen()
    port = sock.getsockname()[1]
    ranks = [_start(request, rank, port) for rank in range(request.world_size)]
    store = processes.serve_store(sock)
    watch = Watch(request, ranks, connection)
    try:
        watch.wait()
    finally:
        ended = {process.rank for process in processes.end(ranks, grace=0)}
        del store  # stops its thread before the next fork
    return Reply(
        outcomes=[watch.outcome(process, process.rank in ended) for process in ranks], timed_out=watch.timed_out
    )


class Watch:
    """Waits for the ranks of one request, within its time."""

    def __init__(self, request: Request, ranks: list[processes.RankProcess], connection: Connection):
        self.request = request
        self.ranks = ranks
        self.connection = connection
        self.timed_out = False
        self.order: list[int] = []

    def wait(self) -> None:
        deadline = time.monotonic() + self.request.timeout
        failed = False
        while any(process.status is None for process in self.ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                self._time_is_up(failed)
                return
            ended = processes.wait(self.ranks, left, also=[self.connection.fileno()])
            self.order += [process.rank for process in sorted(ended, key=self._without_error)]
            if not failed and any(self._failed(process) for process in ended):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if self.connection.poll():
                raise SystemExit("the test process went away")

    def _time_is_up(self, failed: bool) -> None:
        """Has the ranks write their stacks. After a failure that is no time-out, but stacks of the rest still help."""
        self.timed_out = not failed
        for process in self.ranks:
            process.send(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        waiting = [process for process in self.ranks if process.status is None]
        while time.monotonic() < deadline and not all(self._stack(process.rank) for process in waiting):
            time.sleep(0.05)
        time.sleep(0.05)  # a stack is written line by line

    def _failed(self, process: processes.RankProcess) -> bool:
        return process.status != 0 or not self.request.result_file(process.rank).exists()

    def _without_error(self, process: processes.RankProcess) -> bool:
        return not self.request.error_file(process.rank).exists()

    def _stack(self, rank: int) -> str:
        return _read(self.request.stack_file(rank))

    def outcome(self, process: processes.RankProcess, ended_by_harness: bool) -> Outcome:
        """How this rank ended; it has been reaped."""
        assert process.status is not None
        request, rank = self.request, process.rank
        result = request.result_file(rank)
        return Outcome(
            rank=rank,
            status=process.status,
            order=self.order.index(rank) if rank in self.order else len(self.ranks),
            ended_by_harness=ended_by_harness,
            error=processes.RankError.read(request.error_file(rank)),
            output=_read(request.output_file(rank)),
            stack=self._stack(rank),
            result=result.read_bytes() if result.exists() else None,
        )


def _read(path: os.PathLike[str]) -> str:
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _start(request: Request, rank: int, port: int) -> processes.RankProcess:
    env = processes.rank_environment(rank, request.world_size, port, num_threads=1) | request.env
    return processes.start(
        rank,
        partial(_body, request, rank),
        env=env,
        output=request.output_file(rank),
        error=request.error_file(rank),
    )


def _body(request: Request, rank: int) -> None:
    """Runs in the rank: sets it up, calls the function, writes its result."""
    stack = open(request.stack_file(rank), "w")  # noqa: SIM115 - open until the rank ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=sys.stderr)
    os.chdir(request.cwd)
    sys.path[:0] = [entry for entry in request.path if entry not in sys.path]
    fn = _resolve(request.module, request.qualname)
    args, kwargs = pickle.loads(request.call)
    if request.init:
        _init_gloo(rank, request)
    result = fn(*args, **kwargs)
    part = request.result_file(rank).with_suffix(".part")
    part.write_bytes(tensors.dumps(result))
    part.replace(request.result_file(rank))
    if request.init:
        _destroy()


def _resolve(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _init_gloo(rank: int, request: Request) -> None:
    """The default process group. Its time limit is longer than the test's: the harness tells of a hang, not gloo."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo", rank=rank, world_size=request.world_size, timeout=timedelta(seconds=2 * request.timeout)
    )


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
