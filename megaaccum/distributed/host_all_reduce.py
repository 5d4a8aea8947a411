"""All-reduce (sum) of a tensor in host memory by recursive doubling, on a background thread.

gloo's all-reduce is a ring: 2 (n - 1) messages one after another, 2,046 on 1,024 ranks. Here every rank exchanges its
sum with the rank 1, 2, 4, ... away: log2(n) messages one after another, 10 on 1,024 ranks, 2 more if n is no power of
two. It needs no groups of its own. Both ranks of a pair add the same two numbers, so all ranks have the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

RING_UP_TO = 8
"""Ranks up to which gloo's ring is used: those of a node, whose messages are short."""
TAG = 15
"""gloo's tag of these messages; the pipeline's are below."""


def post_sum(row: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """Begin to replace `row`, in host memory, by its sum over `group`, default the world. Returns a function that waits
    for it and raises its error."""
    among = group or dist.group.WORLD
    assert among is not None, "torch.distributed is initialised"
    if among.size() <= RING_UP_TO:
        return dist.all_reduce(row, group=among, async_op=True).wait
    ended: Future[None] = Future()

    def run() -> None:
        try:
            sum_in_pairs(row, among)
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="megaaccum-sum", daemon=True).start()
    return ended.result


def sum_in_pairs(row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace `row` by its sum over `group`. Ranks beyond the largest power of two give their numbers to a partner
    first and receive the sum at the end."""
    rank, theirs = group.rank(), torch.empty_like(row)
    paired = 1 << (group.size().bit_length() - 1)
    if rank >= paired:
        group.send([row], rank - paired, TAG).wait()
        group.recv([row], rank - paired, TAG).wait()
        return
    has_partner = rank + paired < group.size()
    if has_partner:
        group.recv([theirs], rank + paired, TAG).wait()
        row += theirs
    distance = 1
    while distance < paired:
        sending = group.send([row], rank ^ distance, TAG)
        group.recv([theirs], rank ^ distance, TAG).wait()
        sending.wait()
        row += theirs
        distance *= 2
    if has_partner:
        group.send([row], rank + paired, TAG).wait()
