"""What is sent is let go when it has left, and not before; with and without a thread that waits."""

import threading
import time
import weakref

import pytest
import torch

from megaaccum.schedule.p2p import _Outbox

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
    tensor = torch.zeros(3)
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


@pytest.mark.parametrize("polls", [False, True])
def test_a_send_that_fails_is_told(polls):
    outbox, work = _Outbox(polls=polls), Work(RuntimeError("connection closed by peer"))
    sent(outbox, work)
    work.left.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        outbox.close()
