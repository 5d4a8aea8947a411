"""Sums of float64 numbers over ranks: every rank's parts in one row, one all-reduce, the same result everywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megaaccum.distributed import host_all_reduce
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
        wait: Callable[[], object] = host_all_reduce.post_sum(flat, group)
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
