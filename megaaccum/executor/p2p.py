"""Messages between the ranks of a pipeline: receives posted ahead, sends waited for late.

A channel carries one kind of message (activations F, or their gradients B) from one rank to another, in the order of
the sender, which both ends know; a message that its receiver needs later is kept until then. Channels of a pair of
ranks are kept apart by tags on gloo and by process groups on NCCL, so that no activation queues after a gradient.
A first flush goes through host memory (`HostChannels`).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megaaccum.distributed import groups
from megaaccum.errors import ConfigError
from megaaccum.platform import cpu
from megaaccum.schedule.actions import Schedule
from megaaccum.schedule.validate import Channel, Message, receives, sends

AHEAD = 2
"""Receives that are posted on a channel before they are needed, over gloo."""
AHEAD_ON_NCCL = 1
"""The same over NCCL, where a receive is a kernel that holds multiprocessors while it waits. A second one would wait on
the device for the first."""

SMALL = 1 << 20
"""Bytes, over gloo, up to which receives of a channel are posted ahead whatever their number, and sends are kept
whether they have left or not: less than it costs in time to look after each message."""

QUEUES_BY_DEFAULT = 8
"""Hardware queues of a GPU that CUDA uses where CUDA_DEVICE_MAX_CONNECTIONS is not set."""


def queues_needed(schedule: Schedule) -> int:
    """Hardware queues that a rank of `schedule` needs over NCCL: one for compute and one for each stream of messages.

    An NCCL receive is a kernel that waits on the device for its sender. If its stream shares a queue, it can block
    a kernel that this sender, or the sender's own sender, waits for; NCCL does not guarantee progress of two streams.
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


_LANES = [(kind, up) for kind in "FB" for up in (True, False)]
_MAX_CTAS = 2
"""Thread blocks of a lane's kernel, which holds as many multiprocessors while it waits; NCCL's default is up to 32."""


def check_no_bound_device(pp: dist.ProcessGroup) -> None:
    """Raise ConfigError if `pp` or the world is bound to a device, which gives NCCL one stream per group."""
    for group in (pp, dist.group.WORLD):
        if group is not None and group.bound_device_id is not None:
            raise ConfigError(
                f"init_process_group was given device_id={group.bound_device_id}, and NCCL then has one stream for all"
                " messages of a group, so that a receive that is posted ahead holds up every send: leave device_id out"
            )


def _own_groups(
    members: list[int], on_nccl: bool, timeout_minutes: float | None
) -> tuple[list[dist.ProcessGroup], dist.ProcessGroup]:
    """A group of these ranks for each lane, and one over gloo; collective over the world. All ranks make the groups of
    every pipeline, in one order: torch names a group that only its members make after the number of groups that a rank
    is in, which differs between the stages of a pipeline (the first and the last share an embedding)."""
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    made = {
        tuple(pipeline): (
            [_lane_group(pipeline, on_nccl, timeout) for _ in _LANES],
            cast("dist.ProcessGroup", dist.new_group(pipeline, timeout=timeout, backend="gloo")),
        )
        for pipeline in groups.all_like(members)
    }
    return made[tuple(members)]


def _lane_group(ranks: list[int], on_nccl: bool, timeout: timedelta | None) -> dist.ProcessGroup:
    if not on_nccl:
        return cast("dist.ProcessGroup", dist.new_group(ranks, timeout=timeout))
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    return cast("dist.ProcessGroup", dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=options))


def in_turn(channels: Iterable[Channel]) -> list[Channel]:
    """Channels in an order in which neighbours connect side by side: pairs that begin with an even rank, then those
    that begin with an odd one. Rank by rank, each pair would wait for the one before it, through the whole pipeline."""
    return sorted(channels, key=lambda at: (min(at[:2]) % 2, min(at[:2]), max(at[:2]), at))


