"""A limit on a step's time: a rank that exceeds it reports its state, and the run ends.

A collective that one rank does not reach makes all others wait, so the limit expires on every rank within a moment.
Each reports the phase, the action, the last message between stages and the stack of every thread.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaaccum.distributed.breadcrumbs import Trace

EXIT_CODE = 124
"""The exit code that the command `timeout` uses."""
GRACE_SECONDS = 5.0
"""Seconds between a rank's report and its end: the launcher ends all after the first, and every report is needed."""


class Watchdog:
    """Watches the steps of this rank. limit: seconds per step, 0 for no limit. first_limit: seconds of the first step,
    in which kernels are compiled and NCCL connects; the larger of the two holds. folder: receives the report as
    `rank_N.txt`, beside standard error. trace: this rank's notes on what it is doing."""

    def __init__(self, limit: float, *, rank: int, folder: Path, trace: Trace, first_limit: float = 0.0):
        self._limit, self._rank, self._folder, self._trace = limit, rank, folder, trace
        self._first: float | None = first_limit

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context around one step. Ends this process with EXIT_CODE if the step exceeds the limit."""
        if self._limit <= 0:
            yield
            return
        limit, self._first = max(self._limit, self._first or 0.0), None
        # A Python thread needs the interpreter's lock, which a hanging call may hold; faulthandler does not need it.
        faulthandler.dump_traceback_later(limit + 2 * GRACE_SECONDS, exit=True)
        timer = threading.Timer(limit, self._end, args=(number, limit, time.monotonic()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _end(self, number: int, limit: float, started: float) -> None:
        text = self.report(number, limit, time.monotonic() - started)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{self._rank}.txt").write_text(text)
        except OSError as error:
            text += f"(not written to {self._folder}: {error.strerror or error})\n"
        os.write(sys.stderr.fileno(), text.encode())  # one write, so that lines of other ranks are not mixed in
        time.sleep(GRACE_SECONDS)
        os._exit(EXIT_CODE)

    def report(self, number: int, limit: float, seconds: float) -> str:
        """This rank's report on step `number` after `seconds`, of which `limit` are allowed."""
        key = "step_timeout_seconds" if limit == self._limit else "a first step may (by distributed_timeout_minutes)"
        head = f"rank {self._rank}: step {number} takes {seconds:.0f} s, more than {key} {limit:g}."
        return f"{head} {self._trace}. Stacks:\n" + _stacks()


def _stacks() -> str:
    """The stack of every thread of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
