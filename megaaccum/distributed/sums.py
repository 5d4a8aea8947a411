"""Sums of float64 numbers over ranks: every rank's parts in one row, one all-reduce, the same result everywhere."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist

from megaaccum.platform import cpu


def sums_over_ranks(parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> list[float]:
    """The sum over the ranks of `group` of each part: a scalar, or the numbers of micro-batches at their positions,
    whose sum is the float64 nearest to the exact one. float64, one all-reduce."""
    return post_sums(parts, group)()


def post_sums(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, *, on_host: bool = False
) -> Callable[[], list[float]]:
    """Start `sums_over_ranks`. Returns a function that waits for the sums. on_host: in host memory, over a group of
    gloo's; default: on this rank's device."""
    if not parts:
        return list
    flat = _in_a_row(parts, torch.device("cpu") if on_host else cpu.device())
    if on_host:
        wait: Callable[[], object] = post_host_sum(flat, group)
    else:
        work = dist.all_reduce(flat, group=group, async_op=True)
        wait = bool if work is None else work.wait

    def sums() -> list[float]:
        wait()
        numbers = iter(flat.tolist())
        totals = [list(itertools.islice(numbers, part.numel())) for part in parts]
        return [math.fsum(total) if all(map(math.isfinite, total)) else sum(total) for total in totals]

    return sums


def _in_a_row(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """`parts` as one row on `device`: a copy for all that lie elsewhere, for which the host need not wait."""
    if elsewhere := [part.reshape(-1) for part in parts if part.device.type != device.type]:
        row = torch.cat(elsewhere)
        moved = row.to(device) if device.type == "cpu" else cpu.to_device(row)
        coming = iter(moved.split([part.numel() for part in elsewhere]))
        parts = [part if part.device.type == device.type else next(coming) for part in parts]
    return torch.cat([part.reshape(-1) for part in parts])


# --- in host memory ---------------------------------------------------------------------------------------------------

# gloo's all-reduce is a ring: 2 (n - 1) messages one after another, 2,046 on 1,024 ranks. Here every rank exchanges its
# sum with the rank 1, 2, 4, ... away: log2(n) messages one after another, 10 on 1,024 ranks, 2 more if n is no power of
# two. It needs no groups of its own. Both ranks of a pair add the same two numbers, so all ranks have the same bits.

RING_UP_TO = 8
"""Ranks up to which gloo's ring is used: those of a node, whose messages are short."""
TAG = 15
"""gloo's tag of these messages; the pipeline's are below."""


def post_host_sum(row: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
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
