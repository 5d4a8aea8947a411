"""Standard output that may go away: a dead pipe, a closed terminal or a full disk under it ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class _Lossy:
    """A text stream whose writes do not fail: what cannot be written is lost, and `problem` says why."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.problem = ""

    def write(self, text: str) -> int:
        """Write `text` if that is possible."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if that is possible."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *args: str) -> None:
        try:
            action(*args)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.problem = getattr(error, "strerror", None) or str(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect() -> None:
    """Let this process go on if its standard output or error cannot be written. Call it before a file is opened, which
    would take the number of a stream that is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Lossy):
            setattr(sys, name, _Lossy(stream or open(os.devnull, "w")))  # noqa: SIM115


def problem() -> str:
    """Why something that was printed to standard output is lost; empty if nothing is, or `protect` was not called."""
    return sys.stdout.problem if isinstance(sys.stdout, _Lossy) else ""
