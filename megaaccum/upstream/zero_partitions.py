"""ZeRO-3's parameters in parts: what DeepSpeed keeps of them, and their two collectives (deepspeed 0.19.8).

DeepSpeed's own take a Python slice of each tensor and rank: at 256 ranks 0.7 ms for each parameter of a gather and 1.3
of a reduce-scatter (measured on a CPU core), which bounds `streaming` from there on. Here an operator arranges the rows
of all ranks, whatever their number, with the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist

MOST_GATHERED = 1 << 27
"""Elements after which another all-gather begins. Of each in turn, twice the memory is needed while its rows are copied
to the parameters; a larger parameter is not copied."""


class _Gathering:
    """An all-gather under way: one collective for parameters of one group and precision, then one strided copy."""

    def __init__(self, params: list[torch.nn.Parameter]):
        self._params = params
        parts = [partitioned(param).ds_tensor.view(-1) for param in params]
        mine = torch.cat(parts) if len(parts) > 1 else parts[0]
        group, self._widths = partitioned(params[0]).ds_process_group, [part.numel() for part in parts]
        self._rows = mine.new_empty(group.size(), mine.numel())
        self._work: Any = dist.all_gather_into_tensor(self._rows.view(-1), mine, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        whole = [self._rows]  # a single parameter's rows are the parameter
        if len(self._params) > 1:
            whole = [self._rows.new_empty(len(self._rows), width) for width in self._widths]
            torch.split_with_sizes_copy(self._rows, self._widths, dim=1, out=whole)
        for param, rows in zip(self._params, whole, strict=True):
            _make_whole(param, rows)
        del self._rows


class Gather:
    """Gathers under way. A second wait does nothing."""

    def __init__(self, gathers: list[_Gathering]):
        self._gathers = gathers

    def wait(self) -> None:
        while self._gathers:  # each lets its rows go before the next makes its copy
            self._gathers.pop(0).wait()


def partitioned(param: torch.nn.Parameter) -> Any:
    """`param` with what zero.Init gave it: ds_id, ds_numel, ds_shape, ds_status (an enumeration's), ds_tensor
    (this rank's part), ds_process_group, and the method partition_numel()."""
    return param


def start_gather(params: list[torch.nn.Parameter]) -> Gather:
    """Begin to make `params` whole, of which none is: by one all-gather for each group and precision, and for
    MOST_GATHERED elements."""
    together: defaultdict[object, list[torch.nn.Parameter]] = defaultdict(list)
    elements: Counter[object] = Counter()
    for param in params:
        marks = partitioned(param)
        if marks.ds_process_group.size() == 1:
            _make_whole(param, marks.ds_tensor)
            continue
        marks.ds_status = type(marks.ds_status).INFLIGHT
        kind = marks.ds_process_group, marks.ds_tensor.dtype
        if marks.ds_numel >= MOST_GATHERED:  # alone: its rows are the parameter, without a copy
            together[kind, -1 - marks.ds_id].append(param)
            continue
        elements[kind] += marks.ds_numel
        together[kind, elements[kind] // MOST_GATHERED].append(param)
    return Gather([_Gathering(each) for each in together.values()])


def reduce_scatter(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's parts of the averages of `tensors` over the group; they may be overwritten. It takes the place of
    DeepSpeed's `reduce_scatter_coalesced`."""
    ranks, rank = group.size(), group.rank()
    flats = [tensor.view(-1) for tensor in tensors]
    is_whole = len(flats) == 1 and flats[0].numel() % ranks == 0
    rows = flats[0].view(ranks, -1) if is_whole else torch._chunk_cat(flats, 0, ranks)
    rows.div_(ranks)
    dist.reduce_scatter_tensor(rows[rank], rows.view(-1), group=group)
    widths = [-(-flat.numel() // ranks) for flat in flats]
    counts = [max(0, min(width, flat.numel() - rank * width)) for flat, width in zip(flats, widths, strict=True)]
    return [part[:count] for part, count in zip(rows[rank].split(widths), counts, strict=True)]


def _make_whole(param: torch.nn.Parameter, rows: torch.Tensor) -> None:
    """Give a parameter its elements, of all ranks in a row; what pads the last rank's part is left out."""
    marks = partitioned(param)
    param.data = rows.view(-1)[: marks.ds_numel].view(marks.ds_shape)
    marks.ds_status = type(marks.ds_status).AVAILABLE


def release(params: list[torch.nn.Parameter]) -> None:
    """Free the elements of `params` but this rank's partitions. DeepSpeed's own makes a dozen texts of each parameter
    for a log that is off: 40 us a step and parameter."""
    for param in params:
        if param.is_cuda:
            param.data.record_stream(torch.cuda.current_stream())  # it may have been gathered on another
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        partitioned(param).ds_status = type(partitioned(param).ds_status).NOT_AVAILABLE
