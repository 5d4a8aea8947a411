"""Filters of libraries' messages that a user of megaaccum cannot act on: quiet.yaml has each one, with the reason.

A message that is not listed is shown. Nothing is kept back when MEGAACCUM_VERBOSE=1.
"""

from __future__ import annotations

import builtins
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megaaccum.texts import packaged_yaml

_MESSAGES = packaged_yaml(__package__, "quiet.yaml")

WARNINGS: list[tuple[str, type[Warning], str, str]] = [
    (each["message"], getattr(builtins, each["category"]), each["module"], each["reason"])
    for each in _MESSAGES["warnings"]
]
"""(message, category, module, reason): regular expressions as in warnings.filterwarnings."""
LOG_LINES: list[tuple[str, str, str]] = [
    (each["logger"], each["start"], each["reason"]) for each in _MESSAGES["log_lines"]
]
"""(logger, start of the message, reason)."""


def install() -> None:
    """Keep back the listed messages. Call it before torch, DeepSpeed and Megatron are imported; twice is once."""
    if os.environ.get("MEGAACCUM_VERBOSE") == "1":
        return
    for message, category, module, _ in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for name, start, _ in LOG_LINES:
        logging.getLogger(name).addFilter(_StartsWith(start))


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Context that restores the program's root logger, whatever a library that is imported inside does to it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@dataclass(frozen=True)
class _StartsWith:
    """Drops the log lines that start with `start`. addFilter adds an equal filter once."""

    start: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)
