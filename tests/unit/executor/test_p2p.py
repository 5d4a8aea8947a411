"""A sent tensor is released when it has left, and not before; with and without a thread that waits."""

import threading
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megaaccum.executor.p2p import SMALL, Mail, _Outbox
from megaaccum.platform import cpu
from megaaccum.schedule.registry import build

PATIENCE = 20.0
"""Seconds until a test gives up waiting for a thread."""


class Work:
    """A send that has left when `left` is set. Waiting for it is bounded."""

    def __init__(self, error: Exception | None = None):
        self.left, self.error = threading.Event(), error

    def is_completed(self) -> bool:
        return self.left.is_set()

    def wait(self) -> None:
        assert self.left.wait(PATIENCE)
        if self.error:
            raise self.error


def sent(outbox: _Outbox, work: Work) -> weakref.ref:
    tensor = torch.zeros(SMALL // 4 + 1)
    outbox.put(work, tensor)
    return weakref.ref(tensor)


def eventually(condition) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_a_thread_lets_go_of_what_has_left():
    outbox, first, second = _Outbox(polls=False), Work(), Work()
    one, two = sent(outbox, first), sent(outbox, second)
    assert one() is not None
    first.left.set()
    assert eventually(lambda: one() is None)
    assert two() is not None
    second.left.set()
    outbox.close()
    assert two() is None


def test_small_sends_are_kept_until_they_are_many_or_the_flush_ends():
    outbox, works = _Outbox(polls=False), [Work() for _ in range(5)]
    for work in works:
        work.left.set()
    few = [torch.zeros(SMALL // 16) for _ in range(4)]  # 4 bytes each: SMALL together
    kept = [weakref.ref(each) for each in few]
    while few:
        outbox.put(works[len(few)], few.pop())
    assert all(each() is not None for each in kept)
    outbox.put(works[0], torch.zeros(1))
    assert eventually(lambda: all(each() is None for each in kept))
    last = torch.zeros(1)
    outbox.put(works[0], last)
    kept, last = [weakref.ref(last)], None  # type: ignore[assignment]
    outbox.close()
    assert kept[0]() is None


def test_polling_lets_go_at_the_next_send():
    outbox, first, second = _Outbox(polls=True), Work(), Work()
    one = sent(outbox, first)
    first.left.set()
    two = sent(outbox, second)
    assert one() is None
    assert two() is not None
    second.left.set()
    outbox.close()
    assert two() is None


def test_a_late_send_holds_none_that_have_left():
    """One neighbour computes long, and the other has received what was sent after."""
    outbox, late, later = _Outbox(polls=True), Work(), Work()
    one, two = sent(outbox, late), sent(outbox, later)
    later.left.set()
    last = Work()
    sent(outbox, last)
    assert one() is not None and two() is None
    late.left.set()
    last.left.set()
    outbox.close()


@pytest.mark.parametrize("polls", [False, True])
def test_a_send_that_fails_is_told(polls):
    outbox, work = _Outbox(polls=polls), Work(RuntimeError("connection closed by peer"))
    sent(outbox, work)
    work.left.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        outbox.close()


def test_a_flush_that_fails_waits_for_no_send_and_leaves_no_thread():
    outbox, work = _Outbox(polls=False), Work()
    sent(outbox, work)
    outbox.close(wait=False)
    (thread,) = (each for each in threading.enumerate() if each.name == "megaaccum-sends")
    work.left.set()
    assert eventually(lambda: not thread.is_alive())


@pytest.mark.parametrize("on_nccl", [True, False])
def test_receives_are_posted_in_the_stream_that_computes(monkeypatch: pytest.MonkeyPatch, on_nccl: bool):
    """Also the first ones, which follow a send that Megatron's schedule plans issue in their communication stream, and
    those of a first flush, through host memory."""
    streams, made = ["compute"], []

    @contextmanager
    def stream(name: str):
        streams.append(name)
        yield
        streams.pop()

    def new_buffer(message: object) -> torch.Tensor:
        made.append(streams[-1])
        return torch.zeros(1)

    def done(*_: object) -> Work:
        work = Work()
        work.left.set()
        return work

    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    channels = SimpleNamespace(rank=1, members=[0, 1, 2], on_nccl=on_nccl, send=done, receive=done)
    mail = Mail(build("gpipe", pp=3, num_microbatches=4), channels, new_buffer, {})  # type: ignore[arg-type]
    mail.receive(0, "F", (0, 0))
    with stream("communication"):
        mail.send(torch.zeros(1), 2, "F")
    # The first activation, the second one ahead, and the first gradient; without NCCL all, as they are small.
    assert made == ["compute"] * (3 if on_nccl else 8)


def noted(nbytes: int) -> tuple[Mail, list[str]]:
    """A rank that takes 4 activations of `nbytes` each and hands them on, and what it does in order."""
    events: list[str] = []

    def noting(way: str):
        def exchange(*_: object) -> SimpleNamespace:
            events.append(way)
            return SimpleNamespace(wait=lambda: events.append("wait"))

        return exchange

    channels = SimpleNamespace(rank=1, members=[0, 1, 2], on_nccl=False, send=noting("send"), receive=noting("post"))
    schedule = build("gpipe", pp=3, num_microbatches=4)

    def new_buffer(message: object) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    return Mail(schedule, channels, new_buffer, {}, forward_only=True), events  # type: ignore[arg-type]


def test_the_next_large_receive_is_posted_after_what_leaves_first():
    mail, events = noted(SMALL)
    mail.receive(0, "F", (0, 0))
    mail.send(torch.empty(1), 2, "F")
    assert events == ["post", "post", "wait", "send", "post"]


def test_a_receive_is_always_posted_before_a_wait():
    """Also where nothing is sent in between: a sender of a large message waits for it."""
    mail, events = noted(SMALL)
    mail.receive(0, "F", (0, 0))
    mail.receive(0, "F", (0, 1))
    assert events == ["post", "post", "wait", "post", "post", "wait"]


def test_small_receives_are_all_posted_at_once():
    mail, events = noted(SMALL // 4)
    for microbatch in range(4):
        mail.receive(0, "F", (0, microbatch))
        mail.send(torch.empty(1), 2, "F")
    assert events == ["post"] * 4 + ["wait", "send"] * 4
