"""Ranks as threads of one process, over gloo: agreement, and the sum of a speculative step (`benchmarks scale`)."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

PATIENCE = 120.0
"""Seconds until a thread gives up."""

Measured = dict[str, Any]


@dataclass
class Threads:
    """Ranks of one gloo group as threads of this process. Two connect at their first message: a mesh of 256 would be
    65,280 sockets of one process."""

    size: int

    def __post_init__(self) -> None:
        store = dist.HashStore()
        self.groups: list[Any] = [None] * self.size
        self.here = threading.local()
        with mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
            self.run(lambda rank: self._join(store, rank))

    def _join(self, store: Any, rank: int) -> None:
        wait = timedelta(seconds=PATIENCE)
        self.groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("scale", store), rank, self.size, wait)

    def run(self, action: Callable[[int], Any]) -> tuple[float, list[Any]]:
        """Call `action` with each rank in a thread of its own. Returns the seconds of all and their results."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank_of(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = action(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(self.size)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if errors or any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"{self.size} ranks as threads: {errors[:1] or 'some do not end'}")
        return time.perf_counter() - began, results

    def as_dist(self) -> Any:
        """The part of torch.distributed that `agreement` uses, for the rank of the thread that calls it."""

        def mine() -> Any:
            return self.groups[self.here.rank]

        def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            mine().allreduce([tensor], options).wait()

        def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
            rows = list(output.view(self.size, -1).unbind())
            mine().allgather([rows], [tensor]).wait()

        return SimpleNamespace(
            all_reduce=all_reduce, all_gather_into_tensor=all_gather, get_world_size=lambda group=None: self.size,
            ReduceOp=dist.ReduceOp, ProcessGroup=dist.ProcessGroup,
        )  # fmt: skip


def sums(sizes: list[int]) -> list[Measured]:
    """The sum of a speculative step, by gloo's ring and in pairs, by number of ranks."""
    from megaaccum.distributed import sums

    rows = []
    for size in sizes:
        ranks = Threads(size)

        def in_pairs(rank: int, ranks: Threads = ranks) -> float:
            sums.sum_in_pairs(row := torch.full((12,), float(rank), dtype=torch.float64), ranks.groups[rank])
            return float(row[0])

        def ring(rank: int, ranks: Threads = ranks) -> float:
            ranks.groups[rank].allreduce([row := torch.full((12,), float(rank), dtype=torch.float64)]).wait()
            return float(row[0])

        found: Measured = {"ranks": size}
        for name, action in (("ring", ring), ("pairs", in_pairs)):
            ranks.run(action)  # connects
            times = []
            for _ in range(5):
                seconds, results = ranks.run(action)
                assert set(results) == {size * (size - 1) / 2}, "every rank has the sum"
                times.append(seconds)
            found[name] = statistics.median(times)
        rows.append(found)
    return rows


def message(times: int = 2000) -> float:
    """Seconds of one message of 12 float64 numbers between two ranks of gloo on this machine."""
    ranks = Threads(2)

    def to_and_fro(rank: int) -> None:
        row, group = torch.zeros(12, dtype=torch.float64), ranks.groups[rank]
        for number in range(2 * times):
            way = group.send if number % 2 == rank else group.recv
            way([row], 1 - rank, 1).wait()

    ranks.run(to_and_fro)
    return ranks.run(to_and_fro)[0] / (2 * times)


def agreement(size: int) -> Measured:
    """Check that `size` ranks agree, and find that every one differs."""
    from megaaccum.distributed import agreement as agreeing
    from megaaccum.errors import RankDisagreement

    ranks = Threads(size)

    def agree(rank: int) -> bool:
        return not agreeing.check_agreement("plan", step=1, num_microbatches=8).told

    def disagree(rank: int) -> int:
        try:
            agreeing.check_agreement("plan", step=rank)
        except RankDisagreement as error:
            return len(str(error))
        return 0

    with mock.patch.object(agreeing, "dist", ranks.as_dist()):
        ranks.run(agree)
        seconds, agreed = ranks.run(agree)
        differing, lengths = ranks.run(disagree)
    assert all(agreed) and all(lengths), "ranks agree, then every one differs"
    alone = Threads(1)
    with mock.patch.object(agreeing, "dist", alone.as_dist()):
        seconds_alone = statistics.median(alone.run(agree)[0] for _ in range(50))
    described = time.perf_counter()
    agreeing.describe("step", range(16_384))
    described = time.perf_counter() - described
    return {
        "ranks": size, "seconds": seconds, "differing_seconds": differing, "longest_message": max(lengths),
        "seconds_alone": seconds_alone, "describe_16384_seconds": described,
    }  # fmt: skip
