"""Notes of a rank on its progress, for the watchdog of a rank that hangs: one assignment per note.

Megatron's communicator has no types: `Any` here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megaaccum.platform import cpu


class Trace:
    """Phase of the step, last action of the schedule (F or B, chunk, micro-batch), and last message between stages with
    whether it is done.

    On a GPU the host runs ahead of its kernels: an event marks the begin of each action there, and the trace also names
    the last action that the GPU has begun, which is where it hangs.
    """

    def __init__(self) -> None:
        self.phase = "before its first phase"
        self.exchange: tuple[str, str, str] | None = None
        """The last exchange of messages, the action that it came after, and whether it is done. `message` puts it into
        words: it is written thousands of times before it is read."""
        self.action = ""
        self._begun = ""
        self._launched: deque[tuple[str, torch.cuda.Event]] = deque()
        self._since = time.monotonic()

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        """Note that a forward begins."""
        self.note(f"F chunk {chunk} micro-batch {microbatch}")

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Note that a backward begins."""
        self.note(f"B chunk {chunk} micro-batch {microbatch}")

    def note(self, action: str) -> None:
        """Note that an action begins."""
        self.action = action
        if cpu.has_accelerator():
            event = torch.cuda.Event()
            event.record()
            self._launched.append((action, event))
            self._advance()

    def _advance(self) -> None:
        while self._launched and self._launched[0][1].query():
            self._begun = self._launched.popleft()[0]

    def enter(self, phase: str) -> None:
        self.phase, self._since = phase, time.monotonic()

    def __str__(self) -> str:
        seconds = time.monotonic() - self._since
        parts = [f"In {self.phase} for {seconds:.0f} s", f"last action {self.action or 'none'}"]
        if self._launched:
            self._advance()
            parts.append(f"of which the GPU has begun {self._begun or 'none'}")
        return ", ".join([*parts, f"last P2P {self.message or 'none'}"])

    @property
    def message(self) -> str:
        """The last exchange, in words."""
        name, action, state = self.exchange or ("", "", "")
        return f"{name} after {action or 'nothing'}, {state}" if name else ""


_METHODS = (
    "recv_forward recv_backward send_forward send_backward send_forward_recv_backward send_backward_recv_forward"
    " send_forward_recv_forward send_backward_recv_backward send_forward_backward_recv_forward_backward"
).split()
"""Public methods of Megatron's communicator that exchange messages."""


def traced(communicator: P2PCommunicator, trace: Trace) -> P2PCommunicator:
    """Make `communicator` note each exchange in `trace`: its name with `not done` while it lasts, then `done`."""
    for name in _METHODS:
        setattr(communicator, name, _noting(name, getattr(communicator, name), trace))
    return communicator


def _noting(name: str, exchange: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    @wraps(exchange)
    def exchange_and_note(*args: Any, **kwargs: Any) -> Any:
        trace.exchange = name, trace.action, "not done"
        result = exchange(*args, **kwargs)
        trace.exchange = name, trace.action, "done"
        return result

    return exchange_and_note
