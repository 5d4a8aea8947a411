"""Bytes that cross ranks in a step, counted where every collective passes. lab/planner/footprint.py predicts them.

A process group is a key here, and some of torch's do not declare their names: `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megaaccum.distributed.groups import Groups


@dataclass(slots=True)
class Count:
    """Traffic of one lane: calls; bytes that this rank receives (sends, for a `send`) from other ranks by the cheapest
    algorithm; seconds that the host spent in the calls and in waiting for them, on a GPU fewer than they took."""

    calls: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, calls: int, num_bytes: float, seconds: float) -> None:
        """Count these too."""
        self.calls += calls
        self.num_bytes += num_bytes
        self.seconds += seconds


Traffic = dict[str, Count]
"""By lane, `collective/group/dtype`. group: its name in Groups (dp_cp, pp, tp, ...), `world`, or `other`."""


SHARE: dict[str, Callable[[int], float]] = {
    "all_gather": lambda k: (k - 1) / k,
    "reduce_scatter": lambda k: (k - 1) / k,
    "all_to_all": lambda k: 1.0,
    "all_reduce": lambda k: 2 * (k - 1) / k,
    "broadcast": lambda k: 1.0,
    "reduce": lambda k: (k - 1) / k,
    "gather": lambda k: (k - 1) / k,
    "scatter": lambda k: (k - 1) / k,
    "send": lambda k: 1.0,
}
"""Bytes that cross, per byte of the whole buffer, over k ranks (a ring's; Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005; a reduction to one rank is a chain, whose first rank receives nothing: the
mean). A receive is counted as the send; an all-to-all, whose ranks may send unequal parts, is counted in bytes of other
ranks."""


@dataclass
class Meter:
    """Counts this rank's collectives, over groups of more than one rank, while it is on."""

    groups: Groups | None = None
    most_receiving: int = 0
    """Most bytes of receive buffers that were posted and not read yet, while it was on last."""
    _receiving: int = 0
    _counts: dict[tuple[str, Any, torch.dtype], Count] = field(default_factory=dict)
    """By collective, group and dtype, in bytes of the whole buffer."""
    _lanes: dict[tuple[str, Any, torch.dtype], tuple[str, float]] = field(default_factory=dict)
    """(name, share of the buffer that crosses) by collective, group and dtype."""

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Context that counts traffic; the yielded counts are filled in at its end."""
        from megaaccum.upstream import pytorch

        found: Traffic = {}
        self._counts, self._receiving, self.most_receiving = {}, 0, 0

        def note(collective: str, group: Any, dtype: torch.dtype, num_bytes: int, seconds: float, calls: int) -> None:
            if collective == "recv":
                self._receiving += num_bytes if calls else -num_bytes
                self.most_receiving = max(self.most_receiving, self._receiving)
                return
            self._counts.setdefault((collective, group, dtype), Count()).add(calls, calls * num_bytes, seconds)

        with pytorch.watched_collectives(note):
            yield found
        found.update(self.pop())

    def pop(self) -> Traffic:
        """The traffic since it is on, or since the last call."""
        counts, self._counts = self._counts, {}
        found: Traffic = {}
        for key, count in counts.items():
            lane, share = self._lanes.get(key) or self._new_lane(*key)
            found.setdefault(lane, Count()).add(count.calls, share * count.num_bytes, count.seconds)
        return dict(sorted(found.items()))

    def _new_lane(self, collective: str, group: Any, dtype: torch.dtype) -> tuple[str, float]:
        among = self._names().get(group.group_name) or ("pp" if self._is_pipeline(group) else "other")
        name = f"{collective}/{among}/{str(dtype).removeprefix('torch.')}"
        return self._lanes.setdefault((collective, group, dtype), (name, SHARE[collective](group.size())))

    def _is_pipeline(self, group: Any) -> bool:
        """Whether it has the ranks of the pipeline, whose lanes over NCCL are groups of their own (executor/p2p.py)."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks
        return self.groups is not None and ranks(group) == ranks(self.groups.pp)

    def _names(self) -> dict[str, str]:
        import torch.distributed as dist

        names: dict[str, str] = {dist.group.WORLD.group_name: "world"} if dist.group.WORLD is not None else {}
        if self.groups is not None:
            for name in ("expt_tp", "tp_ep", "tp", "cp", "ep", "pp", "dp", "dp_cp", "embd", "tp_dp_cp"):
                if (group := getattr(self.groups.collection, name, None)) is not None:
                    names[group.group_name] = name
        return names
