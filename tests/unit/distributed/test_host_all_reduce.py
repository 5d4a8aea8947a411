"""The sum in pairs: few messages one after another, the same bits on all ranks, and no groups of its own."""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megaaccum.distributed import sums

PATIENCE = 20.0
"""Seconds until a rank gives up waiting for a message."""


class Done:
    def __init__(self, wait: Callable[[], None] = lambda: None):
        self.wait = wait


class Ranks:
    """Ranks as threads of one process, which send through queues. rounds: messages one after another on the longest
    way to each rank's present numbers."""

    def __init__(self, size: int):
        self.size_, self.rounds, self.num_sent = size, [0] * size, [0] * size
        self._boxes: defaultdict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)

    def group(self, rank: int) -> Any:
        return Seat(self, rank)

    def box(self, source: int, target: int) -> queue.Queue[Any]:
        return self._boxes.setdefault((source, target), queue.Queue())


class Seat:
    """The group as one rank sees it."""

    def __init__(self, ranks: Ranks, rank: int):
        self._ranks, self._rank = ranks, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks.size_

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Done:
        self._ranks.num_sent[self._rank] += 1
        self._ranks.box(self._rank, target).put((tensors[0].clone(), self._ranks.rounds[self._rank]))
        return Done()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Done:
        def wait() -> None:
            content, rounds = self._ranks.box(source, self._rank).get(timeout=PATIENCE)
            tensors[0].copy_(content)
            self._ranks.rounds[self._rank] = 1 + max(rounds, self._ranks.rounds[self._rank])

        return Done(wait)


def summed(size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Ranks]:
    """Each rank's numbers before and after."""
    before = [torch.rand(5, dtype=torch.float64) / 3 for _ in range(size)]
    rows, ranks = [row.clone() for row in before], Ranks(size)
    threads = [
        threading.Thread(target=sums.sum_in_pairs, args=(row, ranks.group(rank))) for rank, row in enumerate(rows)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return before, rows, ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64])
def test_every_rank_has_the_same_bits_of_the_sum(size):
    before, rows, _ = summed(size)
    assert all(torch.equal(row, rows[0]) for row in rows)
    expected = [math.fsum(column) for column in torch.stack(before).T.tolist()]
    assert rows[0].tolist() == pytest.approx(expected, rel=1e-15 * size)


@pytest.mark.parametrize("size", [8, 12, 64, 100])
def test_messages_one_after_another_are_the_logarithm_of_those_of_a_ring(size):
    *_, ranks = summed(size)
    log = size.bit_length() - 1
    assert max(ranks.rounds) == log + 2 * (size != 1 << log)
    assert max(ranks.num_sent) <= log + 1
    assert max(ranks.rounds) < 2 * (size - 1)  # gloo's ring


def test_a_node_keeps_gloo_s_ring_and_its_bits(monkeypatch):
    """One all-reduce, whose Work is waited for; beyond, a thread sends to the group that there is."""
    asked: list[int] = []

    def all_reduce(row, *, group, async_op):
        asked.append(group.size())
        return Done()

    monkeypatch.setattr(sums.dist, "all_reduce", all_reduce)
    sums.post_host_sum(torch.ones(2), Ranks(sums.RING_UP_TO).group(0))()
    assert asked == [sums.RING_UP_TO]
    ranks = Ranks(sums.RING_UP_TO + 1)
    rows = [torch.full((2,), float(rank)) for rank in range(ranks.size_)]
    waits = [sums.post_host_sum(row, ranks.group(rank)) for rank, row in enumerate(rows)]
    for wait in waits:
        wait()
    assert asked == [sums.RING_UP_TO]
    assert {float(row[0]) for row in rows} == {float(sum(range(ranks.size_)))}


def test_an_error_of_a_message_is_raised_where_the_sum_is_waited_for():
    class Cut(Seat):
        def recv(self, tensors, source, tag):
            raise RuntimeError("connection closed by peer")

    wait = sums.post_host_sum(torch.ones(2), Cut(Ranks(sums.RING_UP_TO + 1), 0))
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait()
