"""Running a function on several ranks from a test: start, wait for a bounded time, report which rank failed and how.

Ranks are forks of one process, which has imported torch, DeepSpeed and Megatron and is otherwise fresh: nothing that a
test process did to torch reaches them (multiprocessing's forkserver).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from megaaccum.lab.verification.testing import tensors
from megaaccum.platform.replacing import environment
from megaaccum.pretrain.launch import processes
from megaaccum.pretrain.launch.processes import RankError, describe_status

STARTUP_SECONDS = 120.0
"""Limit for the imports of torch, DeepSpeed and Megatron in the process that forks ranks."""
GRACE_SECONDS = 3.0
"""After one rank failed: time for the others to fail too and report why."""
STACK_SECONDS = 2.0
"""After the time is up: time for the ranks to write their stacks."""
OUTPUT_LINES = 60
"""Lines of a rank's output that a failure shows."""
PRELOADED = "megaaccum.lab.verification.testing.preloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended."""

    rank: int
    status: int
    """Exit code, or minus the signal."""
    order: int
    """0 for the first that ended."""
    ended_by_harness: bool
    """It still ran when the time was up or another rank had failed."""
    error: RankError | None
    """The exception that ended it, if one did."""
    output: str
    stack: str
    """Every thread's stack when the time was up."""
    result: bytes | None
    """The pickled return value, None without one."""

    @property
    def failed(self) -> bool:
        """It did not return from its function."""
        return self.status != 0 or self.result is None


