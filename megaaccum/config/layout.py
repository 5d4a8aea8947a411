"""The resolved layout of a run's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megaaccum.schedule.actions import stage_map
from megaaccum.schedule.registry import by_executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The resolved layout of the ranks: world_size = tp * cp * pp * dp. The same on every rank."""

    world_size: int
    """Ranks of the run."""
    tp: int
    """Ranks that share each matrix."""
    pp: int
    """Pipeline ranks."""
    vpp: int
    """Model chunks per pipeline rank."""
    cp: int
    """Ranks that share each sequence."""
    ep: int
    """Ranks over which experts are spread."""
    etp: int
    """Ranks that share each expert's matrices."""
    dp: int
    """Ranks that see different sequences."""
    schedule: str
    """Pipeline schedule: none, a name that megaaccum.schedule.registry knows, or the path of a .csv table."""
    placement: Literal["loop", "v"] = "loop"
    """The stages of a rank's chunks: round-robin (loop), or rank and 2 * pp - 1 - rank (v)."""

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts: world_size / (etp * ep * pp)."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.vpp

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages, 0 to num_stages - 1 in model order, that global rank `rank` holds, chunk by chunk."""
        return stage_map(self.placement, pp=self.pp, chunks=self.vpp)[rank // (self.world_size // self.pp)]

    @property
    def splits_backward(self) -> bool:
        """Whether megaaccum's executor runs the schedule: it does every backward in two parts."""
        return by_executor(self.schedule)
