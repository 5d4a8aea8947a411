"""Messages between the ranks of a pipeline: receives posted ahead, sends waited for late.

A channel carries one kind of message (activations F, or their gradients B) from one rank to another, in the order of
the sender, which both ends know; a message that its receiver needs later is kept until then. Channels of a pair of
ranks are kept apart by tags on gloo and by process groups on NCCL, so that no activation queues after a gradient.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megaaccum.distributed.groups import PipelineChannels
from megaaccum.errors import ConfigError
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.validate import Channel, Message, receives, sends

AHEAD = 2
"""Receives that are posted on a channel before they are needed, over gloo."""
AHEAD_ON_NCCL = 1
"""The same over NCCL. A second one would wait on the device for the first, and where streams share a hardware queue
everything launched later would wait for both, among it the send that the first one's sender waits for."""

SMALL = 1 << 20
"""Bytes, over gloo, up to which receives of a channel are posted ahead whatever their number, and sends are kept
whether they have left or not: less than it costs in time to look after each message."""

QUEUES_BY_DEFAULT = 8
"""Hardware queues of a GPU that CUDA uses where CUDA_DEVICE_MAX_CONNECTIONS is not set."""


def queues_needed(schedule: Schedule) -> int:
    """Hardware queues that a rank of `schedule` needs over NCCL: one for compute and one for each stream of messages.

    An NCCL receive is a kernel that waits on the device for its sender. Where its stream shares a queue, it can hold up
    what that sender, or the sender's own sender, waits for; NCCL promises nothing about two streams side by side.
    """
    streams: set[tuple[int, frozenset[int], str, bool]] = set()
    for rank in range(schedule.pp):
        for source, target, kind in sends(schedule, rank):
            streams |= {(each, frozenset((source, target)), kind, target > source) for each in (source, target)}
    return 1 + max((sum(each[0] == rank for each in streams) for rank in range(schedule.pp)), default=0)


def check_queues(schedule: Schedule) -> None:
    """Raise ConfigError where CUDA was given fewer hardware queues than this schedule needs over NCCL."""
    given = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES_BY_DEFAULT))
    if given < (needed := queues_needed(schedule)):
        raise ConfigError(
            f"schedule {schedule.name} at pipeline_model_parallel_size {schedule.pp} posts receives ahead on"
            f" {needed - 1} streams, and the GPU has {given} hardware queues for them and for compute"
            f" (CUDA_DEVICE_MAX_CONNECTIONS, by default {QUEUES_BY_DEFAULT}), where they could wait for each other for"
            f" ever: set CUDA_DEVICE_MAX_CONNECTIONS to {needed} or more, best to 32, before CUDA starts"
        )


class Mail:
    """Sends and receives of one rank in one flush. Used by one thread.

    members: global ranks of the pipeline. new_buffer: an empty tensor of a message's shape.
    forward_only: activations alone.
    """

    def __init__(
        self,
        schedule: Schedule,
        channels: PipelineChannels,
        new_buffer: Callable[[Message], torch.Tensor],
        *,
        forward_only: bool = False,
    ):
        self._channels, self.new_buffer = channels, new_buffer
        self._rank, self.members = channels.rank, channels.members
        incoming = receives(schedule, self._rank)
        self._due = {at: deque(due) for at, due in incoming.items() if at[2] == "F" or not forward_only}
        self._posted: dict[Channel, deque[tuple[Message, dist.Work, torch.Tensor]]] = {at: deque() for at in self._due}
        self._kept: dict[tuple[Channel, Message], tuple[dist.Work, torch.Tensor]] = {}
        self._outbox = _Outbox(polls=channels.on_nccl)
        self._ahead, self._small = (AHEAD_ON_NCCL, 0) if channels.on_nccl else (AHEAD, SMALL)
        self._stream = torch.cuda.current_stream() if channels.on_nccl else None
        self._closed = list(self._due)
        self._to_fill: set[Channel] = set()  # after the next send

    def _open(self, kinds: str) -> None:
        """Post the first receives of these kinds, if that has not been done."""
        for channel in [at for at in self._closed if at[2] in kinds]:
            self._closed.remove(channel)
            self._fill(channel)

    def _fill(self, channel: Channel) -> None:
        """Post receives ahead, in the stream that the flush computes in, where they are used: Megatron's schedule plans
        send from a stream of their own, whose pool would give a buffer away again while compute reads it."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._receive_ahead(channel)

    def _receive_ahead(self, channel: Channel) -> None:
        (source, _, kind), due, posted = channel, self._due[channel], self._posted[channel]
        nbytes = sum(buffer.nbytes for _, _, buffer in posted)
        while due and (len(posted) < self._ahead or nbytes < self._small):
            buffer = self.new_buffer(message := due.popleft())
            posted.append((message, self._channels.receive(buffer, source, kind), buffer))
            nbytes += buffer.nbytes

    def receive(self, source: int, kind: str, message: Message) -> torch.Tensor:
        """The content of `message` from rank `source` of the pipeline, once it is there."""
        self._open("F")  # a gradient that is due answers an activation that was sent, so its channel is open
        channel = (source, self._rank, kind)
        posted = self._posted[channel]
        while (channel, message) not in self._kept:  # what was sent before it is asked for later
            sent, work, buffer = posted.popleft()
            self._kept[channel, sent] = work, buffer
            if not posted:  # before waiting: it takes a while, and the message may still be on its way
                self._fill(channel)
        if len(posted) < self._ahead and self._due[channel]:
            self._to_fill.add(channel)
        work, buffer = self._kept.pop((channel, message))
        work.wait()
        return buffer

    def send(self, tensor: torch.Tensor, target: int, kind: str) -> None:
        """Begin to send; `tensor` must not change any more, and is let go once it has left."""
        self._outbox.put(self._channels.send(tensor, target, kind), tensor)
        # Not before: others wait for what this rank sends first.
        self._open("FB")
        while self._to_fill:
            self._fill(self._to_fill.pop())

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._outbox.close()


class _Outbox:
    """Holds what is on its way out, and lets go of it when it has left.

    NCCL says without waiting whether a message has left. gloo only says so to one who waits, so a thread does; it is
    woken when more than SMALL bytes have come together.
    """

    def __init__(self, *, polls: bool):
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._nbytes = 0  # of what the thread has not been given
        self._queue: queue.SimpleQueue[Any] | None = None if polls else queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._sent.append((work, tensor))
        if self._queue is None:
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()
            return
        if self._error is not None:
            raise self._error
        self._nbytes += tensor.nbytes
        if self._nbytes > SMALL:
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait_for_each, name="megaaccum-sends", daemon=True)
                self._thread.start()
            self._queue.put(self._sent)
            self._sent, self._nbytes = deque(), 0

    def _wait_for_each(self) -> None:
        assert self._queue is not None
        if sys.platform == "linux":  # there threads have priorities; to let go of memory must not hold up a pass
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while (batch := self._queue.get()) is not None:
            while batch:
                try:
                    batch[0][0].wait()
                except Exception as error:
                    self._error = error
                    return
                batch.popleft()

    def close(self) -> None:
        if self._queue is not None and self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            if self._error is not None:
                raise self._error
        while self._sent:
            self._sent.popleft()[0].wait()