class PipelineChannels:
    """Point-to-point traffic within one pipeline, in four lanes: activations (F) and gradients (B), to higher and to
    lower ranks.

    gloo matches messages by tag, so one group carries all lanes. NCCL matches those of a pair of ranks by order alone
    and works them off one by one, so each lane has a group of its own there (`separate`; collective over the world).

    on_nccl: messages are NCCL's, whose receives are kernels that wait on the device. timeout_minutes: of the lanes'
    groups; None is torch's default. Raises ConfigError if torch would put all messages of a lane on one stream.
    """

    def __init__(self, pp: dist.ProcessGroup, *, separate: bool | None = None, timeout_minutes: float | None = None):
        self.rank = dist.get_rank(pp)
        self.on_nccl = groups.carries_by_nccl(pp)
        if self.on_nccl:
            check_no_bound_device(pp)
        self.members = dist.get_process_group_ranks(pp)
        self._connected: set[Channel] = set()
        separate = self.on_nccl if separate is None else separate
        own, by_gloo = [pp] * len(_LANES), None
        if separate:
            own, by_gloo = _own_groups(self.members, self.on_nccl, timeout_minutes)
        # Tag 0 is that of messages without one, such as a step's micro-batches.
        self._lanes = {lane: (group, tag) for tag, (lane, group) in enumerate(zip(_LANES, own, strict=True), 1)}
        self.by_host = None if by_gloo is None else HostChannels(by_gloo, separate=False)

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Send one element over every channel (source, target, kind), each rank one after the other, in `in_turn`.

        NCCL connects two ranks at their first message, and both wait for it: ranks that post receives ahead, each on
        another lane first, would wait for each other. Collective over the pipeline, once per set of channels.
        """
        for source, target, kind in in_turn(set(channels) - self._connected):
            element = torch.zeros(1, device=device)
            if self.rank == source:
                self.send(element, target, kind).wait()
            elif self.rank == target:
                self.receive(element, source, kind).wait()
            self._connected.add((source, target, kind))

    def send(self, tensor: torch.Tensor, target: int, kind: str) -> dist.Work:
        """Begin to send `tensor` to rank `target` of the pipeline."""
        group, tag = self._lanes[kind, target > self.rank]
        return group.send([tensor], target, tag)

    def receive(self, buffer: torch.Tensor, source: int, kind: str) -> dist.Work:
        """Begin to receive into `buffer` from rank `source` of the pipeline."""
        group, tag = self._lanes[kind, source < self.rank]
        return group.recv([buffer], source, tag)


class HostChannels(PipelineChannels):
    """A pipeline's traffic through host memory, by gloo, so that nothing of it waits on the device.

    For a first flush over NCCL. In that the host waits for its device again and again, on every rank: to load a kernel,
    to make a handle of cuBLAS or a communicator, to get memory. Two ranks that do so at the same time, each after a
    receive for what the other will send, would wait for ever (`python -m tests.support.queues`).
    """

    def send(self, tensor: torch.Tensor, target: int, kind: str) -> dist.Work:
        """PipelineChannels.send, once `tensor` has been computed and copied."""
        return super().send(tensor.cpu(), target, kind)

    def receive(self, buffer: torch.Tensor, source: int, kind: str) -> dist.Work:
        """PipelineChannels.receive; who waits for it copies the message into `buffer`."""
        staged = torch.empty_like(buffer, device="cpu")
        return cast("dist.Work", _Staged(super().receive(staged, source, kind), staged, buffer))


@dataclass(frozen=True, slots=True)
class _Staged:
    """A message on its way into host memory."""

    work: dist.Work
    staged: torch.Tensor
    buffer: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.staged)


class Mail:
    """Sends and receives of one rank in one flush. Used by one thread.

    members: global ranks of the pipeline. new_buffer: an empty tensor of a message's shape. needs: sends of this rank
    without which a message does not come (`schedule.validate.sends_needed`); its receive is posted after them. Over
    NCCL a receive is a kernel: one that only a later pass of its own rank can complete deadlocks if the host waits for
    the device meanwhile, as CUDA does to load a kernel or to free memory. Nothing is lost, as the message cannot come
    earlier. forward_only: activations alone.
    """

    def __init__(
        self,
        schedule: Schedule,
        channels: PipelineChannels,
        new_buffer: Callable[[Message], torch.Tensor],
        needs: Mapping[tuple[str, Message], int],
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
        self._stream = torch.cuda.current_stream() if cpu.has_accelerator() else None
        self._closed = list(self._due)
        self._needs, self._num_sent = needs, 0
        self._to_fill: dict[Channel, int] = {}  # once as many sends have begun

    def _open(self, kinds: str) -> None:
        """Post the first receives of these kinds, if that has not been done."""
        for channel in [at for at in self._closed if at[2] in kinds]:
            self._closed.remove(channel)
            self._fill(channel)

    def _fill(self, channel: Channel) -> None:
        """Post receives ahead, in the stream that the flush computes in, where they are used: Megatron's schedule plans
        send from a stream of their own, whose pool would give a buffer away again while compute reads it."""
        (source, _, kind), due, posted = channel, self._due[channel], self._posted[channel]
        nbytes = sum(buffer.nbytes for _, _, buffer in posted)
        while due and (len(posted) < self._ahead or nbytes < self._small):
            if (needed := self._needs.get((kind, due[0]), 0)) > self._num_sent:
                self._to_fill[channel] = needed
                return
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                buffer = self.new_buffer(message := due.popleft())
                posted.append((message, self._channels.receive(buffer, source, kind), buffer))
            nbytes += buffer.nbytes
        self._to_fill.pop(channel, None)

    def receive(self, source: int, kind: str, message: Message) -> torch.Tensor:
        """The content of `message` from rank `source` of the pipeline, once it is there."""
        self._open("F")  # a gradient that is due answers an activation that was sent, so its channel is open
        channel = (source, self._rank, kind)
        posted = self._posted[channel]
        while (channel, message) not in self._kept:  # what was sent before it is asked for later
            if not posted:
                self._fill(channel)
            sent, work, buffer = posted.popleft()
            self._kept[channel, sent] = work, buffer
            if not posted:  # before waiting: it takes a while, and the message may still be on its way
                self._fill(channel)
        if len(posted) < self._ahead and self._due[channel]:
            self._to_fill.setdefault(channel, 0)
        work, buffer = self._kept.pop((channel, message))
        work.wait()
        return buffer

    def send(self, tensor: torch.Tensor, target: int, kind: str) -> None:
        """Begin to send; `tensor` must not change any more, and is let go once it has left."""
        self._outbox.put(self._channels.send(tensor, target, kind), tensor)
        self._num_sent += 1
        # Not before: others wait for what this rank sends first.
        self._open("FB")
        for channel in [at for at, needed in self._to_fill.items() if needed <= self._num_sent]:
            self._fill(channel)

    def finish(self, *, wait: bool = True) -> None:
        """Wait until all that was sent has left; without `wait`, after an error, its thread ends when it has."""
        self._outbox.close(wait=wait)


class _Outbox:
    """Holds tensors that are being sent, and releases each when its send has completed.

    NCCL says without waiting whether a message has left. gloo only says so to one who waits, so a thread does; it is
    woken when more than SMALL bytes have come together.
    """

    def __init__(self, *, polls: bool):
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._nbytes = 0  # of what the thread has not been given
        self._polls, self._queue = polls, queue.SimpleQueue[Any]()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._sent.append((work, tensor))
        if self._polls:
            self._sent = deque(each for each in self._sent if not each[0].is_completed())  # a late one holds no other
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

    def close(self, *, wait: bool = True) -> None:
        """End the thread once it has waited for what it was given; wait: for all that was sent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(None if wait else 0)
        if wait and self._error is not None:
            raise self._error
        while wait and self._sent:
            self._sent.popleft()[0].wait()