class RanksFailed(AssertionError):
    """Ranks raised, exited, were killed or did not end in time. `outcomes` has every rank, in rank order."""

    def __init__(self, text: str, outcomes: list[Outcome]):
        super().__init__(text)
        self.outcomes = outcomes


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **keys: Any) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `world_size` ranks and returns their results, in rank order. keys: those of
    `try_ranks`, and `kwargs`.

    `fn` is a function of a module's top level; arguments and results are pickled (torch CPU tensors may be among
    them). The ranks are fresh forks with torch, DeepSpeed and Megatron imported, one torch thread each, RANK and the
    like set, the CPU lane on, and with `init` a gloo process group over all of them. `env` is added to their
    environment after the imports. `timeout` is in seconds, the imports not counted. Without `hide_gpus` the ranks find
    the machine's GPUs, and start their process group themselves; all that a process starts are of one kind.

    Raises RanksFailed with the traceback, output and, after a time-out, the stack of the ranks. No rank outlives it.
    """
    outcomes = try_ranks(fn, world_size, *args, timeout=timeout, **keys)
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailed(_failure_text(fn, outcomes, timeout), outcomes)
    return [pickle.loads(outcome.result or b"") for outcome in outcomes]


def try_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: dict[str, str] | None = None,
    hide_gpus: bool = True,
    **kwargs: Any,
) -> list[Outcome]:
    """Run `fn` like run_ranks, and return how each rank ended: for tests in which ranks are meant to fail."""
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not at the top level of a module, so ranks cannot import it")
    call, context = pickle.dumps((fn, args, kwargs)), server(hide_gpus)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, processes.listen() as sock:
        port = sock.getsockname()[1]
        store = processes.serve_store(sock)
        ranks: list[Rank] = []
        try:
            with _environment(hide_gpus):
                for number in range(world_size):
                    stem = Path(folder) / f"rank{number}"
                    variables = processes.rank_environment(number, world_size, port, num_threads=1) | (env or {})
                    group_timeout = timeout if init and hide_gpus else None
                    process = context.Process(target=_become_rank, args=(stem, call, variables, group_timeout))
                    process.start()
                    assert process.pid is not None
                    ranks.append(Rank(number, stem, process, process.pid))
            _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
        del store
        return [rank.outcome() for rank in ranks]


# --- in the test process ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rank:
    """One rank, from its start to its end, and the files that it writes, which begin with `stem`."""

    number: int
    stem: Path
    process: ForkServerProcess
    pid: int
    order: int = sys.maxsize
    ended_by_harness: bool = False

    def file(self, kind: str) -> Path:
        return self.stem.with_suffix(f".{kind}")

    @property
    def running(self) -> bool:
        return self.process.exitcode is None

    @property
    def failed(self) -> bool:
        """It has ended, and not by returning from its function."""
        return not self.running and (self.process.exitcode != 0 or not self._has("result"))

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def end(self) -> None:
        """End the rank and its children, if it still runs."""
        if not self.running:
            return
        self.ended_by_harness = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.send(signal.SIGKILL)  # a rank that does not lead its session yet is no process group
        self.process.join()

    def outcome(self) -> Outcome:
        assert self.process.exitcode is not None
        return Outcome(
            rank=self.number,
            status=self.process.exitcode,
            order=self.order,
            ended_by_harness=self.ended_by_harness,
            error=RankError.read(self.file("error")),
            output=self.read("output"),
            stack=self.read("stack"),
            result=self.file("result").read_bytes() if self._has("result") else None,
        )

    def read(self, kind: str) -> str:
        return self.file(kind).read_text(errors="replace") if self._has(kind) else ""

    def _has(self, kind: str) -> bool:
        return self.file(kind).exists()


def _wait(ranks: list[Rank], timeout: float) -> None:
    """Waits until all have ended, or the time is up, or one has failed and the others had GRACE_SECONDS; ranks that
    still run have then written their stacks."""
    deadline, failed, num_ended = time.monotonic() + timeout, False, 0
    running = ranks
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            _have_stacks_written(running)
            return
        connection.wait([rank.process.sentinel for rank in running], left)
        ended = [rank for rank in running if not rank.running]
        running = [rank for rank in running if rank not in ended]
        for rank in sorted(ended, key=lambda rank: not rank.file("error").exists()):
            rank.order, num_ended = num_ended, num_ended + 1
        if not failed and any(rank.failed for rank in ended):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _have_stacks_written(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.send(signal.SIGUSR1)
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and not all(rank.read("stack") for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.05)  # a stack is written line by line


@cache
def server(hide_gpus: bool) -> ForkServerContext:
    """The start method whose server has imported the libraries. The server ends with this process."""
    assert not server.cache_info().currsize, "a process has one server, whose ranks all see the GPUs or none"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    # The server passes over a preload that cannot be imported; this rank, its first, would raise.
    first = context.Process(target=importlib.import_module, args=(PRELOADED,))
    with _environment(hide_gpus):
        first.start()
    importlib.import_module("torch.distributed")  # the store's, while the server imports the same
    first.join(STARTUP_SECONDS)
    if first.exitcode != 0:
        first.kill()
        raise RuntimeError(f"the process that forks ranks could not import {PRELOADED}: exit code {first.exitcode}")
    return context


def _environment(hide_gpus: bool) -> contextlib.AbstractContextManager[Any]:
    """Context in which this process has the environment that the server takes over when it is started."""
    root = str(Path(__file__).resolve().parents[4])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # These ranks are the CPU lane on a machine with GPUs too.
    hidden = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    return environment(hidden | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})


# --- in a rank --------------------------------------------------------------------------------------------------------


def _become_rank(stem: Path, call: bytes, env: dict[str, str], group_timeout: float | None) -> None:
    """Runs in the fork; never returns. group_timeout: seconds that the test may take, if the rank is to be in a process
    group."""
    # The server detects the end of the test process by the closing of this pipe, which ranks would keep open.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    output, error = stem.with_suffix(".output"), stem.with_suffix(".error")
    body = partial(_body, stem, call, group_timeout)
    processes.become_rank(body, parent=os.getppid(), env=env, output=output, error=error)


def _body(stem: Path, call: bytes, group_timeout: float | None) -> None:
    """Calls the function and writes its result."""
    import torch.distributed as dist

    stack = open(stem.with_suffix(".stack"), "w")  # noqa: SIM115 - open until the rank ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=sys.stderr)
    fn, args, kwargs = pickle.loads(call)
    if group_timeout is not None:  # longer than the test's: the harness reports a hang, not gloo
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * group_timeout))
        dist.barrier()  # a rank whose function ends at once would close connections that others are still making
    result = fn(*args, **kwargs)
    part = stem.with_suffix(".part")
    part.write_bytes(tensors.dumps(result))
    part.replace(stem.with_suffix(".result"))
    if group_timeout is not None and dist.is_initialized():
        dist.destroy_process_group()


# --- what a failure shows ---------------------------------------------------------------------------------------------


def _failure_text(fn: Callable[..., Any], outcomes: list[Outcome], timeout: float) -> str:
    """One text with what failed first at the top, and every rank's end below."""
    failed = sorted((o for o in outcomes if o.failed), key=lambda o: (o.ended_by_harness, o.order, o.rank))
    head = f"{fn.__module__}.{fn.__qualname__} on {len(outcomes)} ranks: "
    if failed[0].ended_by_harness:  # no rank failed before the time was up
        head += f"not done after {timeout:g} s; ranks {[outcome.rank for outcome in failed]} still ran"
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
